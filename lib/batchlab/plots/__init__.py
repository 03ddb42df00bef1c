"""Figures: functions that take a frame and return Axes, and one `save` that writes and shows them."""

from batchlab.plots.batch import running_batch, running_batches, timeline
from batchlab.plots.captions import attach, caption
from batchlab.plots.coverage import coverage
from batchlab.plots.gather import points
from batchlab.plots.grids import grids
from batchlab.plots.limits import against, panels, side_by_side
from batchlab.plots.saving import Shown, save, slug
from batchlab.plots.select import along
from batchlab.plots.service import rates, tradeoff
from batchlab.plots.spreads import spread, tpot_spread, tpot_spreads

__all__ = [
    "Shown",
    "against",
    "along",
    "attach",
    "caption",
    "coverage",
    "grids",
    "panels",
    "points",
    "rates",
    "running_batch",
    "running_batches",
    "save",
    "side_by_side",
    "slug",
    "spread",
    "timeline",
    "tpot_spread",
    "tpot_spreads",
    "tradeoff",
]
