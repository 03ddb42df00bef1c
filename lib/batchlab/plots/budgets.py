"""Requests a second against the token budget: fixed budgets as points, a budget that moves as a level."""

import pandas as pd
from matplotlib.axes import Axes

from batchlab.plots.captions import attach
from batchlab.plots.labels import axis_label, dataset_title
from batchlab.plots.legend import legend, many, marker_size
from batchlab.plots.limits import draw_series, empty_panel, label_ends, limit_axis, missing_text, panel_title, panels
from batchlab.plots.limits import y_limits as limits_of
from batchlab.plots.select import datasets, recorded, require, series, several_transports, valid
from batchlab.plots.style import colour, series_style, styled

REQUESTS = "request_throughput_req_s"
AXIS = "max_num_tokens"


@styled
def token_budget(fixed: pd.DataFrame, moving: pd.DataFrame, note: str = "") -> list[Axes]:
    """One panel a dataset: `fixed` has a row a point along max_num_tokens, `moving` a row an engine and dataset.

    Both are what `points` returns, of any evidence; published rows are not joined. A moving budget has no place on the
    axis, so it is a dotted line across the panel at what it served.
    """
    require(fixed, AXIS, REQUESTS, "dataset", "engine", "evidence")
    names = datasets(fixed) or [""]
    axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        rows = fixed[fixed["dataset"] == name]
        level = moving[(moving["dataset"] == name) & valid(moving)] if len(moving) else moving
        _panel(ax, rows, level)
    told = "dotted: the budget moves while serving" if len(moving) and valid(moving).any() else ""
    attach(axes[0].figure, pd.concat([fixed, moving]) if len(moving) else fixed, "; ".join(filter(None, [told, note])))
    legend(axes[0].figure, fixed)
    return axes


def _panel(ax: Axes, rows: pd.DataFrame, moving: pd.DataFrame) -> None:
    limit_axis(ax, rows[AXIS].tolist(), AXIS)
    named, drawn = several_transports(rows), list(series(rows))
    ends = []
    for place, (key, some) in enumerate(drawn):
        size = marker_size(place, len(drawn))
        ends.append(draw_series(ax, some, AXIS, REQUESTS, series_style(*key, name_transport=named), size=size))
    shown = pd.concat([r for r in (rows, moving) if len(r)])
    shown = shown[recorded(shown) & shown[REQUESTS].notna()]
    if len(shown):
        ax.set_ylim(*limits_of(shown, REQUESTS, log_y=False))
    else:
        empty_panel(ax, "no cell recorded yet")
    for row in moving.to_dict("records"):
        ax.axhline(row[REQUESTS], color=colour(row["engine"]), linestyle=":", linewidth=1.4)
        beside = {"color": colour(row["engine"]), "fontsize": 8, "ha": "left", "va": "center"}
        ax.text(1.012, row[REQUESTS], "moving\nbudget", transform=ax.get_yaxis_transform(), **beside)
    if not many(rows):
        label_ends(ax, ends, rows[AXIS].max())
    panel_title(ax, dataset_title(rows.iloc[0]) if len(rows) else "", missing_text(rows, AXIS))
    ax.set_ylabel(axis_label(REQUESTS))
