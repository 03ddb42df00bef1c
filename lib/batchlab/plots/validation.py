"""Simulated against measured: the error of every cell, and TensorRT-LLM beside NVIDIA's published throughput."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from batchlab.plots.labels import metric_words, number
from batchlab.plots.limits import limit_axis, panel_title, panels, plain_log_y
from batchlab.plots.style import MUTED, new_figure, styled

# Okabe and Ito's, as everywhere; the first is for the cells that were fitted on
SHADES = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#7A3E9D")
MARKERS = ("x", "o", "s", "^", "D", "v", "P", "*", "p")


EVEN = 0.1  # up to here the axis of errors is linear
SIDE = 2**0.75  # factor of room at both ends of the axis of batch sizes, for points beside each other


def _apart(sizes: list[float]) -> list[float]:
    """The batch sizes whose ticks do not touch: powers of two first, and others a third of an octave off all others."""
    shown: list[float] = []
    for size in sorted({s for s in sizes if s > 0}, key=lambda s: (np.log2(s) % 1 != 0, s)):
        if all(abs(np.log2(size / other)) > 0.34 for other in shown):
            shown.append(size)
    return sorted(shown)


@styled
def errors(compared: pd.DataFrame, goals: dict[str, float], sets: tuple[str, ...]) -> list[Axes]:
    """A panel a figure: simulated / measured - 1 of each cell over max_batch_size, the goal of the mean as a band. The
    axis is even up to ±10% and logarithmic beyond, since engines without constants of their own are far off.

    `compared` is what `validation.compare` returns, `goals` maps its figures to their goals, `sets` is the order of
    its sets.
    """
    figures = [f for f in goals if (compared["figure"] == f).any()]
    axes = panels(len(figures), height_in=3.2)
    shown = [s for s in sets if (compared["set"] == s).any()]
    reach = 1.25 * max(EVEN, float(compared["error"].abs().max()))
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if t <= reach]
    sizes = _apart(compared["max_batch_size"].unique().tolist())
    for ax, figure in zip(axes, figures, strict=True):
        rows = compared[compared["figure"] == figure]
        limit_axis(ax, sizes, "max_batch_size")
        ax.axhspan(-goals[figure], goals[figure], color="#eeeeee", zorder=0, linewidth=0)
        ax.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
        for place, name in enumerate(shown):
            mine, look = rows[rows["set"] == name], sets.index(name) % len(SHADES)
            x = mine["max_batch_size"].to_numpy(float) * 2 ** (0.16 * (place - (len(shown) - 1) / 2))
            ax.plot(
                x, mine["error"], linestyle="none", marker=MARKERS[look], color=SHADES[look], markersize=4, alpha=0.75
            )
        ax.set_xlim(compared["max_batch_size"].min() / SIDE, compared["max_batch_size"].max() * SIDE)
        ax.set_yscale("symlog", linthresh=EVEN, linscale=1.5)
        ax.set_ylim(-reach, reach)
        ax.set_yticks([*(-t for t in reversed(ticks)), 0, *ticks])
        ax.set_yticks([], minor=True)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        words, _ = metric_words(figure)
        finite = ", at finite rates" if figure.startswith("ttft") else ""
        panel_title(ax, words[0].upper() + words[1:], f"band: the goal of the mean, ±{goals[figure]:.0%}{finite}")
        ax.set_ylabel("simulated / measured - 1")
        if len(sizes) > 10:
            ax.tick_params(axis="x", labelrotation=90, labelsize=8)
    handles = [
        Line2D([], [], linestyle="none", marker=MARKERS[i % len(SHADES)], color=SHADES[i % len(SHADES)], label=name)
        for i, name in ((sets.index(s), s) for s in shown)
    ]
    axes[0].figure.legend(handles=handles, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.0), ncols=4)
    return axes


@styled
def published(rows: pd.DataFrame) -> Axes:
    """Simulated over published output throughput of each row, both logarithmic, one colour a model and card.

    `rows` has model, hardware, tp, output_throughput_tok_s (published) and simulated_tok_s.
    """
    ax = new_figure(6.4, 4.4).subplots()
    ax.set_xscale("log")
    plain_log_y(ax)
    both = rows[["output_throughput_tok_s", "simulated_tok_s"]].to_numpy(float)
    ends = np.array([both.min() / 1.25, both.max() * 1.25])
    ax.plot(ends, ends, color=MUTED, linewidth=1)
    ax.fill_between(ends, ends * 0.9, ends * 1.1, color="#eeeeee", zorder=0, linewidth=0)
    for place, ((model, hardware, tp), group) in enumerate(rows.groupby(["model", "hardware", "tp"], sort=False)):
        label = f"{model} on {f'{tp} × ' if tp > 1 else ''}{hardware}"
        shade, marker = SHADES[1:][place % 5], MARKERS[1:][place % 5]
        ax.plot(
            group["output_throughput_tok_s"],
            group["simulated_tok_s"],
            linestyle="none",
            marker=marker,
            color=shade,
            markersize=5,
            label=label,
        )
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ticks = [t for t in (500, 1000, 2000, 5000, 10000, 20000, 50000) if ends[0] <= t <= ends[1]]
    ax.set_xticks(ticks, [number(t) for t in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("Published output throughput (tok/s)")
    ax.set_ylabel("Simulated (tok/s)")
    panel_title(ax, "TensorRT-LLM 1.0, FP8", "line: equal; band: ±10%")
    ax.legend(loc="upper left", fontsize=9)
    return ax
