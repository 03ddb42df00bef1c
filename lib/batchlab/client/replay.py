"""Replays a workload against an endpoint from as many processes as it takes, and says how well they kept up."""

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypedDict

import numpy as np

from batchlab.client.job import Job, Result
from batchlab.client.limits import check_open_files
from batchlab.client.target import Endpoint, Target, endpoint, payload, tls_context
from batchlab.errors import EngineError, UsageError
from batchlab.workload import Workload

STREAMS_A_PROCESS = 256
CHUNKS_A_PROCESS = 20_000  # a second
READY_LIMIT_S = 120


class ClientCheck(TypedDict):
    """How the client itself did.

    The records hold the kernel's times of the packets where it gives them, and are free of `receive_lag` then. It is
    None where they hold the times of the reads: through TLS, and after a step of the clock. What no stamp can save are
    the chunks of `merged_share`, which have the time of a later one: the client was late by more than a token, or
    the engine sent them as one.
    """

    processes: int
    cpu_s: float  # of the event loops
    cpu_share_max: float  # of the busiest process, 0..1
    send_lag_p99_ms: float | None  # sent − scheduled; None when nothing was sent
    send_lag_max_ms: float | None
    loop_lag_p99_ms: float  # from a wake to the end of its handling, in the worst process
    receive_lag_p99_ms: float | None  # from a packet's arrival to its read, in the worst process
    merged_share: float  # of the chunks, those read together with the next one of their stream
    chunks: int  # that hold tokens
    bytes: int
    connections_peak: int  # at once, summed over processes


@dataclass(frozen=True, slots=True)
class Replay:
    """t0_ns: CLOCK_MONOTONIC; rows: the client's columns of records.REQUESTS, by index."""

    t0_ns: int
    rows: list[dict]
    check: ClientCheck


