"""A metric over the whole plane of the two limits, as numbers on a shaded grid."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.captions import attach
from batchlab.plots.labels import axis_label, dataset_title, number, whole
from batchlab.plots.limits import empty_panel, panel_title, rate_text
from batchlab.plots.select import datasets, recorded, require, series, several_transports, valid
from batchlab.plots.style import new_figure, series_style, styled


@styled
def grids(points: pd.DataFrame, metric: str) -> list[Axes]:
    """One panel a dataset and series, max_batch_size to the right, max_num_tokens upwards, the mean in each field.

    The darker, the larger. An invalid point's number stands in brackets, a planned point without a record is a
    dash, a point that is not planned is empty. `points` is what `points` returns, of any number of sweeps.
    """
    require(points, metric, "max_batch_size", "max_num_tokens", "dataset")
    shown = points.drop_duplicates(["dataset", "engine", "evidence", "transport", "max_batch_size", "max_num_tokens"])
    parts = [
        (key, rows)
        for name in datasets(shown)
        for key, rows in series(shown[shown["dataset"] == name])
    ]
    heights = max(1, shown["max_num_tokens"].nunique())
    columns = 1 if len(parts) <= 2 else 2  # many: a column a dataset
    height = -(-max(1, len(parts)) // columns)
    figure = new_figure(9.6, height * (max(0.34 * heights, 1.0) + 1.1))
    places = figure.subplots(height, columns, squeeze=False).T.ravel()
    for spare in places[max(1, len(parts)) :]:
        spare.remove()
    axes = list(places[: max(1, len(parts))])
    named = several_transports(shown)
    for ax, (key, rows) in zip(axes, parts, strict=False):
        panel(ax, rows, metric)
        told = [series_style(*key, name_transport=named).label, axis_label(metric)]
        told += [rate_text(rows)] if columns == 1 else []
        panel_title(ax, dataset_title(rows.iloc[0]), " · ".join(filter(None, told)))
    if not parts:
        empty_panel(axes[0], "not planned in this scenario")
    attach(figure, shown, invalid="in brackets")
    return axes


def panel(ax: Axes, rows: pd.DataFrame, metric: str) -> None:
    """The fields of one dataset and series."""
    batches, tokens = (sorted(rows[c].dropna().unique()) for c in ("max_batch_size", "max_num_tokens"))
    values = np.full((len(tokens), len(batches)), np.nan)
    texts: dict[tuple[int, int], str] = {}
    for row, done, good in zip(rows.to_dict("records"), recorded(rows), valid(rows), strict=True):
        at = tokens.index(row["max_num_tokens"]), batches.index(row["max_batch_size"])
        texts[at] = field(row[metric], done=done, good=good)
        if done and good and not pd.isna(row[metric]):
            values[at] = row[metric]
    top = np.nanmax(values) if np.isfinite(values).any() else 1.0
    ax.imshow(values, cmap="Blues", vmin=0, vmax=top * 1.25, aspect="auto", origin="lower")
    for (j, i), text in texts.items():
        dark = np.isfinite(values[j, i]) and values[j, i] > 0.8 * top
        ax.text(i, j, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")
    ax.set_xticks(range(len(batches)), [whole(b) for b in batches])
    ax.set_yticks(range(len(tokens)), [whole(t) for t in tokens])
    ax.set_xlabel("max_batch_size")
    ax.set_ylabel("max_num_tokens")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


def field(value: Any, *, done: bool, good: bool) -> str:
    """What stands in one field."""
    if not done or pd.isna(value):
        return "–"
    return number(value) if good else f"({number(value)})"
