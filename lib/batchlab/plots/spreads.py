"""The spread of TPOT over requests: a figure, and the article's table of largest and smallest TPOT."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.captions import attach
from batchlab.plots.labels import dataset_title
from batchlab.plots.legend import legend, many
from batchlab.plots.limits import (
    End,
    empty_panel,
    fixed_at,
    label_ends,
    limit_axis,
    log_limits,
    missing_text,
    panel_title,
    panels,
    plain_log_y,
)
from batchlab.plots.select import SERIES, along, datasets, recorded, require, series, several_transports, valid
from batchlab.plots.style import new_figure, series_style, styled

COLUMNS = ("tpot_min_ms", "tpot_p50_ms", "tpot_max_ms")


def spread(cells: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Per dataset, series and axis value: tpot_min_ms, tpot_p50_ms, tpot_max_ms, ratio, n (valid repeats).

    From cells (a row a repeat), valid ones only: the smallest of the smallest, the median of the medians, the
    largest of the largest. A point without a valid repeat is not in the result.
    """
    require(cells, axis, "dataset", *COLUMNS)
    by = ["dataset", *[c for c in SERIES if c in cells], axis]
    good = cells[valid(cells)].astype(dict.fromkeys(COLUMNS, float))
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
        legend(ax.figure, cells)
    limit_axis(ax, cells[axis].tolist(), axis)
    plain_log_y(ax)
    table = spread(cells, axis)
    groups = list(series(table)) if len(table) else []
    ends: list[End] = []
    for place, ((engine, evidence, transport), rows) in enumerate(groups):
        look = series_style(engine, evidence, transport, name_transport=several_transports(table))
        rows = at_every(rows, axis, cells)
        x = rows[axis].to_numpy(float) * 2 ** (0.12 * (place - (len(groups) - 1) / 2))
        middle = rows["tpot_p50_ms"].to_numpy(float)
        ax.vlines(x, rows["tpot_min_ms"], rows["tpot_max_ms"], color=look.colour, linewidth=5, alpha=0.3)
        ax.plot(x, middle, marker=look.marker, linestyle=look.linestyle, color=look.colour, linewidth=1)
        ends += part_names(look.label, look.colour, x, rows, single=len(groups) == 1)
    bad = cells[recorded(cells) & ~valid(cells)]
    left_out = f"{len(bad)} invalid repeat{'s' * (len(bad) != 1)} left out" if len(bad) else ""
    if groups:
        ax.set_ylim(*log_limits(table["tpot_min_ms"].min(), table["tpot_max_ms"].max()))
        if not many(table):
            label_ends(ax, ends, cells[axis].max() / 1.5)
    else:
        empty_panel(ax, "no valid cell recorded yet" if len(cells) else "not planned in this scenario")
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


def part_names(label: str, colour: str, x: np.ndarray, rows: pd.DataFrame, *, single: bool) -> list[End]:
    """Labels at the last bar: what top, dot and bottom are, or the engine's name where there are several."""
    at, last = x[rows["tpot_p50_ms"].notna()][-1], rows.dropna(subset=["tpot_p50_ms"]).iloc[-1]
    marks = [("slowest", "tpot_max_ms"), ("median", "tpot_p50_ms"), ("fastest", "tpot_min_ms")]
    return [(at, last[column], text, colour) for text, column in (marks if single else [(label, "tpot_p50_ms")])]


@styled
def tpot_spreads(cells: pd.DataFrame, axis: str, *, defaults: Any = None) -> list[Axes]:
    """`tpot_spread`, one panel a dataset, the other limit at its default."""
    line = along(cells, axis, defaults)
    names = datasets(line) or [""]
    axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        tpot_spread(line[line["dataset"] == name], axis, ax)
    attach(axes[0].figure, line, invalid="left out")
    legend(axes[0].figure, line)
    return axes
