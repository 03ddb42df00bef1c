"""The running batch: its mean against the limit, and one cell's iterations over time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from batchlab.errors import UsageError
from batchlab.plots.captions import attach
from batchlab.plots.labels import dataset_title, whole
from batchlab.plots.legend import legend, many, marker_size
from batchlab.plots.limits import (
    draw_series,
    fixed_at,
    label_ends,
    limit_axis,
    missing_text,
    panel_title,
    panels,
)
from batchlab.plots.select import along, datasets, recorded, require, series, several_transports
from batchlab.plots.style import MUTED, colour, engine_name, new_figure, series_style, styled

MOST_POINTS = 600  # of a timeline: more would only make the file larger
WIDE = {"running": "running", "waiting": "waiting", "prefill_tokens": "prefill", "decode_tokens": "decode"}


@styled
def running_batch(
    points: pd.DataFrame, ax: Axes | None = None, *, metric: str = "running_batch_mean"
) -> Axes:
    """One dataset's mean running batch against max_batch_size (log2), and the line "running = limit"."""
    require(points, "max_batch_size", metric)
    if ax is None:
        ax = new_figure(5.6, 3.9).subplots()
        attach(ax.figure, points)
        legend(ax.figure, points)
    limits = points["max_batch_size"].dropna().astype(float)
    limit_axis(ax, limits.tolist(), "max_batch_size")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ends = []
    if len(limits):
        ends_at = np.array([limits.min(), limits.max()])
        ax.plot(ends_at, ends_at, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        ends.append((float(ends_at[1]), float(ends_at[1]), "limit", MUTED))
    named, drawn = several_transports(points), list(series(points))
    lines = [
        draw_series(
            ax,
            rows,
            "max_batch_size",
            metric,
            series_style(*key, name_transport=named),
            size=marker_size(place, len(drawn)),
        )
        for place, (key, rows) in enumerate(drawn)
    ]
    ends += [] if many(points) else lines
    shown = points.loc[recorded(points), metric].dropna()
    if len(limits):
        low = min(limits.min(), shown[shown > 0].min()) if (shown > 0).any() else limits.min()
        ax.set_ylim(low / 2**0.5, limits.max() * 2**0.5)
    label_ends(ax, ends, limits.max() if len(limits) else 0.0)
    panel_title(
        ax,
        dataset_title(points.iloc[0]) if len(points) else "",
        " · ".join(
            filter(None, [fixed_at(points, "max_batch_size"), missing_text(points, "max_batch_size")])
        ),
    )
    ax.set_ylabel("Mean running batch size (requests)")
    return ax


@styled
def running_batches(
    points: pd.DataFrame, *, metric: str = "running_batch_mean", defaults: Any = None
) -> list[Axes]:
    """`running_batch`, one panel a dataset, max_num_tokens at its default."""
    line = along(points, "max_batch_size", defaults)
    names = datasets(line) or [""]
    axes = panels(len(names), height_in=3.9)
    for ax, name in zip(axes, names, strict=True):
        running_batch(line[line["dataset"] == name], ax, metric=metric)
    attach(axes[0].figure, line)
    legend(axes[0].figure, line)
    return axes


def bins(iterations: pd.DataFrame, most: int = MOST_POINTS) -> tuple[pd.DataFrame, int]:
    """Iterations averaged over runs of k consecutive ones so that at most `most` rows are left; (rows, k).

    Times are the first of the run; preemptions are summed, everything else is the mean.
    """
    rows = iterations.sort_values("scheduled_s", kind="stable").reset_index(drop=True)
    size = max(1, -(-len(rows) // most))
    if size == 1:
        return rows, 1
    how = {c: "mean" for c in rows if pd.api.types.is_numeric_dtype(rows[c])}
    how |= {"scheduled_s": "first", "output_s": "last", "preemptions": "sum"}
    return rows.groupby(rows.index // size).agg(how), size


@styled
def timeline(iterations: pd.DataFrame, cell: Mapping[str, Any] | pd.Series) -> list[Axes]:
    """One cell's iterations over time: running, waiting, tokens (prefill and decode), KV use.

    `iterations` has the columns of records.ITERATIONS; `cell` is the frame's row, for title and caption.
    UsageError when there is no iteration to show.
    """
    if iterations.empty:
        raise UsageError(
            f"cell {cell.get('cell', '?')} has no recorded iterations; choose one that has a trace"
        )
    require(iterations, "scheduled_s", *WIDE, "kv_use", "preemptions")
    rows, size = bins(iterations)
    start = rows["scheduled_s"].iloc[0]
    t = rows["scheduled_s"].to_numpy(float) - start
    stop = max(float(iterations["output_s"].max()) - start, float(t[-1]))
    t, hue = np.append(t, stop), colour(str(cell["engine"]))
    figure = new_figure(9.6, 6.2)
    axes = list(figure.subplots(4, 1, sharex=True, height_ratios=[1.1, 1, 1.3, 0.8]))

    def step(ax: Axes, values: Any, shade: str, **options: Any) -> None:
        heights = np.asarray(values, float)
        ax.stairs(heights, t, color=shade, **options)

    step(axes[0], rows["running"], hue, linewidth=1.4, baseline=None)
    limit_line(axes[0], cell.get("max_batch_size"), "max_batch_size")
    step(axes[1], rows["waiting"], hue, linewidth=1.4, baseline=None)
    decode, prefill = rows["decode_tokens"].to_numpy(float), rows["prefill_tokens"].to_numpy(float)
    step(axes[2], decode + prefill, "#9ecae1", baseline=decode, fill=True, linewidth=0)
    step(axes[2], decode, hue, fill=True, linewidth=0)
    limit_line(axes[2], cell.get("max_num_tokens"), "max_num_tokens")
    step(axes[3], rows["kv_use"].fillna(0), hue, linewidth=1.4, baseline=None)
    axes[3].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if rows["kv_use"].max() > 0.05 else None))
    preempted = rows.loc[rows["preemptions"] > 0, "scheduled_s"].to_numpy(float) - start
    if len(preempted):
        axes[3].plot(
            preempted, np.zeros(len(preempted)), linestyle="none", marker="|", color="#D55E00", markersize=9
        )
    count = int(iterations["preemptions"].sum())
    for ax, (name, unit) in zip(
        axes,
        [
            ("Running", "requests"),
            ("Waiting", "requests"),
            ("Tokens", "per iteration"),
            ("KV cache", "in use"),
        ],
        strict=True,
    ):
        ax.set_ylabel(f"{name}\n({unit})")
        ax.set_ylim(0, max(ax.get_ylim()[1], 1e-3))
        ax.grid(axis="x", visible=False)
    for text, shade, height in [("prefill", "#3f8fc4", 0.62), ("decode", hue, 0.3)]:
        axes[2].text(1.01, height, text, transform=axes[2].transAxes, color=shade, fontsize=9, ha="left")
    axes[3].set_xlabel("Time since the first iteration (s)")
    axes[3].set_xlim(0, stop)
    panel_title(
        axes[0],
        dataset_title(cell),
        f"{engine_name(str(cell['engine']))} · max_batch_size {whole(cell['max_batch_size'])} · "
        f"max_num_tokens {whole(cell['max_num_tokens'])} · {count} preemption{'' if count == 1 else 's'}",
    )
    figure.align_ylabels(axes)
    binned = f"{len(iterations)} iterations" + (f", means of {size}" if size > 1 else "")
    attach(figure, pd.DataFrame([dict(cell)]), note=binned)
    return axes


def limit_line(ax: Axes, value: Any, name: str) -> None:
    """A dashed line at a limit, if it does not dwarf what the panel shows; else its value in words."""
    if value is None or pd.isna(value):
        return
    top = ax.get_ylim()[1]
    if float(value) <= 3 * top:
        ax.axhline(float(value), color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        ax.text(
            1.01,
            float(value),
            "limit",
            transform=ax.get_yaxis_transform(),
            color=MUTED,
            fontsize=9,
            va="center",
        )
        ax.set_ylim(0, max(top, float(value) * 1.08))
    else:
        ax.text(
            1.01, 0.98, f"limit\n{whole(value)}", transform=ax.transAxes, color=MUTED, fontsize=8, va="top"
        )
