"""The cost of serving over HTTP, as differences to the same points in process."""

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from batchlab import transports
from batchlab.plots.captions import attach
from batchlab.plots.labels import OTHER_AXIS
from batchlab.plots.limits import End, fixed_at, label_ends, limit_axis, panel_title, panels
from batchlab.plots.select import along, require
from batchlab.plots.style import MUTED, engine_name, styled

MARKERS = ("o", "s", "D", "^", "v")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#4D4D4D")
PANELS = (
    ("throughput_lost", "throughput lost over HTTP", lambda v, _: f"{100 * v:.0f}%"),
    ("tpot_added_ms", "TPOT added over HTTP (ms)", lambda v, _: f"{v:g}"),
)


@styled
def serving_cost(pairs: pd.DataFrame, points: pd.DataFrame, *, defaults: object = None) -> list[Axes]:
    """Throughput lost and TPOT added, a line a dataset (and engine), a row of panels for each limit that varies.

    `pairs`: what `transports.pairs` returns, of one request rate; `points`: those it was made from, for the caption.
    Along a limit the other one is at its default.
    """
    require(pairs, "max_batch_size", "max_num_tokens", "dataset", *(name for name, _, _ in PANELS))
    lines = {}
    for axis in OTHER_AXIS:
        line = along(pairs, axis, defaults)
        # a dataset of which one value is there makes no line, and may be anywhere in the plane
        enough = line.groupby(["dataset", "engine"])[axis].transform("nunique") > 1
        if enough.any() or axis == "max_batch_size":
            lines[axis] = line[enough] if enough.any() else line
    axes = panels(2 * len(lines), height_in=3.6)
    for place, (axis, line) in enumerate(lines.items()):
        for ax, panel in zip(axes[2 * place :], PANELS, strict=False):
            _panel(ax, line, axis, *panel)
    shown = transports.halves(points, pd.concat(lines.values()))
    attach(axes[0].figure, shown.drop(columns="n", errors="ignore"), "a dot is the difference of two means")
    return axes


def _panel(ax: Axes, line: pd.DataFrame, axis: str, metric: str, words: str, tick: Callable[[float, int], str]) -> None:
    limit_axis(ax, line[axis].tolist(), axis)
    ax.axhline(0, color=MUTED, linewidth=0.9)
    several = line["engine"].nunique() > 1
    ends: list[End] = []
    for n, ((dataset, engine), rows) in enumerate(line.groupby(["dataset", "engine"], sort=False)):
        look = {"color": COLOURS[n % len(COLOURS)], "marker": MARKERS[n % len(MARKERS)]}
        ax.plot(rows[axis], rows[metric], linestyle="-", **look)
        name = f"{dataset}, {engine_name(engine)}" if several else str(dataset)
        ends.append((float(rows[axis].iloc[-1]), float(rows[metric].iloc[-1]), name, look["color"]))
    low, high = min(0.0, line[metric].min()), max(0.0, line[metric].max())
    room = 0.12 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    ax.yaxis.set_major_formatter(FuncFormatter(tick))
    label_ends(ax, ends, line[axis].max())
    panel_title(ax, words[0].upper() + words[1:], fixed_at(line, axis))
    ax.set_ylabel(words[0].upper() + words[1:])
