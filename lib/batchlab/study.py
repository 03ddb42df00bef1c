"""What notebooks stand on: a scenario with its plan and its records, and the frame of its cells."""

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from batchlab import estimate, measure, metrics, noise, paths, plan, scenario, simulated, summaries
from batchlab.cell import SIMULATED, Cell
from batchlab.errors import EngineError, UsageError
from batchlab.progress import Progress
from batchlab.scenario import Scenario
from batchlab.store import Recorded, Store


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Study:
    """A scenario, its planned cells and the store of what was measured on its hardware."""

    scenario: Scenario
    planned: list[plan.Planned]
    store: Store

    @property
    def figures_dir(self) -> Path:
        return paths.FIGURES / self.scenario.name

    def cells(self, sweep: str | None = None) -> list[Cell]:
        """The cells of a sweep, or of all, in measuring order. UsageError for a sweep that the scenario lacks."""
        self._check(sweep)
        return plan.unique(p for p in self.planned if sweep in (None, p.sweep))

    def _check(self, sweep: str | None) -> None:
        known = [s.name for s in self.scenario.sweeps]
        if sweep is not None and sweep not in known:
            raise UsageError(f"{self.scenario.path}: no sweep `{sweep}`; there are: {', '.join(known)}")

    def has(self, sweep: str) -> bool:
        return any(s.name == sweep for s in self.scenario.sweeps)

    def can_measure(self) -> str | None:
        """None when this machine can measure the scenario, else why not, in one line. Simulated cells it always can."""
        engines = {c.engine for c in self.cells() if c.transport != SIMULATED}
        return measure.obstacle(self.scenario, engines) if engines else None

    def missing(
        self, sweep: str | None = None, *, retry_invalid: bool = False, tell: Callable[[str], None] = lambda line: None
    ) -> list[Cell]:
        """The cells without a usable record, in measuring order."""
        cells = self.cells(sweep)
        real = measure.missing(
            [c for c in cells if c.transport != SIMULATED], self.store, retry_invalid=retry_invalid, tell=tell
        )
        left = {c.id for c in real} | {c.id for c in simulated.missing(c for c in cells if c.transport == SIMULATED)}
        return [c for c in cells if c.id in left]

    def measure(
        self,
        sweep: str | None = None,
        *,
        engine: str | None = None,
        retry_invalid: bool = False,
        tell: Callable[[str], None] = _say,
    ) -> measure.Outcome:
        """Simulate and measure what is missing, of one engine of the scenario or of all.

        An engine that this machine has not is left out, and told of; so are simulated cells where the package with
        the operator times is not installed, as on a host that only measures. UsageError when nothing is left for that,
        EngineError never: see Outcome.failures.
        """
        asked = {p.cell.id for p in self.planned if engine in (None, p.engine)}
        left = self.missing(sweep, retry_invalid=retry_invalid, tell=tell)
        wanted = [c for c in left if c.id in asked]
        twins = [c for c in wanted if c.transport == SIMULATED]
        wanted = [c for c in wanted if c.transport != SIMULATED]
        if twins and wanted and (reason := simulated.absent()):
            tell(f"{len(twins)} simulated cells are left out: {reason}")
            twins = []
        done = self.simulate(twins)
        if not wanted:
            return measure.Outcome(0, 0, [], done)
        engines = {c.engine for c in wanted}
        absent = measure.obstacles(self.scenario, engines)
        if len(absent) == len(engines):
            raise UsageError(next(iter(absent.values())))
        for name, reason in absent.items():
            tell(f"{name} is left out: {reason}")
        here = [c for c in wanted if c.engine not in absent]
        wanted = [c for c in here if measure.has_limits(self.scenario, c)]
        if len(wanted) < len(here):
            tell(f"attach: {len(here) - len(wanted)} cells have other limits than its engine (engines.attach.limits)")
        if not wanted:
            return measure.Outcome(0, 0, [], done, absent)
        real = [c for c in self.cells() if c.transport != SIMULATED]
        progress = Progress(total=len(wanted), estimator=estimate.fit(self.store, real), left=wanted)
        outcome = measure.run(self.scenario, wanted, real, self.store, progress)
        return replace(outcome, simulated=done, absent=absent)

    def simulate(self, cells: list[Cell]) -> int:
        """Simulate those of the cells that are not there yet, which need not be planned; how many they were.

        The errors of `simulated.run`, with the scenario's file.
        """
        cells = simulated.missing(cells)
        if not cells:
            return 0
        progress = Progress(total=len(cells), estimator=estimate.fit(self.store, cells), left=cells)
        try:
            with progress.simulating() as tell:
                return simulated.run(cells, keep_chunks=self.scenario.keep_chunks, tell=tell)
        except UsageError as error:
            raise UsageError(f"{self.scenario.path}: {error}") from None

    def ensure(self, sweep: str | None = None) -> pd.DataFrame:
        """Measure what is missing, if this machine can, and return the frame of the sweep's cells.

        EngineError, with the engine's last lines, when one could not start: what could be measured is recorded by then.
        """
        known = self._summaries(self.cells(sweep), tell=_say)
        left = [c for c in self.cells(sweep) if not known[c.id]["recorded"]]
        here = measure.obstacle(self.scenario, {c.engine for c in left if c.transport != SIMULATED}) is None
        if here and left:
            for _, reason, tail in self.measure(sweep).failures:
                raise EngineError(f"{reason}\n{tail}" if tail else reason, tail)
        elif left:
            self.simulate([c for c in left if c.transport == SIMULATED])
        return self._frame(sweep, known | self._summaries(left))

    def frame(self, sweep: str | None = None) -> pd.DataFrame:
        """A row a planned cell: its coordinates, its summary, and whether it is recorded."""
        return self._frame(sweep, self._summaries(self.cells(sweep)))

    def _frame(self, sweep: str | None, summaries: dict[str, dict[str, Any]]) -> pd.DataFrame:
        return pd.DataFrame([_coordinates(p) | summaries[p.cell.id] for p in self.planned if sweep in (None, p.sweep)])

    def _summaries(
        self, cells: Iterable[Cell], tell: Callable[[str], None] = lambda line: None
    ) -> dict[str, dict[str, Any]]:
        """What each cell's record comes to, by id; one that is damaged is told of."""
        return {cell.id: summaries.summary(self._store(cell), cell, tell) for cell in cells}

    def _store(self, cell: Cell) -> Store:
        return simulated.store(cell.hardware) if cell.transport == SIMULATED else self.store

    def provenance(self, cell_id: str) -> dict[str, Any]:
        return self._store_of(cell_id).meta(cell_id)["provenance"]

    def record(self, cell_id: str) -> Recorded:
        return self._store_of(cell_id).load(cell_id)

    def requests(self, cell_id: str) -> pd.DataFrame:
        return self.record(cell_id).requests.to_pandas()

    def iterations(self, cell_id: str) -> pd.DataFrame:
        return self.record(cell_id).iterations.to_pandas()

    def _store_of(self, cell_id: str) -> Store:
        return next((self._store(p.cell) for p in self.planned if p.cell.id == cell_id), self.store)