def replay(
    target: Target,
    workload: Workload,
    *,
    lead_s: float = 0.2,
    processes: int | None = None,
    max_concurrency: int | None = None,
    streams: int | None = None,
    timeout_s: float = 3600,
    silence_s: float | None = None,
    keep_chunks: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Sends every request of `workload` at its time and returns what came back.

    lead_s: from the moment that all processes are ready to t0.
    processes: None chooses (see choose_processes); requests are dealt to them round robin.
    max_concurrency: most requests in flight. When all arrive at once this is a closed loop: a request's
      `scheduled_s` is the moment its slot became free. With other arrivals `scheduled_s` stays, so the wait
      for a slot is in the TTFT.
    streams: how many answers stream at once at most (an engine's max_batch_size), for the choice of
      processes.
    timeout_s: for the whole run; what is unfinished then is a row with an error. silence_s: the same for
      one connection that brings nothing, while queued or between tokens; None: no such limit.
    progress: called with (answers ended, requests) a few times a second.

    Answers are kept as they came until the run ends: with their parsing, under a kilobyte of memory a chunk.

    UsageError for what a person can mend; EngineError when nobody answers at the address or a process of
    the client died. A request that fails is a row with an `error`, never an exception.
    """
    if not workload.requests:
        raise UsageError("the workload holds no request; num_requests must be at least 1")
    _check(processes, max_concurrency, timeout_s, silence_s)
    concurrency = min((c for c in (max_concurrency, workload.concurrency) if c), default=None)
    closed_loop = concurrency is not None and all(r.scheduled_s == 0 for r in workload.requests)
    count = processes or choose_processes(workload, concurrency, streams, len(os.sched_getaffinity(0)))
    count = min(count, len(workload.requests), concurrency or count)
    place = endpoint(target.base_url, target.api)
    family, address = find(place, target.base_url)
    requests = sorted(workload.requests, key=lambda r: (r.scheduled_s, r.index))
    jobs = [
        Job(
            api=target.api,
            family=family,
            address=address,
            server_name=place.host if place.tls else None,
            items=[
                (r.index, len(r.prompt_ids), r.output_len, r.scheduled_s, payload(target, place, r))
                for r in requests[number::count]
            ],
            concurrency=concurrency and concurrency // count + (number < concurrency % count),
            closed_loop=closed_loop,
            timeout_s=timeout_s,
            silence_s=timeout_s if silence_s is None else silence_s,
            keep_chunks=keep_chunks,
        )
        for number in range(count)
    ]
    if closed_loop or all(r.scheduled_s == 0 for r in requests):
        check_open_files(max(job.concurrency or len(job.items) for job in jobs))
    t0_ns, results = _run(jobs, lead_s, progress)
    rows = sorted((row for result in results for row in result.rows), key=lambda row: row["index"])
    return Replay(t0_ns, rows, _client_check(rows, results))


def choose_processes(workload: Workload, concurrency: int | None, streams: int | None, cores: int) -> int:
    """One process for every 256 streams or 20,000 chunks a second, whichever asks for more; never more than
    all cores but one, which is left to the engine, and at least one.

    Streams: the least of `streams`, `concurrency` and the number of requests. Chunks a second: the offered
    rate times the mean output length, which is what an engine that keeps up sends; unknown, and left out,
    when all arrive at once.
    """
    requests = workload.requests
    most = min(n for n in (streams, concurrency, len(requests)) if n)
    span = max(r.scheduled_s for r in requests) - min(r.scheduled_s for r in requests)
    chunks = sum(r.output_len for r in requests) / span if span > 1 else 0
    if span > 1 and streams is None and concurrency is None:
        most = 1  # an open loop's streams follow from the engine's speed, as its chunks do
    asked = max(most / STREAMS_A_PROCESS, chunks / CHUNKS_A_PROCESS)
    return max(1, min(math.ceil(asked), cores - 1))


def find(place: Endpoint, base_url: str) -> tuple[int, tuple]:
    """The first address of the host that takes a connection. A name may stand for both ::1 and 127.0.0.1,
    with a server at one of them only."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"base url {base_url}: host {place.host} is unknown ({why})") from None
    reason = "no address"
    for family, _, _, _, address in found:
        try:
            with socket.create_connection(address[:2], timeout=10) as sock:
                if place.tls:
                    tls_context().wrap_socket(sock, server_hostname=place.host).close()
                return family, address
        except OSError as error:
            reason = error.strerror or str(error)
    raise EngineError(f"no server answers at {base_url}: {reason}")


def _check(processes: int | None, max_concurrency: int | None, timeout_s: float, silence_s: float | None) -> None:
    if processes is not None and processes < 1:
        raise UsageError(f"processes {processes} must be at least 1")
    if max_concurrency is not None and max_concurrency < 1:
        raise UsageError(f"max_concurrency {max_concurrency} must be at least 1")
    for name, value in (("timeout_s", timeout_s), ("silence_s", silence_s)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} {value} must be greater than 0")
    if not sys.platform.startswith("linux"):
        raise UsageError("the replay client needs Linux (epoll); run it on the engine's host")


def _run(jobs: list[Job], lead_s: float, progress: Callable[[int, int], None] | None) -> tuple[int, list[Result]]:
    """Starts the workers, gives them one t0 and gathers their results. They never outlive this call."""
    total = sum(len(job.items) for job in jobs)
    with tempfile.TemporaryFile() as complaints:
        workers: dict[Connection, subprocess.Popen] = {}
        try:
            for job in jobs:
                link, process = _start(complaints)
                workers[link] = process
                link.send(job)
            _gather(workers, "ready", complaints, READY_LIMIT_S, lambda *_: None)
            t0_ns = time.monotonic_ns() + round(lead_s * 1e9)
            for link in workers:
                link.send(t0_ns)
            done = dict.fromkeys(workers, 0)

            def count(link: Connection, finished: int) -> None:
                done[link] = finished
                if progress:
                    progress(sum(done.values()), total)

            results = _gather(workers, "result", complaints, None, count)
            if progress:
                progress(total, total)
            return t0_ns, results
        finally:
            for link, process in workers.items():
                link.close()
                if process.poll() is None:
                    process.kill()
                process.wait()


def _start(complaints) -> tuple[Connection, subprocess.Popen]:
    """A worker of its own: a plain subprocess, so that notebooks need no importable main module and nothing
    is forked. -P keeps the caller's directory from shadowing modules; a session of its own keeps an
    interrupt of the notebook's process group away, which the parent passes on by closing the link."""
    ours, theirs = Pipe()
    library = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "batchlab.client.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        start_new_session=True,
    )
    theirs.close()
    return ours, process


def _gather(workers, wanted, complaints, limit_s, on_done) -> list:
    """Waits until every worker has sent the message `wanted`, and returns their contents in the workers' order."""
    found = {}
    limit = None if limit_s is None else time.monotonic() + limit_s
    while len(found) < len(workers):
        left = None if limit is None else max(limit - time.monotonic(), 0)
        ready = wait([link for link in workers if link not in found], left)
        if not ready:
            raise EngineError(f"the client's processes were not ready within {limit_s} s")
        for link in ready:
            try:
                kind, *content = link.recv()
            except (EOFError, ConnectionResetError):
                complaints.seek(0)
                tail = complaints.read().decode("utf-8", "replace").strip()
                code = workers[link].wait()
                raise EngineError(f"a process of the client died (exit {code})", tail[-4000:]) from None
            if kind == "usage":
                raise UsageError(*content)
            if kind == wanted:
                found[link] = content[0] if content else None
            elif kind == "done":
                on_done(link, *content)
    return [found[link] for link in workers]


def _client_check(rows: list[dict], results: list[Result]) -> ClientCheck:
    chunks = sum(row["chunks"] for row in rows)
    received = [r.receive_lag_p99_ms for r in results if r.receive_lag_p99_ms is not None]
    lags = np.array([row["sent_s"] - row["scheduled_s"] for row in rows if row["sent_s"] is not None])
    return {
        "processes": len(results),
        "cpu_s": sum(result.cpu_s for result in results),
        "cpu_share_max": max(result.cpu_s / max(result.wall_s, 1e-9) for result in results),
        "send_lag_p99_ms": float(np.percentile(lags, 99) * 1e3) if len(lags) else None,
        "send_lag_max_ms": float(lags.max() * 1e3) if len(lags) else None,
        "loop_lag_p99_ms": max(result.loop_lag_p99_ms for result in results),
        "receive_lag_p99_ms": max(received) if received else None,
        "merged_share": sum(result.merged_chunks for result in results) / max(chunks, 1),
        "chunks": chunks,
        "bytes": sum(result.bytes for result in results),
        "connections_peak": sum(result.connections_peak for result in results),
    }
