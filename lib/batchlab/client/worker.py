"""One replay process: `python -m batchlab.client.worker FD`. Started by replay(), never by hand.

Over the socket FD (multiprocessing's framing): Job in; ("ready",) out; t0 in; ("done", n) out while it runs;
("result", Result) or ("usage", line) out. It ends when the other side is gone.
"""

import gc
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from batchlab.client.clock import STEP_NS, arrivals, offset_ns
from batchlab.client.exchange import Exchange
from batchlab.client.job import Job, Result
from batchlab.client.limits import raise_open_files
from batchlab.client.loop import Abandoned, Loop
from batchlab.client.rows import read, row
from batchlab.client.target import tls_context
from batchlab.client.wire import Wire
from batchlab.errors import UsageError


def work(job: Job, link: Connection) -> Result:
    raise_open_files(len(job.items) if job.concurrency is None else job.concurrency)
    exchanges = [Exchange(index, n, m, round(at * 1e9), data) for index, n, m, at, data in job.items]
    wire = Wire(job.family, job.address, (tls_context(), job.server_name) if job.server_name else None)
    loop = Loop(
        exchanges,
        wire,
        concurrency=job.concurrency,
        closed_loop=job.closed_loop,
        timeout_ns=round(job.timeout_s * 1e9),
        silence_ns=round(job.silence_s * 1e9),
        abandon_fd=link.fileno(),
        # a closed loop must answer each end at once, and TLS has only the times of the reads
        gather=job.server_name is None and job.concurrency is None,
        progress=lambda done: link.send(("done", done)),
    )
    loop.open_first()
    link.send(("ready",))
    t0_ns = link.recv()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection over a million stored reads takes longer than a token
    offset, cpu, wall = offset_ns(), time.process_time(), time.monotonic()
    loop.run(t0_ns)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    use_stamps = abs(offset_ns() - offset) < STEP_NS
    rows, lags, merged, received = [], [], 0, 0
    for exchange in exchanges:
        if exchange.stamps and use_stamps:
            arrived = arrivals(exchange.times, exchange.stamps, offset)
            lags.append(np.asarray(exchange.times, np.int64) - arrived)
            exchange.times = arrived.tolist()
        stream = read(exchange, job.api)
        rows.append(row(exchange, stream, t0_ns, job.keep_chunks))
        merged += int((np.diff(stream.times) == 0).sum())
        received += sum(map(len, exchange.reads))
        exchange.forget()
    return Result(
        rows=rows,
        cpu_s=cpu,
        wall_s=wall,
        loop_lag_p99_ms=_lag_p99_ms(np.frombuffer(loop.wakes, np.int64).reshape(-1, 2)),
        receive_lag_p99_ms=float(np.percentile(np.concatenate(lags), 99)) / 1e6 if lags else None,
        merged_chunks=merged,
        bytes=received,
        connections_peak=wire.peak,
    )


def _lag_p99_ms(wakes: np.ndarray) -> float:
    """99% of the ready sockets were handled within this time of the wake that reported them. wakes: (n, 2)
    int64, the time to handle a wake in ns and the sockets it reported."""
    if not len(wakes):
        return 0.0
    order = np.argsort(wakes[:, 0])
    share = np.cumsum(wakes[order, 1]) / wakes[:, 1].sum()
    return float(wakes[order[np.searchsorted(share, 0.99)], 0]) / 1e6


def main() -> None:
    link = Connection(int(sys.argv[1]))
    try:
        link.send(("result", work(link.recv(), link)))
    except UsageError as error:
        link.send(("usage", str(error)))
    except (Abandoned, EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)


if __name__ == "__main__":
    main()