def open_study(name: str | Path) -> Study:
    """Load a scenario and its plan. UsageError as scenario.load."""
    loaded = scenario.load(name)
    return Study(loaded, plan.expand(loaded), Store(paths.RESULTS / loaded.hardware))


def _coordinates(p: plan.Planned) -> dict[str, Any]:
    cell, lengths = p.cell, p.cell.dataset
    fixed = lengths["kind"] == "fixed"
    return {
        "cell": cell.id,
        "engine": p.engine,
        "engine_version": cell.engine_version,
        "hardware": cell.hardware,
        "evidence": cell.evidence,
        "transport": cell.transport,
        "engine_options": json.dumps(cell.engine_options, sort_keys=True),
        "model": cell.model,
        "dataset": p.dataset,
        "input_len": lengths["input_len"] if fixed else None,
        "output_len": lengths["output_len"] if fixed else None,
        "num_requests": cell.num_requests,
        "max_batch_size": cell.max_batch_size,
        "max_num_tokens": cell.max_num_tokens,
        "request_rate": np.inf if cell.request_rate is None else cell.request_rate,
        "token_rule": json.dumps(cell.token_rule, sort_keys=True) if cell.token_rule else None,
        "seed": cell.seed,
        "repeat": p.repeat,
        "sweep": p.sweep,
    }


