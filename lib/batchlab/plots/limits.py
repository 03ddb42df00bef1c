"""A metric against one of the two limits, one series an engine and evidence, datasets side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from batchlab.errors import UsageError
from batchlab.plots.captions import attach
from batchlab.plots.labels import OTHER_AXIS, axis_label, dataset_title, whole
from batchlab.plots.legend import legend, many, marker_size
from batchlab.plots.select import along, datasets, recorded, require, series, several_transports, valid
from batchlab.plots.style import MUTED, SeriesStyle, new_figure, series_style, styled

SUBTITLE = 1.025  # height of a title's second line above its panel, in panels
End = tuple[float, float, str, str]  # of a series: x, y (data), label, colour


def limit_axis(ax: Axes, values: Sequence[float], name: str) -> None:
    """A log2 axis whose ticks are the values that the scenario asks for, written out."""
    ticks = sorted({float(v) for v in values if not pd.isna(v)})
    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [whole(t) for t in ticks])
    if ticks:
        ax.set_xlim(ticks[0] / 2**0.35, ticks[-1] * 2**0.35)
    ax.set_xlabel(name)


def plain_log_y(ax: Axes) -> None:
    """A log10 axis with 1, 2, 5 ticks written as plain numbers."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def panel_title(ax: Axes, title: str, subtitle: str) -> None:
    """A bold title with a quiet second line under it, left-aligned."""
    ax.set_title(title, pad=20 if subtitle else 6)
    if subtitle:
        ax.text(0, SUBTITLE, subtitle, transform=ax.transAxes, color=MUTED, fontsize=8.5, va="bottom", ha="left")


def label_ends(ax: Axes, ends: list[End], last_x: float) -> None:
    """Names written where the series end; beside the panel they are moved apart where they would touch."""
    ax.get_ylim()  # settles the limits, which the transform below needs
    to_fraction = ax.transData + ax.transAxes.inverted()
    beside = []
    for x, y, text, colour in ends:
        if not np.isfinite(y):
            continue
        if x < last_x:
            ax.annotate(text, (x, y), xytext=(7, 7), textcoords="offset points", color=colour, fontsize=9)
        else:
            beside.append((to_fraction.transform((x, y))[1], text, colour))
    gap, last = 0.075, -1.0
    for y, text, colour in sorted(beside):
        last = max(y, last + gap)
        ax.text(1.015, last, text, transform=ax.transAxes, color=colour, fontsize=9, va="center", ha="left")


def draw_interval(
    ax: Axes, x: np.ndarray, y: np.ndarray, rows: pd.DataFrame, metric: str, look: SeriesStyle, band: bool
) -> None:
    """The 95% interval as bars, or as a band; nothing where a point has none (a single run)."""
    low, high = f"{metric}_lo", f"{metric}_hi"
    if low not in rows or high not in rows:
        return
    lower, upper = rows[low].to_numpy(float), rows[high].to_numpy(float)
    has = np.isfinite(lower) & np.isfinite(upper) & np.isfinite(y)
    if not has.any():
        return
    if band:
        ax.fill_between(x, lower, upper, where=has, color=look.colour, alpha=0.18, linewidth=0)
        return
    reach = np.abs(np.vstack([y - lower, upper - y]))[:, has]
    ax.errorbar(x[has], y[has], yerr=reach, fmt="none", ecolor=look.colour, elinewidth=1.1, alpha=0.8)


def draw_series(
    ax: Axes,
    rows: pd.DataFrame,
    axis: str,
    metric: str,
    look: SeriesStyle,
    *,
    band: bool = False,
    size: float = 6.0,
) -> End:
    """One series: a line over valid points, broken at invalid and missing ones; hollow markers where invalid.

    Returns where it ends, for its label. UsageError where two points share an axis value: the frame then
    holds more than one sweep, request rate or model, and a line through them would mean nothing.
    """
    twice = rows[axis][rows[axis].duplicated()]
    if len(twice):
        raise UsageError(
            f"{look.label}: several points at {axis} {whole(twice.iloc[0])}; keep one sweep and request_rate"
        )
    rows = rows.sort_values(axis, kind="stable")
    x, y = rows[axis].to_numpy(float), rows[metric].to_numpy(float)
    good, shown = valid(rows).to_numpy(), recorded(rows).to_numpy() & np.isfinite(y)
    if look.linestyle != "none":
        ax.plot(x, np.where(good, y, np.nan), linestyle=look.linestyle, color=look.colour)
    draw_interval(ax, x, y, rows, metric, look, band)
    hollow = shown & ~good
    solid = shown & good
    common = {"linestyle": "none", "marker": look.marker, "color": look.colour, "markersize": size, "zorder": 3}
    if look.marker == "x":
        common |= {"markersize": 8, "markeredgewidth": 1.8, "zorder": 4}
    ax.plot(x[solid], y[solid], **common)
    if hollow.any():
        ax.plot(
            x[hollow],
            y[hollow],
            **common
            | {
                "marker": "o" if look.marker == "x" else look.marker,
                "markerfacecolor": "white",
                "markeredgewidth": 1.4,
            },
        )
    last = np.flatnonzero(shown)[-1] if shown.any() else None
    return (
        *((float(x[last]), float(y[last])) if last is not None else (np.nan, np.nan)),
        look.label,
        look.colour,
    )


