"""When each request arrives, in seconds from t0. The first arrives at 0."""

import math

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.seeds import generator

KINDS = ("infinite", "constant", "poisson", "gamma", "ramp", "closed", "trace")


def arrival_times(
    arrival: dict | None, rate: float | None, count: int, seed: int, recorded: np.ndarray | None = None
) -> tuple[np.ndarray, int | None]:
    """float64 (count,), ascending, and the concurrency of a closed loop. recorded: a trace's own times.

    Random gaps are scaled so that the last of N requests arrives at (N − 1) / rate: every run meets the
    asked rate exactly, and what stays random is how the arrivals bunch (a Poisson process given its count).
    Without that a run of 64 requests would miss its rate by an eighth.
    """
    arrival = arrival or {}
    if rate is not None and math.isinf(rate):
        rate = None
    if rate is not None and not rate > 0:
        raise UsageError(f"request_rate {rate} must be greater than 0; use inf for all at once")
    kind = arrival.get("kind") or ("infinite" if rate is None else "poisson")
    if kind not in KINDS:
        raise UsageError(f"arrival kind {kind!r} is unknown; use one of {', '.join(KINDS)}")
    if kind in ("infinite", "closed", "trace") and rate is not None:
        raise UsageError(f"arrival {kind} sets its own pace; leave request_rate {rate} out")
    if kind == "trace":
        if recorded is None:
            raise UsageError("arrival trace needs a dataset of kind trace")
        return recorded, None
    if kind == "infinite":
        return np.zeros(count), None
    if kind == "closed":
        concurrency = arrival.get("concurrency")
        if not isinstance(concurrency, int) or concurrency < 1:
            raise UsageError(f"arrival closed needs a concurrency of at least 1, not {concurrency!r}")
        return np.zeros(count), concurrency
    if rate is None:
        raise UsageError(f"arrival {kind} needs a finite request_rate")
    if kind == "constant":
        return np.arange(count) / rate, None
    random = generator("arrivals", seed)
    if kind == "gamma":
        burstiness = arrival.get("burstiness") or 0
        if not burstiness > 0:
            raise UsageError(f"arrival gamma needs a burstiness greater than 0, not {arrival.get('burstiness')!r}")
        return _scaled(random.gamma(burstiness, size=count - 1)) * (count - 1) / rate, None
    events = _scaled(random.exponential(size=count - 1)) * (count - 1)
    return (_ramp(events, rate, arrival.get("to") or 0) if kind == "ramp" else events / rate), None


def _scaled(gaps: np.ndarray) -> np.ndarray:
    """Times from 0 to 1 with these gaps' proportions, one more than there are gaps."""
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    if len(gaps) and not times[-1] > 0:
        raise UsageError("the arrivals all fall on one moment; use a larger burstiness")
    return times / times[-1] if len(gaps) else times


def _ramp(events: np.ndarray, start: float, end: float) -> np.ndarray:
    """A rate that goes evenly, in time, from `start` to `end`. events: ascending, on the scale of expected
    arrivals.

    The rate is r(t) = start + (end − start) t / T over T = 2 n / (start + end) for n expected arrivals;
    each time is where its integral equals the event, so the mean rate is that of both ends whatever the
    slope.
    """
    if not end > 0:
        raise UsageError(f"arrival ramp needs a last rate `to` greater than 0, not {end}")
    if not events[-1]:
        return events
    slope = (end - start) * (start + end) / (2 * events[-1])
    # start t + slope t² / 2 = event, solved in the form that stays exact as the slope goes to 0
    return 2 * events / (start + np.sqrt(np.maximum(start * start + 2 * slope * events, 0)))
