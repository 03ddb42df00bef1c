"""Which points of the plane of the two limits are recorded: a small panel for each sweep and dataset."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from batchlab.plots.captions import attach
from batchlab.plots.labels import whole
from batchlab.plots.limits import limit_axis, panel_title, rate_text
from batchlab.plots.select import recorded, require, valid
from batchlab.plots.style import MUTED, new_figure, styled

SHADE = "#0072B2"


@styled
def coverage(cells: pd.DataFrame) -> list[Axes]:
    """Valid points filled, points with an invalid repeat hollow, incomplete ones small, missing ones as dots.

    `cells` has a row a planned cell of any number of sweeps; each panel is one sweep and dataset.
    """
    require(cells, "sweep", "dataset", "max_batch_size", "max_num_tokens")
    groups = list(cells.groupby(["sweep", "dataset"], sort=False))
    columns = max(1, min(3, len(groups)))
    rows = -(-max(1, len(groups)) // columns)
    figure = new_figure(9.6, 2.7 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for spare in grid[max(1, len(groups)) :]:
        spare.remove()
    axes = list(grid[: max(1, len(groups))])
    for ax, ((sweep, dataset), group) in zip(axes, groups, strict=False):
        panel(ax, group)
        panel_title(ax, str(dataset), " · ".join(filter(None, [str(sweep), rate_text(group)])))
    limit_axis(axes[0], cells["max_batch_size"].tolist(), "")
    for ax in axes:
        ax.tick_params(labelsize=8)
        if cells["max_batch_size"].nunique() > 6:
            ax.tick_params(axis="x", labelrotation=90)
        ax.set_xlabel("max_batch_size")
    for ax in axes[::columns]:
        ax.set_ylabel("max_num_tokens")
    values = sorted(cells["max_num_tokens"].dropna().unique())
    axes[0].set_yscale("log", base=2)
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_yticks(values, [whole(v) for v in values])
    attach(figure, cells.drop_duplicates("cell"), note="small: repeats still missing; dot: not recorded")
    return axes


def panel(ax: Axes, group: pd.DataFrame) -> None:
    """One marker a point."""
    for (batch, tokens), repeats in group.groupby(["max_batch_size", "max_num_tokens"]):
        done, good = recorded(repeats), valid(repeats)
        if not done.any():
            ax.plot(batch, tokens, marker=".", color=MUTED, markersize=7, linestyle="none")
            continue
        ax.plot(
            batch,
            tokens,
            marker="o",
            markersize=7 if done.all() else 4,
            linestyle="none",
            color=SHADE,
            markerfacecolor=SHADE if good[done].all() else "white",
            markeredgewidth=1.3,
        )
