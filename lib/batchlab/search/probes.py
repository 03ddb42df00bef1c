"""Points of a search as ordinary cells of its study: planned, loaded when recorded, measured when not, and judged."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from typing import Any

import pandas as pd

from batchlab import estimate, measure, plan, simulated
from batchlab.cell import SIMULATED, Cell
from batchlab.plan import Planned
from batchlab.progress import Progress
from batchlab.scenario import Limits, NumRequests, Sweep
from batchlab.search.requirements import Requirement
from batchlab.search.verdict import INVALID, Judged, Rule, judge
from batchlab.store import DamagedCell, Recorded, Store
from batchlab.study import Study

# a probe at a finite rate sends so many times the batch size, unless that takes so many times `Rule.load_s`
BATCHES = 2
LONGER = 3


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is made. `request_rate`: requests a second, math.inf for all at once."""

    max_batch_size: int
    max_num_tokens: int
    request_rate: float


@dataclass(slots=True)
class Probes:
    """The points of one search: `judged` and `planned` grow with it.

    `batches` and `budgets`: the limits that may be asked for. `only_recorded` says why nothing is measured, None where
    missing cells are.
    """

    study: Study
    engine: str
    dataset: str
    template: Sweep
    requirements: tuple[Requirement, ...]
    rule: Rule
    batches: Sequence[int]
    budgets: Sequence[int]
    only_recorded: str | None = None
    judged: dict[Point, Judged] = field(default_factory=dict)
    planned: dict[str, Planned] = field(default_factory=dict)

    def cells(self, point: Point, repeats: int) -> list[Planned]:
        """The planned cells of a point, by the same rules as a sweep's."""
        sweep = self.template.model_copy(
            update={
                "name": "search",
                "engines": [self.engine],
                "datasets": [self.dataset],
                "max_batch_size": [point.max_batch_size],
                "max_num_tokens": [point.max_num_tokens],
                "request_rate": [point.request_rate],
                "num_requests": self._num_requests(point),
                "repeats": repeats,
            }
        )
        return plan.expand(self.study.scenario.model_copy(update={"sweeps": [sweep]}))

    def _num_requests(self, point: Point) -> NumRequests:
        """The sweep's number, or more: see `Rule`."""
        told = self.template.num_requests or self.study.scenario.num_requests
        sent = told.of(point.max_batch_size, point.request_rate)
        if math.isfinite(point.request_rate) and self.rule.load_s:
            arrive = math.ceil(point.request_rate * self.rule.load_s)
            sent = max(sent, arrive, min(BATCHES * point.max_batch_size, LONGER * arrive))
        return NumRequests(waves=1, min=sent, max=sent)

    def at(self, point: Point) -> Generator[Cell, None, Judged]:
        """The verdict on a point. Yields each cell that is missing, and expects it to be recorded when it goes on."""
        if point in self.judged:
            return self.judged[point]
        planned = self.cells(point, self.rule.max_repeats)
        for count in range(1, len(planned) + 1):
            if not self.only_recorded and self._load(planned[count - 1].cell) is None:
                yield planned[count - 1].cell
            last = count == len(planned)
            if (self.only_recorded is None or last) and (verdict := self._settle(point, planned[:count], last=last)):
                return verdict
        raise AssertionError("the last run settles a point")

    def recorded(self, free: str, start: Point) -> dict[float, Judged]:
        """Verdicts on the recorded points that differ from `start` in `free` (request_rate or max_batch_size) alone.

        Where missing cells are measured, only those count that this search would ask for: as many requests, the same
        seeds. Otherwise every recorded cell of the line does; at each point those with the most requests.
        """
        line = _line(self.cells(start, 1)[0].cell, free)
        groups: dict[float, list[Cell]] = {}
        for cell in self._every_cell():
            x = _value(cell, free)
            if math.isfinite(x) and _line(cell, free) == line:
                groups.setdefault(x, []).append(cell)
        found = {}
        for x in sorted(groups):
            point = replace(start, **{free: x if free == "request_rate" else int(x)})
            planned = self.cells(point, self.rule.max_repeats)
            if self.only_recorded:
                most = max(c.num_requests for c in groups[x])
                cells = sorted((c for c in groups[x] if c.num_requests == most), key=lambda c: c.seed)
                planned = [replace(planned[0], cell=c, repeat=n) for n, c in enumerate(cells)]
            if verdict := self._settle(point, planned, last=self.only_recorded is not None):
                found[x] = verdict
        return found

    def _settle(self, point: Point, planned: list[Planned], *, last: bool) -> Judged | None:
        """The verdict on a point by those of its cells that are recorded; None when they do not suffice."""
        runs, reasons = [], []
        for p in planned:
            if (found := self._load(p.cell)) is None:
                continue
            self.planned[p.cell.id] = p
            if found.meta["invalid_reasons"]:
                reasons += found.meta["invalid_reasons"]
            else:
                runs.append(found.requests.to_pandas())
        if runs:
            verdict = judge(runs, self.requirements, self.rule, last=last)
        else:
            why = "; ".join(dict.fromkeys(reasons)) or "not recorded"
            verdict = Judged(INVALID, why, False, 0) if last else None
        if verdict:
            self.judged[point] = verdict
        return verdict

    @property
    def _store(self) -> Store:
        simulates = self.template.transport == SIMULATED
        return simulated.store(self.study.scenario.hardware) if simulates else self.study.store

    def _load(self, cell: Cell) -> Recorded | None:
        try:
            return self._store.load(cell.id)
        except (KeyError, DamagedCell):
            return None

    def _every_cell(self) -> Iterator[Cell]:
        for cell_id in sorted(self._store.ids()):
            try:
                yield Cell(**self._store.meta(cell_id)["cell"])
            except (KeyError, TypeError):
                continue

    def frame(self) -> pd.DataFrame:
        """The study's frame of every cell that was looked at."""
        return replace(self.study, planned=list(self.planned.values())).frame()

    def run(self, strategy: Generator[Cell, None, None]) -> None:
        """Drives a strategy: what it yields is simulated, or measured on one warm engine, before it goes on."""
        first = next(strategy, None)
        if first is None:
            return
        cells = chain([first], strategy)
        if first.transport == SIMULATED:
            for cell in cells:
                simulated.run([cell])
            return
        estimator = estimate.fit(self.study.store, [c for c in self.study.cells() if c.transport != SIMULATED])
        progress = Progress(total=0, estimator=estimator, left=[])
        measure.stream(self.study.scenario, _counted(cells, progress), self._most, self.study.store, progress)

    def _most(self, cell: Cell) -> Limits:
        """What an engine is started with: what this search and the scenario's own cells on such an engine may need.
        Limits can be lowered while it is warm, never raised."""
        grid = product(self.batches, self.budgets)
        mine = [replace(cell, max_batch_size=b, max_num_tokens=max(b, t)) for b, t in grid]
        alike = [c for c in (*self.study.cells(), *mine) if c.launch_key() == cell.launch_key()]
        return plan.largest_limits([cell, *alike])

    def capacity(self, start: Point) -> float | None:
        """Requests a second of a recorded cell at these limits that got all its requests at once; None without one."""
        line = _line(self.cells(start, 1)[0].cell, "request_rate")
        for cell in self._every_cell():
            if cell.request_rate is None and _line(cell, "request_rate") == line:
                took_s = self._store.meta(cell.id)["duration_s"]
                return cell.num_requests / took_s if took_s > 0 else None
        return None


def _counted(cells: Iterator[Cell], progress: Progress) -> Iterator[Cell]:
    """Nobody knows how many there will be: the total grows with them."""
    for cell in cells:
        progress.total += 1
        progress.left.append(cell)
        yield cell


def _line(cell: Cell, free: str) -> dict[str, Any]:
    """What cells of one line have in common."""
    return {k: v for k, v in asdict(cell).items() if k not in (free, "seed", "num_requests") and v not in (None, {})}


def _value(cell: Cell, free: str) -> float:
    """A cell's place on its line; math.inf for all requests at once."""
    value = getattr(cell, free)
    return math.inf if value is None else float(value)
