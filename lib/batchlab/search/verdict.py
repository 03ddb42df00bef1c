"""What is decided at one point, from the runs made there, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from batchlab import metrics
from batchlab.errors import UsageError
from batchlab.search.requirements import Requirement

KEEPS, MISSES, UNDECIDED, INVALID = "keeps", "misses", "undecided", "invalid"
INSIDE, OUTSIDE = "inside every limit", "outside a limit"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a point is decided. Every run gives each requirement one value; what is judged is their mean over the runs.

    * One run decides when a value is at least `clear` beyond its limit (0.5: half as much again), or every latency is
      as far below its own. 0 switches that off.
    * Otherwise `repeats` runs with different seeds are made, and the t interval of the mean decides: all inside the
      limits keep them, one outside misses. While one straddles its limit another run is made, up to `max_repeats`;
      then the point is undecided.
    * `confidence` is that of a point's verdict: the error is shared between the looks at a growing sample and between
      the requirements (Bonferroni), so looking again does not erode it.
    * A run at a finite rate lasts `load_s` seconds at least, from the first arrival to the last, and up to three times
      that until it has sent two batches: a few requests are a burst, which shows no rate. 0 leaves it to the scenario.
    """

    confidence: float = 0.95
    repeats: int = 3
    max_repeats: int = 6
    clear: float = 0.5
    load_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"confidence {self.confidence} must be at least 0.5 and below 1")
        if not 1 <= self.repeats <= self.max_repeats:
            raise UsageError(f"repeats {self.repeats} must be at least 1 and at most max_repeats {self.max_repeats}")
        if not self.clear >= 0:
            raise UsageError(f"clear {self.clear} must be 0 or more")
        if not 0 <= self.load_s < math.inf:
            raise UsageError(f"load_s {self.load_s} must be 0 or more")

    def error(self, requirements: int) -> float:
        """The two-sided error of one interval."""
        return (1 - self.confidence) / ((self.max_repeats - self.repeats + 1) * requirements)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A requirement's mean over the runs with its interval; `low` and `high` are NaN where there is none."""

    requirement: Requirement
    value: float
    low: float
    high: float

    def verdict(self) -> str:
        r, known = self.requirement, not math.isnan(self.low)
        if not known:
            return KEEPS if r.holds(self.value) else MISSES
        inside = [r.holds(v) for v in (self.low, self.high)]
        return KEEPS if all(inside) else UNDECIDED if any(inside) else MISSES


@dataclass(frozen=True, slots=True)
class Judged:
    """A point's verdict, how it came about, and the estimates behind it. `sure`: an interval or a clear distance
    stands behind it, not the value of single runs alone."""

    verdict: str
    how: str
    sure: bool
    runs: int
    estimates: tuple[Estimate, ...] = ()

    def of(self, chosen: Sequence[Requirement]) -> str:
        """The verdict on some of the requirements."""
        if not self.estimates:
            return self.verdict
        return combined([e.verdict() for e in self.estimates if e.requirement in chosen])


def combined(verdicts: Sequence[str]) -> str:
    """One miss misses; one undecided leaves the point undecided."""
    return MISSES if MISSES in verdicts else UNDECIDED if UNDECIDED in verdicts else KEEPS


def judge(
    runs: Sequence[pd.DataFrame], requirements: Sequence[Requirement], rule: Rule, *, last: bool
) -> Judged | None:
    """The verdict over these runs' requests (frames of records.REQUESTS); None: another run is needed.

    `last`: no further run can be made, so what cannot be decided is undecided, and a single run speaks by itself.
    """
    values = np.array([[r.of(run) for r in requirements] for run in runs])  # (runs, requirements)
    count = len(runs)
    far = {_clear(run, requirements, rule.clear) for run in values} if rule.clear else {None}
    if len(far) == 1 and (how := far.pop()):
        plain = tuple(
            Estimate(r, float(m), math.nan, math.nan) for r, m in zip(requirements, values.mean(0), strict=True)
        )
        return Judged(KEEPS if how == INSIDE else MISSES, f"{how} by {rule.clear:.0%} or more", True, count, plain)
    if count < rule.repeats and not last:
        return None
    estimates = tuple(
        _estimate(r, values[:, n], runs, rule.error(len(requirements))) for n, r in enumerate(requirements)
    )
    verdict = combined([e.verdict() for e in estimates])
    if verdict == UNDECIDED and not last and count < rule.max_repeats:
        return None
    bare = any(math.isnan(e.low) for e in estimates)
    how = (
        "single run, by its value alone"
        if bare
        else f"interval over {count} runs"
        if count > 1
        else "interval by batch means within a single run"
    )
    return Judged(verdict, how, not bare, count, estimates)


def _clear(values: np.ndarray, requirements: Sequence[Requirement], clear: float) -> str | None:
    """Whether one run is far outside a limit, or far inside all of them."""
    inside = []
    for value, r in zip(values, requirements, strict=True):
        if r.at_most:
            if value >= r.bound * (1 + clear):
                return OUTSIDE
            inside.append(value <= r.bound / (1 + clear))
        else:
            if value <= r.bound / (1 + clear):
                return OUTSIDE
            inside.append(value >= 1.0 or (r.name == "keeps_up" and value >= (1 + r.bound) / 2))
    return INSIDE if all(inside) else None


def _estimate(r: Requirement, values: np.ndarray, runs: Sequence[pd.DataFrame], error: float) -> Estimate:
    mean = float(values.mean())
    if not math.isfinite(mean):
        return Estimate(r, mean, mean, mean)
    if len(values) > 1:
        half = stdtrit(len(values) - 1, 1 - error / 2) * values.std(ddof=1) / math.sqrt(len(values))
    elif r.values is not None:
        within = metrics.batch_means_half(r.values(runs[0]))
        half = within * stdtrit(metrics.BATCHES - 1, 1 - error / 2) / stdtrit(metrics.BATCHES - 1, 0.975)
    else:
        # an engine that keeps up, or falls behind, by far does so whatever the run
        half = 0.0 if r.name == "keeps_up" and not r.bound / 1.1 < mean < (1 + r.bound) / 2 else math.nan
    return Estimate(r, mean, mean - half, mean + half)
