"""What notebooks stand on: a scenario with its plan and its records, and the frame of its cells."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from batchlab import estimate, measure, metrics, paths, plan, scenario
from batchlab.cell import Cell
from batchlab.errors import EngineError, UsageError
from batchlab.progress import Progress
from batchlab.scenario import Scenario
from batchlab.store import DamagedCell, Store


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Study:
    """A scenario, its planned cells and the store of its hardware."""

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
        """None when this machine can measure the scenario, else why not, in one line."""
        return measure.obstacle(self.scenario)

    def measure(
        self,
        sweep: str | None = None,
        *,
        engine: str | None = None,
        retry_invalid: bool = False,
        tell: Callable[[str], None] = _say,
    ) -> measure.Outcome:
        """Measure what is missing. UsageError when this machine cannot, EngineError never: see Outcome.failures."""
        cells = [c for c in self.cells(sweep) if engine in (None, c.engine)]
        wanted = measure.missing(cells, self.store, retry_invalid=retry_invalid, tell=tell)
        if not wanted:
            return measure.Outcome(0, 0, [])
        if reason := self.can_measure():
            raise UsageError(reason)
        progress = Progress(total=len(wanted), estimator=estimate.fit(self.store, self.cells()), left=wanted)
        return measure.run(self.scenario, wanted, self.cells(), self.store, progress)

    def ensure(self, sweep: str | None = None) -> pd.DataFrame:
        """Measure what is missing, if this machine can, and return the frame of the sweep's cells.

        EngineError, with the engine's last lines, when one could not start: what could be measured is recorded by then.
        """
        cells = self.cells(sweep)
        if self.can_measure() is None and measure.missing(cells, self.store, tell=_say):
            for _, reason, tail in self.measure(sweep).failures:
                raise EngineError(f"{reason}\n{tail}" if tail else reason, tail)
        return self.frame(sweep)

    def frame(self, sweep: str | None = None) -> pd.DataFrame:
        """A row a planned cell: its coordinates, its summary, and whether it is recorded."""
        self._check(sweep)
        summaries: dict[str, dict[str, Any]] = {}
        rows = []
        for p in self.planned:
            if sweep not in (None, p.sweep):
                continue
            if p.cell.id not in summaries:
                summaries[p.cell.id] = self._summary(p.cell)
            rows.append(_coordinates(p) | summaries[p.cell.id])
        return pd.DataFrame(rows)

    def _summary(self, cell: Cell) -> dict[str, Any]:
        try:
            recorded = self.store.load(cell.id)
        except (KeyError, DamagedCell):
            return {
                "recorded": False,
                "machine": None,
                "commit": None,
                "measured_at": None,
                **dict.fromkeys((*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS)),
                "valid": False,
                "invalid_reasons": ["not measured"],
            }
        source, meta = recorded.meta["provenance"], recorded.meta
        summary = metrics.summary(
            recorded.requests.to_pandas(),
            recorded.iterations.to_pandas(),
            max_batch_size=cell.max_batch_size,
            gpu_memory_peak_gib=(meta["gpu"] or {}).get("memory_peak_gib"),
            invalid_reasons=meta["invalid_reasons"],
        )
        return {
            "recorded": True,
            "machine": source["machine"]["name"],
            "commit": source["commit"],
            "measured_at": source["started"],
            **summary,
        }

    def provenance(self, cell_id: str) -> dict[str, Any]:
        return self.store.meta(cell_id)["provenance"]

    def requests(self, cell_id: str) -> pd.DataFrame:
        return self.store.load(cell_id).requests.to_pandas()

    def iterations(self, cell_id: str) -> pd.DataFrame:
        return self.store.load(cell_id).iterations.to_pandas()


def open_study(name: str | Path) -> Study:
    """Load a scenario and its plan. UsageError as scenario.load."""
    loaded = scenario.load(name)
    return Study(loaded, plan.expand(loaded), Store(paths.RESULTS / loaded.hardware))


def _coordinates(p: plan.Planned) -> dict[str, Any]:
    cell, lengths = p.cell, p.cell.dataset
    fixed = lengths["kind"] == "fixed"
    return {
        "cell": cell.id,
        "engine": cell.engine,
        "engine_version": cell.engine_version,
        "hardware": cell.hardware,
        "evidence": "measured",
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


def aggregate(frame: pd.DataFrame, by: list[str] | None = None) -> pd.DataFrame:
    """A row a point, over its repeats.

    Each figure becomes its mean over the valid repeats (over all, and `valid` False, when none is), with
    `<figure>_lo` and `<figure>_hi`, the 95% t interval, and `n`, the repeats behind it. A single run has
    an interval only for the figures of WITHIN, by batch means; `interval` says which of the two it is ("repeats",
    "batches"). Cells that are not recorded are left out.
    """
    by = by or POINT
    figures = [k for k in (*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS) if k not in ("valid", "invalid_reasons")]
    rows = []
    for point, group in frame[frame["recorded"]].drop_duplicates("cell").groupby(by, dropna=False, sort=False):
        good = group[group["valid"].astype(bool)]
        used = good if len(good) else group
        row = dict(zip(by, point if isinstance(point, tuple) else (point,), strict=True))
        row |= {
            "n": len(used),
            "interval": "repeats" if len(used) > 1 else "batches",
            "valid": bool(len(good)),
            "invalid": len(group) - len(good),
            "num_requests": used["num_requests"].iloc[0],
            "invalid_reasons": sorted({reason for reasons in group["invalid_reasons"] for reason in reasons}),
        }
        for key in figures:
            mean, low, high = metrics.interval(pd.to_numeric(used[key]).to_numpy(float))
            if len(used) == 1 and key in WITHIN:
                half = pd.to_numeric(used[WITHIN[key]]).iloc[0]
                low, high = mean - half, mean + half
            row |= {key: mean, f"{key}_lo": low, f"{key}_hi": high}
        rows.append(row)
    return pd.DataFrame(rows)
