"""Reads what the scheduler inside vLLM wrote (vllm_trace.py has the format) and sets its limits."""

import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from batchlab.scenario import Limits

# the request's number in our X-Request-Id (b<index>), inside vLLM's own id (cmpl-b12-0-1f3a…, chatcmpl-b12-…, b12)
_INDEX = re.compile(r"(?:^|-)b(\d+)(?:-|$)")


@dataclass(frozen=True, slots=True)
class Traced:
    """What the engine says of one cell: rows for ITERATIONS, engine columns by request index, limits seen.

    `source`: where that comes from, "scheduler" (its own trace, requests included), "log", "metrics" (a page that lists
    iterations), "polled" (a gauge), or "none".
    `reasons`: why the cell is invalid by what only the engine's side knows. `unchecked`: what could not be looked at.
    `facts`: anything else that it told, for the record.
    """

    iterations: list[dict]
    requests: dict[int, dict]
    limits: list[tuple[int, int]]
    source: str = "scheduler"
    reasons: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    facts: dict = field(default_factory=dict)


def set_limits(path: Path, limits: Limits) -> None:
    """Write the control file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(limits.model_dump()))
    os.replace(temporary, path)


class TraceReader:
    """Follows one trace file; `mark()` forgets what was written so far, `take()` parses what came since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def _new(self) -> list[list[str]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        return [line.split(",") for line in whole.decode().splitlines()]

    def mark(self) -> None:
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def last_iteration(self) -> dict | None:
        """`waiting` and `kv_use` of the last iteration since the mark, which moves on to here; None: no new one."""
        lines = self._new()
        self.mark()
        found = next((f for kind, *f in reversed(lines) if kind == "I"), None)
        return {"waiting": int(found[4]), "kv_use": float(found[7])} if found else None

    def attention(self) -> str | None:
        """What the engine wrote at its start about its attention kernels; None when it wrote nothing."""
        with open(self.path) as file:
            kind, _, told = file.readline().strip().partition(",")
        return told if kind == "A" and told else None

    def wait_finished(self, count: int, timeout_s: float) -> bool:
        """Wait until this many requests have left the engine since the mark."""
        deadline = time.monotonic() + timeout_s
        while sum(fields[0] == "R" for fields in self._new()) < count:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def take(self, t0_ns: int) -> Traced:
        """Everything since the mark, with times in seconds after t0."""

        def seconds(text: str) -> float:
            return (int(text) - t0_ns) / 1e9

        iterations, requests, limits = [], {}, []
        for kind, *f in self._new():
            if kind == "I":
                iterations.append(
                    {
                        "scheduled_s": seconds(f[0]),
                        "output_s": seconds(f[1]),
                        "running": int(f[2]),
                        "admitted": int(f[3]),
                        "waiting": int(f[4]),
                        "prefill_tokens": int(f[5]),
                        "decode_tokens": int(f[6]),
                        "kv_use": float(f[7]),
                        "preemptions": int(f[8]),
                        "max_batch_size": int(f[9]),
                        "max_num_tokens": int(f[10]),
                        "launched_s": seconds(f[11]) if f[11:] and f[11] else None,
                    }
                )
            elif kind == "L":
                limits.append((int(f[1]), int(f[2])))
            elif kind == "R" and (found := _INDEX.search(f[0])):
                requests[int(found[1])] = {
                    "engine_queued_s": seconds(f[1]),
                    "engine_first_s": seconds(f[2]),
                    "engine_last_s": seconds(f[3]),
                    "cached_tokens": int(f[5]),
                    "preemptions": int(f[6]),
                }
        return Traced(iterations, requests, limits)
