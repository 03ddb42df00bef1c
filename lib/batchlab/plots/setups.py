"""One metric of several setups (a model on some cards) against max_batch_size, one colour a setup."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from batchlab.plots.labels import axis_label
from batchlab.plots.limits import limit_axis, panel_title, panels, plain_log_y
from batchlab.plots.style import engine_name, styled

SHADES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#4D4D4D", "#B8860B", "#7F7F7F")


@styled
def setups(frame: pd.DataFrame, metric: str, label: str | None = None) -> list[Axes]:
    """A panel a dataset, both axes logarithmic, a legend of the setups below. `frame` is `what_if.frame`'s."""
    names, datasets = list(dict.fromkeys(frame["setup"])), list(dict.fromkeys(frame["dataset"]))
    axes = panels(len(datasets), height_in=3.8)
    for ax, dataset in zip(axes, datasets, strict=True):
        limit_axis(ax, frame["max_batch_size"].tolist(), "max_batch_size")
        plain_log_y(ax)
        for place, name in enumerate(names):
            rows = frame[(frame["setup"] == name) & (frame["dataset"] == dataset)].sort_values("max_batch_size")
            good = rows[rows["valid"].astype(bool)]
            ax.plot(good["max_batch_size"], good[metric], color=SHADES[place % 10], linestyle="--", marker="s")
        shown = frame.loc[frame["dataset"] == dataset, metric].dropna()
        ax.set_ylim(shown.min() / 1.3, shown.max() * 1.3)
        tokens = frame["max_num_tokens"].unique()
        panel_title(ax, dataset, f"max_num_tokens {tokens[0]} · all requests at once" if len(tokens) == 1 else "")
        ax.set_ylabel(label or axis_label(metric))
    handles = [
        Line2D([], [], color=SHADES[n % 10], linestyle="--", marker="s", label=name) for n, name in enumerate(names)
    ]
    axes[0].figure.legend(
        handles=handles, title="Simulated", title_fontsize=9, fontsize=9, ncols=3, alignment="left",
        loc="upper left", bbox_to_anchor=(0.0, 0.0), handlelength=2.6,
    )  # fmt: skip
    kinds = ", ".join(dict.fromkeys(frame["step_times"]))
    engine = engine_name(frame["engine"].iloc[0])
    axes[0].figure.set_label(f"simulated, {engine}, {kinds}, nothing fitted, no power limit, n = 1 run a point")
    return axes
