"""The kernel's receive times, moved onto CLOCK_MONOTONIC.

SO_TIMESTAMPNS counts on CLOCK_REALTIME. Both clocks are slewed alike; only a step of the wall clock moves
them apart, which shows as a changed offset and makes the kernel's times of that run unusable.
"""

import time
from collections.abc import Sequence

import numpy as np

STEP_NS = 50_000


def offset_ns(tries: int = 20) -> int:
    """CLOCK_MONOTONIC − CLOCK_REALTIME, from the tightest of several readings (well under a microsecond)."""
    best, offset = None, 0
    for _ in range(tries):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best is None or after - before < best:
            best, offset = after - before, (before + after) // 2 - wall
    return offset


def arrivals(times: Sequence[int], stamps: Sequence[bytes], offset: int) -> np.ndarray:
    """int64 (n,): when the bytes of each read arrived, CLOCK_MONOTONIC ns. times: when they were read;
    stamps: the kernel's timespec for each, empty where it gave none, which leaves the time of the read."""
    read = np.asarray(times, np.int64)
    if not all(stamps):
        stamps = [stamp or b"\x7f" * 16 for stamp in stamps]
    pairs = np.frombuffer(b"".join(stamps), np.int64).reshape(-1, 2)
    with np.errstate(over="ignore"):
        kernel = pairs[:, 0] * 1_000_000_000 + pairs[:, 1] + offset
    given = pairs[:, 1] < 1_000_000_000
    # never before the packet before it, never after it was read
    return np.maximum.accumulate(np.minimum(np.where(given, kernel, read), read))
