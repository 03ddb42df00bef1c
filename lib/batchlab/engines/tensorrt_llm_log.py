"""TensorRT-LLM's account of its iterations: lines of its log, and the objects of GET /metrics.

The log (`print_iter_log: true`) is there in every release, in two formats (of up to 1.2, and newer), and tells what was
scheduled, but not what waits. /metrics tells that too; each read takes what it gives out of the server, and in some
releases with `return_perf_metrics` another reader has had it before. So the log leads, and /metrics, read once after
the cell, fills in by iteration number what it can; alone it serves only where the log has no line.

The log's times are whole seconds beside exact step times, from which the exact times are put together again.
"""

import re
from calendar import timegm
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import strptime
from typing import Any

from batchlab.engines.tools import from_wall

_ITERATION = re.compile(r"\biter = (\d+), global_rank = 0,.*\bnum_scheduled_requests(?:: | = )(\d+)\b")
_HOST_MS = re.compile(r"\bhost_step_time = ([\d.]+)ms")
_DEVICE_MS = re.compile(r"\bprev_device_step_time = ([\d.]+)ms")
_STAMP = re.compile(r"\btimestamp = (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_KV = re.compile(r"\bkv_cache_util = ([\d.]+)")
_STATE = re.compile(r"'(num_\w+)': (\d+)")
IDLE_MS = 5.0  # a host step this much above twice its device step holds a wait for requests


@dataclass(slots=True)
class Step:
    """An iteration as its line tells it; `device_ms` comes with the next line. stamp_s: since 1970, cut to seconds."""

    number: int
    scheduled: int
    prefill_tokens: int
    decode_tokens: int
    host_ms: float
    stamp_s: int
    kv_use: float | None
    device_ms: float | None = None

    @property
    def took_s(self) -> float:
        """Without the wait of an idle engine, which host_step_time holds too."""
        idle = self.device_ms is not None and self.host_ms > 2 * self.device_ms + IDLE_MS
        return (self.device_ms if idle else self.host_ms) / 1e3


def steps(lines: Iterable[str]) -> list[Step]:
    """The iterations in these log lines; times are UTC."""
    found: list[Step] = []
    for line in lines:
        head = _ITERATION.search(line)
        if not head:
            continue
        state = {key: int(value) for key, value in _STATE.findall(line)}
        stamp, host, device, kv = (pattern.search(line) for pattern in (_STAMP, _HOST_MS, _DEVICE_MS, _KV))
        if not stamp or not host:
            continue
        if found and device and found[-1].number == int(head[1]) - 1:
            found[-1].device_ms = float(device[1])
        found.append(
            Step(
                number=int(head[1]),
                scheduled=int(head[2]),
                prefill_tokens=state.get("num_ctx_tokens", 0),
                decode_tokens=state.get("num_generation_tokens", 0),
                host_ms=float(host[1]),
                stamp_s=timegm(strptime(stamp[1], "%Y-%m-%d %H:%M:%S")),
                kv_use=float(kv[1]) if kv else None,
            )
        )
    return found


def ends(found: Sequence[Step]) -> list[float]:
    """When each iteration ended, seconds since 1970.

    The host steps add up to a clock that runs exactly but starts anywhere. Every line's second bounds that start from
    both sides; the middle of what is left is taken. Where nothing is left (the clock and the seconds part: steps are
    missing), a new stretch begins.
    """
    times: list[float] = []
    begin, clock, low, high = 0, 0.0, float("-inf"), float("inf")
    elapsed: list[float] = []

    def settle() -> None:
        times.extend((low + high) / 2 + at for at in elapsed[begin:])

    for step in found:
        clock += step.host_ms / 1e3 if elapsed else 0.0
        new_low, new_high = max(low, step.stamp_s - clock), min(high, step.stamp_s + 1 - clock)
        if new_low > new_high:
            settle()
            begin, new_low, new_high = len(elapsed), step.stamp_s - clock, step.stamp_s + 1 - clock
        low, high = new_low, new_high
        elapsed.append(clock)
    settle()
    return times


def rows(
    found: Sequence[Step], stats: Sequence[dict[str, Any]], t0_ns: int, limits: tuple[int, int], since: float
) -> list[dict]:
    """Rows for ITERATIONS. stats: of /metrics, maybe none; since: those before this second (since 1970) are older."""
    by_number = {s["iter"]: s for s in stats if _when(s) >= since}
    if not found:
        return [_row(_from_stats(s), _when(s), s, t0_ns, limits) for s in sorted(by_number.values(), key=_when)]
    return [
        _row(step, _when(stat) if stat else end, stat, t0_ns, limits)
        for step, end in zip(found, ends(found), strict=True)
        for stat in [by_number.get(step.number)]
    ]


def _row(step: Step, end_s: float, stat: dict[str, Any] | None, t0_ns: int, limits: tuple[int, int]) -> dict:
    end = from_wall(end_s, t0_ns)
    kv = (stat or {}).get("kvCacheStats") or {}
    used = kv["usedNumBlocks"] / kv["maxNumBlocks"] if kv.get("maxNumBlocks") else step.kv_use
    return {
        "scheduled_s": end - (stat["iterLatencyMS"] / 1e3 if stat else step.took_s),
        "output_s": end,
        "running": step.scheduled,
        "admitted": stat["numActiveRequests"] if stat else None,
        "waiting": stat["numQueuedRequests"] if stat else None,
        "prefill_tokens": step.prefill_tokens,
        "decode_tokens": step.decode_tokens,
        "kv_use": used,
        "preemptions": stat["inflightBatchingStats"]["numPausedRequests"] if stat else None,
        "max_batch_size": limits[0],
        "max_num_tokens": limits[1],
    }


def _from_stats(stat: dict[str, Any]) -> Step:
    batch = stat["inflightBatchingStats"]
    return Step(
        stat["iter"],
        batch["numScheduledRequests"],
        batch["numCtxTokens"],
        batch.get("numGenRequests", batch["numScheduledRequests"] - batch["numContextRequests"]),
        stat["iterLatencyMS"],
        0,
        None,
    )


def _when(stat: dict[str, Any]) -> float:
    """Seconds since 1970 of "11-29-2026 20:04:05.123456", UTC."""
    whole, _, part = stat["timestamp"].partition(".")
    return timegm(strptime(whole, "%m-%d-%Y %H:%M:%S")) + float(f"0.{part or 0}")
