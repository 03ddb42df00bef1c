"""What several notebooks of a scenario need and would wait for, computed ahead of them, over all cores.

The summaries of what is recorded; the planned simulated cells, the simulated twins of recorded ones, and those that
other scenarios plan of the same question; and the comparison with what is published. All of it is kept where the
notebooks look for it; none of it is measured.
"""

from functools import partial

from batchlab import kept, study, summaries, validation
from batchlab.cell import SIMULATED, Cell
from batchlab.errors import UsageError
from batchlab.report import elsewhere
from batchlab.report.budgets import FIXED
from batchlab.report.limits import ASKS
from batchlab.report.validation import published_rows
from batchlab.sim.grid import over_cores
from batchlab.store import Store


def ahead(scenario: str) -> None:
    """Computes what is missing. What cannot be is left to the notebook that needs it, which tells why."""
    try:
        opened = study.open_study(scenario)
        planned = opened.cells()
        list(over_cores(partial(_keep, store=opened.store), unknown(opened.store, planned)))
        opened.simulate([*(c for c in planned if c.transport == SIMULATED), *(t for _, t in validation.pairs(opened))])
        for sweeps in (ASKS, (FIXED,)):
            frame = opened.frame()
            elsewhere.cells(opened, frame[frame["sweep"].isin(sweeps)], *sweeps)
        published_rows(opened)
    except UsageError:
        return


def unknown(store: Store, cells: list[Cell]) -> list[Cell]:
    """The recorded cells whose summary is not kept."""
    names = {cell: summaries.content(store, cell) for cell in cells if cell.transport != SIMULATED}
    return [cell for cell, name in names.items() if name and kept.find("summaries", name) is None]


def _keep(cell: Cell, *, store: Store) -> None:
    summaries.summary(store, cell)
