"""Our end of the in-process transport: a job out, records back (vllm_inprocess.py is the other end)."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from batchlab.client import Replay
from batchlab.client.rows import _chunks, _gaps
from batchlab.workload import Request, Workload


def replay(
    connection: Connection,
    workload: Workload,
    *,
    timeout_s: float,
    keep_chunks: bool,
    progress: Callable[[int, int], None] | None,
) -> Replay:
    """Run a workload through AsyncLLM; the same rows as over HTTP.

    TimeoutError after timeout_s, RuntimeError when the engine's side reports an error, EOFError when it is gone.
    """
    requests = [(r.index, r.scheduled_s, list(r.prompt_ids), r.output_len) for r in workload.requests]
    connection.send(("run", {"requests": requests, "concurrency": workload.concurrency, "lead_s": 0.1}))
    deadline = time.monotonic() + timeout_s
    while True:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"no result after {timeout_s:.0f} s")
        kind, *content = connection.recv()
        if kind == "progress" and progress:
            progress(*content)
        elif kind == "error":
            raise RuntimeError(content[0])
        elif kind == "done":
            break
    (result,) = content
    by_index = {r.index: r for r in workload.requests}
    rows = [_row(by_index[raw["index"]], raw, result["t0_ns"], keep_chunks) for raw in result["requests"]]
    return Replay(result["t0_ns"], rows, _check(result, rows))


def _row(request: Request, raw: dict, t0_ns: int, keep_chunks: bool) -> dict:
    """The client's columns of REQUESTS; what failed has null times, as over HTTP."""
    times = np.array([at for at, _ in raw["chunks"]], np.int64)
    counts = np.array([tokens for _, tokens in raw["chunks"]], np.int64)
    error = raw["error"] or (None if len(times) else "the engine ended the request without a token")
    ok = error is None

    def seconds(at_ns: int) -> float:
        return (int(at_ns) - t0_ns) / 1e9

    return (
        {
            "index": request.index,
            "input_len": len(request.prompt_ids),
            "output_len": request.output_len,
            "scheduled_s": seconds(raw["scheduled_ns"]),
            "sent_s": seconds(raw["sent_ns"]),
            "first_s": seconds(times[0]) if ok else None,
            "last_s": seconds(times[-1]) if ok else None,
            "end_s": seconds(raw["end_ns"]) if ok else None,
            "tokens": int(counts.sum()),
            "first_tokens": int(counts[0]) if len(counts) else 0,
            "chunks": len(counts),
            "prompt_tokens": raw["prompt_tokens"],
            "finish_reason": raw["finish_reason"],
            "error": error,
            "count_source": "token_ids",
        }
        | _gaps(times, counts, ok)
        | _chunks(times, counts, ok and keep_chunks)
    )


def _check(result: dict, rows: list[dict]) -> dict:
    lags = sorted(1000 * (r["sent_s"] - r["scheduled_s"]) for r in rows)
    loop = sorted(result["loop_lag_ms"]) or [0.0]
    duration_s = max([r["end_s"] or 0.0 for r in rows] + [1e-9])
    return {
        "processes": 1,
        "cpu_s": result["cpu_s"],
        "cpu_share_max": min(1.0, result["cpu_s"] / duration_s),
        "send_lag_p99_ms": lags[int(0.99 * (len(lags) - 1))],
        "send_lag_max_ms": lags[-1],
        "loop_lag_p99_ms": loop[int(0.99 * (len(loop) - 1))],
        "chunks": sum(r["chunks"] for r in rows),
    }
