"""Figures: functions that take a frame and return Axes, and one `save` that writes and shows them."""

from batchlab.plots.against import against, panels, side_by_side
from batchlab.plots.batch import running_batch, running_batches, timeline
from batchlab.plots.caption import attach, caption
from batchlab.plots.save import Shown, save
from batchlab.plots.select import along
from batchlab.plots.spread import spread, tpot_spread, tpot_spreads

__all__ = [
    "Shown",
    "against",
    "along",
    "attach",
    "caption",
    "panels",
    "running_batch",
    "running_batches",
    "save",
    "side_by_side",
    "spread",
    "timeline",
    "tpot_spread",
    "tpot_spreads",
]