def y_limits(shown: pd.DataFrame, metric: str, *, log_y: bool) -> tuple[float, float]:
    """From 0 (or, on a log axis, over a factor of 4 at least) to a little above the highest value.

    Intervals fit in as far as they do not dwarf the values: that of two repeats can be twelve times their spread,
    and may run out of the panel.
    """
    y = shown[metric].astype(float)
    low = shown[f"{metric}_lo"].astype(float) if f"{metric}_lo" in shown else y
    high = shown[f"{metric}_hi"].astype(float) if f"{metric}_hi" in shown else y
    if not log_y:
        top = max(1.08 * y.max(), min(1.03 * np.nanmax([y.max(), high.max()]), 1.6 * y.max()))
        return 0.0, top if top > 0 else 1.0
    positive = y[y > 0]
    if positive.empty:
        return 0.1, 10.0
    bottom = max(np.nanmin([positive.min(), low[low > 0].min()]), positive.min() / 3)
    return log_limits(bottom, min(np.nanmax([positive.max(), high.max()]), positive.max() * 3))


def log_limits(low: float, high: float) -> tuple[float, float]:
    """Limits of a log axis: some room at both ends, and a factor of 4 at least."""
    bottom, top = low / 1.25, high * 1.25
    widen = max(1.0, (4 * bottom / top) ** 0.5)
    return float(bottom / widen), float(top * widen)


def empty_panel(ax: Axes, text: str) -> None:
    """A panel that has nothing to show says why."""
    ax.set_yticks([])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED)


def fixed_at(rows: pd.DataFrame, axis: str) -> str:
    """ "max_num_tokens 2048", the other limit where it is the same in all rows."""
    other = OTHER_AXIS.get(axis, "")
    values = rows[other].dropna().unique() if other in rows else []
    return f"{other} {whole(values[0])}" if len(values) == 1 else ""


def rate_text(rows: pd.DataFrame) -> str:
    """ "4 req/s" or "all at once", where every row has the same request rate."""
    rates = rows["request_rate"].dropna().unique() if "request_rate" in rows else []
    if len(rates) != 1:
        return ""
    return "all requests at once" if np.isinf(float(rates[0])) else f"{float(rates[0]):g} req/s"


def missing_text(rows: pd.DataFrame, axis: str) -> str:
    """ "not recorded: 64, 128", the axis values where some series has no record."""
    gone = sorted(rows.loc[~recorded(rows), axis].dropna().unique())
    if len(gone) > 3:
        return f"{len(gone)} values not recorded"
    return f"not recorded: {', '.join(whole(v) for v in gone)}" if gone else ""


@styled
def against(
    points: pd.DataFrame,
    axis: str,
    metric: str,
    ax: Axes | None = None,
    *,
    band: bool = False,
    log_y: bool = False,
    title: str | None = None,
) -> Axes:
    """One metric of one dataset's points against `axis` ("max_batch_size" or "max_num_tokens").

    `points` is what `aggregate` returns: a row a point, with `<metric>_lo` and `<metric>_hi`. Invalid points
    are hollow, missing ones are named above the panel and never drawn. Without `ax` a new figure is made,
    with its caption.
    """
    require(points, axis, metric, "engine", "evidence")
    if ax is None:
        ax = new_figure(5.6, 3.6).subplots()
        attach(ax.figure, points)
        legend(ax.figure, points)
    limit_axis(ax, points[axis].tolist(), axis)
    if log_y:
        plain_log_y(ax)
    named, drawn = several_transports(points), list(series(points))
    ends = [
        draw_series(
            ax,
            rows,
            axis,
            metric,
            series_style(*key, name_transport=named),
            band=band,
            size=marker_size(place, len(drawn)),
        )
        for place, (key, rows) in enumerate(drawn)
    ]
    shown = points[recorded(points) & points[metric].notna()]
    if len(shown):
        ax.set_ylim(*y_limits(shown, metric, log_y=log_y))
        ax.yaxis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 10 or v == int(v) else f"{v:g}")
        )
    else:
        empty_panel(ax, "no cell recorded yet" if len(points) else "not planned in this scenario")
    if not many(points):
        label_ends(ax, ends, points[axis].max())
    name = title if title is not None else (dataset_title(points.iloc[0]) if len(points) else "")
    panel_title(
        ax,
        name,
        " · ".join(filter(None, [fixed_at(points, axis), rate_text(points), missing_text(points, axis)])),
    )
    ax.set_ylabel(axis_label(metric))
    return ax


@styled
def side_by_side(
    points: pd.DataFrame,
    axis: str,
    metric: str,
    *,
    defaults: Any = None,
    band: bool = False,
    log_y: bool = False,
    share_y: bool = False,
) -> list[Axes]:
    """`against`, one panel a dataset, with the other limit held at its default (see `select.along`)."""
    line = along(points, axis, defaults)
    names = datasets(line) or [""]
    axes = panels(len(names), share_y=share_y)
    for ax, name in zip(axes, names, strict=True):
        against(line[line["dataset"] == name], axis, metric, ax, band=band, log_y=log_y)
    if share_y:
        for ax in axes[1:]:
            ax.set_ylabel("")
    attach(axes[0].figure, line)
    legend(axes[0].figure, line)
    return axes


@styled
def panels(count: int, *, height_in: float = 3.5, share_y: bool = False) -> list[Axes]:
    """Axes in rows of two, as wide as the report's column."""
    columns = min(2, max(1, count))
    rows = -(-max(1, count) // columns)
    figure: Figure = new_figure(9.6 if columns == 2 else 5.6, height_in * rows)
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel()
    for spare in grid[count:]:
        spare.remove()
    return list(grid[: max(1, count)])
