"""What a limit on TPOT or TTFT leaves: throughput against TPOT over all settings, and TTFT against the request rate."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from batchlab.plots.captions import attach
from batchlab.plots.labels import axis_label, dataset_title, whole
from batchlab.plots.legend import legend, many, marker_size
from batchlab.plots.limits import (
    draw_series,
    empty_panel,
    fixed_at,
    label_ends,
    log_limits,
    panel_title,
    panels,
    plain_log_y,
    rate_text,
)
from batchlab.plots.select import datasets, require, series, several_transports
from batchlab.plots.style import MUTED, series_style, styled

THROUGHPUT = "output_throughput_tok_s"


@styled
def tradeoff(points: pd.DataFrame, metric: str, limit_ms: float, best: pd.DataFrame, more: str = "") -> list[Axes]:
    """Throughput against `metric` (a TPOT), a panel a dataset, a dot a setting, and the limit as a line.

    `points`: valid points with all requests at once. `best`: what `service.under_tpot` returns; the settings that it
    names are ringed and, of a single series, written out as max_batch_size / max_num_tokens. `more` goes into the
    caption. Throughput has a log axis where a panel holds several cards.
    """
    require(points, metric, THROUGHPUT, "dataset", "hardware")
    names = datasets(points) or [""]
    axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        rows = points[points["dataset"] == name]
        _tradeoff_panel(ax, rows, metric, limit_ms, best[best["dataset"] == name] if len(best) else best)
    note = "ring: best setting under the limit" if len(best) else ""
    note += " (max_batch_size / max_num_tokens)" if len(best) and len(list(series(points))) == 1 else ""
    note = "; ".join(filter(None, [note, more]))
    attach(axes[0].figure, points.drop(columns="n", errors="ignore"), note)  # without n: no intervals are drawn
    legend(axes[0].figure, points)
    return axes


def _tradeoff_panel(ax: Axes, rows: pd.DataFrame, metric: str, limit_ms: float, best: pd.DataFrame) -> None:
    if rows.empty:
        empty_panel(ax, "no cell with all requests at once")
        return
    named, drawn = several_transports(rows), list(series(rows))
    for place, (key, some) in enumerate(drawn):
        look = series_style(*key, name_transport=named)
        ax.plot(
            some[metric],
            some[THROUGHPUT],
            linestyle="none",
            marker=look.marker,
            color=look.colour,
            markersize=marker_size(place, len(drawn)),
            alpha=0.55,
        )
    low, high = float(rows[metric].min()), float(rows[metric].max())
    ax.set_xscale("log")
    ax.set_xlim(*log_limits(min(low, limit_ms), max(high, limit_ms)))
    ax.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.xaxis.set_minor_formatter(lambda v, _: "")
    if rows["hardware"].nunique() > 1:  # cards whose throughput may be far apart
        plain_log_y(ax)
        ax.set_ylim(*log_limits(float(rows[THROUGHPUT].min()), float(rows[THROUGHPUT].max())))
    else:
        ax.set_ylim(0, 1.12 * rows[THROUGHPUT].max())
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    ax.axvline(limit_ms, color=MUTED, linestyle=":", linewidth=1.2)
    ax.text(limit_ms, 0.02, f" {limit_ms:g} ms", transform=ax.get_xaxis_transform(), color=MUTED, fontsize=8.5)
    for row in best.to_dict("records"):
        if pd.isna(row[metric]) or not len(_same(rows, row)):
            continue
        look = series_style(row["engine"], row["evidence"], row.get("transport"), name_transport=named)
        x, y = float(row[metric]), float(row[THROUGHPUT])
        ring = {"markerfacecolor": "none", "markeredgecolor": look.colour, "markeredgewidth": 1.8, "markersize": 13}
        ax.plot(x, y, marker="o", linestyle="none", zorder=5, **ring)
        told = " / ".join(whole(row[c]) for c in ("max_batch_size", "max_num_tokens") if not pd.isna(row[c]))
        if len(drawn) > 1:  # their names would lie upon each other; the table has them
            continue
        told = f"{look.label} {told}"
        left = ax.transData.transform((x, y))[0] < ax.transAxes.transform((0.35, 0))[0]  # of room there is none
        at, side = ((9, 8), "left") if left else ((-9, 8), "right")
        ax.annotate(told, (x, y), at, textcoords="offset points", color=look.colour, fontsize=8.5, ha=side)
    panel_title(ax, dataset_title(rows.iloc[0]), rate_text(rows))
    ax.set_xlabel(axis_label(metric))
    ax.set_ylabel(axis_label(THROUGHPUT))


def _same(rows: pd.DataFrame, row: dict) -> pd.DataFrame:
    """The rows of the group that `row` is the best of."""
    at = pd.Series(True, index=rows.index)
    for name in ("engine", "evidence", "engine_options", "max_batch_size", "max_num_tokens"):
        at &= rows[name].isna() if pd.isna(row[name]) else rows[name] == row[name]
    return rows[at]


@styled
def rates(points: pd.DataFrame, metric: str, limit_ms: float, more: str = "") -> list[Axes]:
    """`metric` (a TTFT) against the request rate, a panel a dataset, with the limit as a line.

    `points`: valid points at finite rates, of one setting for each series and dataset (see `service.rate_lines`).
    `more` goes into the caption.
    """
    require(points, metric, "request_rate", "dataset")
    names = datasets(points) or [""]
    axes = panels(len(names))
    for ax, name in zip(axes, names, strict=True):
        rows = points[points["dataset"] == name]
        if rows.empty:
            empty_panel(ax, "no setting with two request rates")
            continue
        plain_log_y(ax)
        named, drawn = several_transports(rows), list(series(rows))
        ends = []
        for place, (key, some) in enumerate(drawn):
            look, size = series_style(*key, name_transport=named), marker_size(place, len(drawn))
            ends.append(draw_series(ax, some, "request_rate", metric, look, size=size))
        top = rows["request_rate"].max()
        ax.set_xlim(0, 1.06 * top)
        ax.set_ylim(*log_limits(min(rows[metric].min(), limit_ms), max(rows[metric].max(), limit_ms)))
        ax.axhline(limit_ms, color=MUTED, linestyle=":", linewidth=1.2)
        quiet = {"color": MUTED, "fontsize": 8.5, "va": "bottom"}
        ax.text(0.01, limit_ms, f"{limit_ms:g} ms", transform=ax.get_yaxis_transform(), **quiet)
        if not many(rows):
            label_ends(ax, ends, top)
        fixed = [fixed_at(rows, "max_num_tokens"), fixed_at(rows, "max_batch_size")]
        panel_title(ax, dataset_title(rows.iloc[0]), " · ".join(filter(None, fixed)))
        ax.set_xlabel("request rate (req/s)")
        ax.set_ylabel(axis_label(metric))
    attach(axes[0].figure, points, more)
    legend(axes[0].figure, points)
    return axes
