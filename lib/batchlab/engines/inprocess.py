"""Our end of the in-process transport: a job out, records back (vllm_inprocess.py is the other end)."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from batchlab.client import Replay
from batchlab.client.rows import request_row
from batchlab.workload import Workload


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
    rows = [
        request_row(by_index[raw["index"]], raw, result["t0_ns"], keep_chunks=keep_chunks) for raw in result["requests"]
    ]
    return Replay(result["t0_ns"], rows, _check(result, rows))


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
