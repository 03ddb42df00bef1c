"""When each request arrives, in seconds from t0. The first arrives at 0."""

import math

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.seeds import generator


def arrival_times(
    arrival: dict | None, rate: float | None, count: int, seed: int
) -> tuple[np.ndarray, int | None]:
    """float64 (count,), ascending, and the concurrency of a closed loop.

    Random gaps are scaled so that the last of N requests arrives at (N − 1) / rate: the asked rate is met
    exactly in every run, and what stays random is how the arrivals bunch (a Poisson process given its
    count).
    """
    if rate is not None and math.isinf(rate):
        rate = None
    if rate is not None and not rate > 0:
        raise UsageError(f"request_rate {rate} must be greater than 0; use inf for all at once")
    kind = (arrival or {}).get("kind") or ("infinite" if rate is None else "poisson")
    if kind == "infinite":
        if rate is not None:
            raise UsageError(f"arrival infinite contradicts request_rate {rate}; leave one out")
        return np.zeros(count), None
    if rate is None:
        raise UsageError(f"arrival {kind} needs a finite request_rate")
    if kind == "constant":
        return np.arange(count) / rate, None
    if kind == "poisson":
        return _scaled(generator("arrivals", seed).exponential(size=count - 1), count, rate), None
    raise UsageError(f"arrival kind {kind!r} is unknown; use infinite, constant or poisson")


def _scaled(gaps: np.ndarray, count: int, rate: float) -> np.ndarray:
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    return times * ((count - 1) / rate / times[-1]) if count > 1 else times
