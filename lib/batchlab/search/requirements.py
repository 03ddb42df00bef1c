"""What must hold in a run: a latency under its limit, a share of good requests, an engine that keeps up."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchlab import metrics
from batchlab.errors import UsageError

KEEPS_UP = 0.9  # first tokens must come at this share of the rate of the arrivals, at least
_NAME = re.compile(r"(ttft|tpot|e2e)_(mean|p\d{1,2}(?:\.\d+)?)_ms")
_OF = {"ttft": metrics.ttft_ms, "tpot": metrics.tpot_ms, "e2e": metrics.e2e_ms}
_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end latency"}


@dataclass(frozen=True, slots=True)
class Goodput:
    """At least `share` of all requests sent meet every given limit (ms); a failed request meets none."""

    share: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        limits = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        if not 0 < self.share <= 1:
            raise UsageError(f"goodput share {self.share} must be above 0 and at most 1")
        if not any(limits) or any(v is not None and not v > 0 for v in limits):
            raise UsageError("goodput needs at least one of ttft_ms, tpot_ms and e2e_ms, each above 0")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One figure of a run against its bound. `eases_with_batch`: a larger batch makes it easier to keep (waiting), or
    harder (decoding), or neither surely (None)."""

    name: str
    words: str
    bound: float
    at_most: bool
    eases_with_batch: bool | None
    of: Callable[[pd.DataFrame], float]
    values: Callable[[pd.DataFrame], np.ndarray] | None = None  # whose mean it is, in the order of time

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def told(self) -> str:
        if self.name == "keeps_up":
            return f"the engine keeps up (first tokens at {self.bound:.0%} of the arrivals' rate or more)"
        if self.name == "goodput_share":
            return f"{self.words} for at least {self.bound:.0%} of the requests"
        return f"{self.words} ≤ {self.bound:g} ms"


def requirements(limits: Mapping[str, float] | Goodput, *, finite_rate: bool) -> tuple[Requirement, ...]:
    """The requirements that `limits` name: {"ttft_p90_ms": 1000, "tpot_mean_ms": 20}, or a Goodput.

    Names are ttft, tpot or e2e, then mean or a percentile, then ms; the statistic is over the requests of a run. At a
    finite rate the engine must also keep up: without that, a search under a limit on TPOT alone would never end,
    because a queue costs no TPOT. UsageError for an unknown name or a limit that is not above 0.
    """
    found = [_share(limits)] if isinstance(limits, Goodput) else [_latency(k, v) for k, v in limits.items()]
    if not found:
        raise UsageError('no limit is given; write for instance {"ttft_p90_ms": 1000, "tpot_mean_ms": 20}')
    return (*found, _KEEPING_UP) if finite_rate else tuple(found)


def _latency(name: str, bound: float) -> Requirement:
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(f"limit {name!r} is unknown; write ttft, tpot or e2e, then mean or p1 to p99: ttft_p90_ms")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < float("inf"):
        raise UsageError(f"limit {name}: {bound!r} is not a number of milliseconds above 0")
    kind, statistic = match[1], match[2]
    column = _OF[kind]

    def of(requests: pd.DataFrame) -> float:
        values = column(requests)
        found = values.mean() if statistic == "mean" else values.quantile(float(statistic[1:]) / 100)
        return float("inf") if np.isnan(found) else float(found)  # nothing completed keeps no limit

    def in_order(requests: pd.DataFrame) -> np.ndarray:
        return column(requests.sort_values("scheduled_s" if kind == "ttft" else "last_s")).to_numpy(float)

    words = f"{'mean' if statistic == 'mean' else statistic} {_WORDS[kind]}"
    eases = {"ttft": True, "tpot": False, "e2e": None}[kind]
    return Requirement(name, words, float(bound), True, eases, of, in_order if statistic == "mean" else None)


def _share(goodput: Goodput) -> Requirement:
    limits = {"ttft": goodput.ttft_ms, "tpot": goodput.tpot_ms, "e2e": goodput.e2e_ms}

    def of(requests: pd.DataFrame) -> float:
        good = metrics.meets(
            requests, ttft_limit_ms=limits["ttft"], tpot_limit_ms=limits["tpot"], e2e_limit_ms=limits["e2e"]
        )
        return float(good.mean()) if len(good) else 0.0

    words = " and ".join(f"{_WORDS[k]} ≤ {v:g} ms" for k, v in limits.items() if v is not None)
    return Requirement("goodput_share", words, goodput.share, False, None, of)


def _keeping_up(requests: pd.DataFrame) -> float:
    """Rate of first tokens over rate of arrivals: 1 while waiting times do not grow, below it by as much as they do."""
    good = requests[metrics.completed(requests)]
    if len(good) < 2:
        return 0.0
    due, first = (good[c].max() - good[c].min() for c in ("scheduled_s", "first_s"))
    return float(min(1.0, due / first)) if first > 0 else 1.0


_KEEPING_UP = Requirement("keeps_up", "share of the arrivals' rate", KEEPS_UP, False, True, _keeping_up)
