"""The spread of TPOT over requests: a figure, and the article's table of largest and smallest TPOT."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.captions import attach
from batchlab.plots.labels import dataset_title
from batchlab.plots.limits import fixed_at, limit_axis, missing_text, panel_title, panels, plain_log_y
from batchlab.plots.select import SERIES, along, datasets, recorded, require, series, valid
from batchlab.plots.style import MUTED, new_figure, series_style, styled

COLUMNS = ("tpot_min_ms", "tpot_p50_ms", "tpot_max_ms")


def spread(cells: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Per dataset, series and axis value: tpot_min_ms, tpot_p50_ms, tpot_max_ms, ratio, n (valid repeats).

    From cells (a row a repeat), valid ones only: the smallest of the smallest, the median of the medians, the
    largest of the largest. A point without a valid repeat is not in the result.
    """
    require(cells, axis, "dataset", *COLUMNS)
    by = ["dataset", *[c for c in SERIES if c in cells], axis]
    good = cells[valid(cells)]
    table = (
        good.groupby(by, dropna=False, sort=False)
        .agg(
            tpot_min_ms=("tpot_min_ms", "min"),
            tpot_p50_ms=("tpot_p50_ms", "median"),
            tpot_max_ms=("tpot_max_ms", "max"),
            n=("tpot_max_ms", "size"),
        )
        .reset_index()
    )
    table["ratio"] = table["tpot_max_ms"] / table["tpot_min_ms"]
    order = {name: i for i, name in enumerate(datasets(cells))}
    return table.sort_values(
        ["dataset", axis],
        key=lambda s: s.map(order) if s.name == "dataset" else s,
        kind="stable",
        ignore_index=True,
    )


@styled
def tpot_spread(cells: pd.DataFrame, axis: str, ax: Axes | None = None) -> Axes:
    """One dataset's TPOT from the fastest to the slowest request, with the median, at each axis value."""
    if ax is None:
        ax = new_figure(5.6, 3.6).subplots()
        attach(ax.figure, cells, invalid="left out")
    limit_axis(ax, cells[axis].tolist(), axis)
    plain_log_y(ax)
    table = spread(cells, axis)
    groups = list(series(table)) if len(table) else []
    for place, ((engine, evidence, transport), rows) in enumerate(groups):
        look = series_style(engine, evidence, transport)
        rows = at_every(rows, axis, cells)
        x = rows[axis].to_numpy(float) * 2 ** (0.12 * (place - (len(groups) - 1) / 2))
        middle = rows["tpot_p50_ms"].to_numpy(float)
        ax.vlines(x, rows["tpot_min_ms"], rows["tpot_max_ms"], color=look.colour, linewidth=5, alpha=0.3)
        ax.plot(x, middle, marker=look.marker, linestyle=look.linestyle, color=look.colour, linewidth=1)
        name_parts(ax, look.label, look.colour, x, rows, single=len(groups) == 1)
    bad = cells[recorded(cells) & ~valid(cells)]
    left_out = f"{len(bad)} invalid repeats left out" if len(bad) else ""
    if not groups:
        ax.set_yticks([])
        ax.text(
            0.5,
            0.5,
            "no valid cell recorded yet",
            transform=ax.transAxes,
            ha="center",
            va="center",
            color=MUTED,
        )
    panel_title(
        ax,
        dataset_title(cells.iloc[0]) if len(cells) else "",
        " · ".join(filter(None, [fixed_at(cells, axis), missing_text(cells, axis), left_out])),
    )
    ax.set_ylabel("TPOT over requests (ms)")
    return ax


def at_every(rows: pd.DataFrame, axis: str, cells: pd.DataFrame) -> pd.DataFrame:
    """The rows with an empty one at each axis value that has no valid repeat, so that lines break."""
    every = pd.DataFrame({axis: sorted(cells[axis].dropna().unique())})
    return every.merge(rows, on=axis, how="left")


def name_parts(ax: Axes, label: str, colour: str, x: np.ndarray, rows: pd.DataFrame, *, single: bool) -> None:
    """Labels at the last bar: what top, dot and bottom are, or the engine's name where there are several."""
    rows, x = rows.dropna(subset=["tpot_p50_ms"]), x[rows["tpot_p50_ms"].notna()]
    last = rows.iloc[-1]
    marks = [("slowest", "tpot_max_ms"), ("median", "tpot_p50_ms"), ("fastest", "tpot_min_ms")]
    for text, column in marks if single else [(label, "tpot_p50_ms")]:
        ax.annotate(
            text,
            (x[-1], last[column]),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )


@styled
def tpot_spreads(cells: pd.DataFrame, axis: str, *, defaults: Any = None) -> list[Axes]:
    """`tpot_spread`, one panel a dataset, the other limit at its default."""
    line = along(cells, axis, defaults)
    names = datasets(line) or [""]
    axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        tpot_spread(line[line["dataset"] == name], axis, ax)
    attach(axes[0].figure, line, invalid="left out")
    return axes