POINT = [
    "engine",
    "engine_version",
    "hardware",
    "evidence",
    "transport",
    "engine_options",
    "model",
    "dataset",
    "input_len",
    "output_len",
    "max_batch_size",
    "max_num_tokens",
    "request_rate",
    "token_rule",
]

# a single run's figures that have an interval within the run, and the key of its half-width
WITHIN = {
    "output_throughput_tok_s": "output_throughput_half_tok_s",
    "steady_throughput_tok_s": "output_throughput_half_tok_s",
    "ttft_mean_ms": "ttft_mean_half_ms",
    "tpot_mean_ms": "tpot_mean_half_ms",
}


# sweeps so named repeat points because an earlier run was far from its simulation
MISSED = "missed-"


def by_outcome(sweep: str, seed: int) -> bool:
    """Whether a planned cell is such a repeat."""
    return sweep.startswith(MISSED) and seed > 0


def fair(frame: pd.DataFrame) -> pd.DataFrame:
    """The cells without the repeats of sweeps named MISSED, which were chosen by an outcome and would bias a mean, and
    what it is said to vary by.
    """
    if not {"sweep", "seed"} <= set(frame.columns):
        return frame
    rows = zip(frame["sweep"], frame["seed"], strict=True)
    return frame[np.array([not by_outcome(sweep, seed) for sweep, seed in rows], dtype=bool)]


def aggregate(frame: pd.DataFrame, by: list[str] | None = None) -> pd.DataFrame:
    """A row a point, over its repeats.

    Each figure becomes its mean over the valid repeats (over all, and `valid` False, when none is), with
    `<figure>_lo` and `<figure>_hi`, the 95% t interval, and `n`, the repeats behind it. A single run has an interval
    only for the figures of WITHIN: at a finite rate by batch means; all at once, where a run is a few waves and no
    stationary process, from how much the frame's repeated points of the same kind (noise.py) differ from themselves
    (`pooled`), if any are repeated. `interval` says which it is ("repeats", "batches", "pooled"). Cells that are not
    recorded are left out.
    """
    by = by or POINT
    figures = [k for k in (*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS) if k not in ("valid", "invalid_reasons")]
    once = frame[frame["recorded"]].drop_duplicates("cell").reset_index(drop=True)
    # taken out of the frame once: thousands of small frames take seconds
    numbers = {key: pd.to_numeric(once[key]).to_numpy(float) for key in figures}
    good, requests = once["valid"].to_numpy(bool), once["num_requests"].to_numpy()
    group = once.groupby(by, dropna=False, sort=False).ngroup().to_numpy()
    waves = np.isinf(pd.to_numeric(once.get("request_rate", pd.Series(np.nan, once.index))).to_numpy(float))
    chance = (once["evidence"] != "simulated").to_numpy(bool) if "evidence" in once else np.full(len(once), True)
    kind = noise.kinds(once)
    like = np.flatnonzero(good & waves & chance)
    alike = [kind[n] for n in like]
    known = {key: noise.pooled(numbers[key][like], group[like], alike) for key in WITHIN}
    points = [{k: np.nan if v is None else v for k, v in point.items()} for point in once[by].to_dict("records")]
    rows = []
    for at in np.split(np.argsort(group, kind="stable"), np.flatnonzero(np.diff(np.sort(group))) + 1):
        if not len(at):
            continue
        used = at[good[at]] if good[at].any() else at
        row = points[at[0]] | {
            "n": len(used),
            "interval": "repeats" if len(used) > 1 else "pooled" if waves[used[0]] else "batches",
            "valid": bool(good[at].any()),
            "invalid": int((~good[at]).sum()),
            "num_requests": requests[used[0]],
            "invalid_reasons": sorted({reason for n in at for reason in once.at[n, "invalid_reasons"]}),
        }
        for key in figures:
            mean, low, high = metrics.interval(numbers[key][used])
            if len(used) == 1 and key in WITHIN:
                only = used[0]
                borrowed = noise.half(known[key].get(kind[only])) * mean if chance[only] else math.nan
                half = borrowed if waves[only] else numbers[WITHIN[key]][only]
                low, high = mean - half, mean + half
            row |= {key: mean, f"{key}_lo": low, f"{key}_hi": high}
        rows.append(row)
    return pd.DataFrame(rows)
