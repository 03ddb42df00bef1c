"""One replay process: `python -m batchlab.client.worker FD`. Started by replay(), never by hand.

Over the socket FD (multiprocessing's framing): Job in; ("ready",) out; t0 in; ("done", n) out while it runs;
("result", Result) or ("usage", line) out. It ends when the other side is gone.
"""

import gc
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from batchlab.client.exchange import Exchange
from batchlab.client.job import Job, Result
from batchlab.client.limits import raise_open_files
from batchlab.client.loop import Abandoned, Loop
from batchlab.client.rows import row
from batchlab.client.target import tls_context
from batchlab.errors import UsageError


def work(job: Job, link: Connection) -> Result:
    exchanges = [Exchange(index, n, m, round(at * 1e9), data) for index, n, m, at, data in job.items]
    loop = Loop(
        exchanges=exchanges,
        family=job.family,
        address=job.address,
        tls=(tls_context(), job.server_name) if job.server_name else None,
        concurrency=job.concurrency,
        closed_loop=job.closed_loop,
        timeout_ns=round(job.timeout_s * 1e9),
        silence_ns=round(job.silence_s * 1e9),
        abandon_fd=link.fileno(),
        progress=lambda done: link.send(("done", done)),
    )
    raise_open_files(len(exchanges) if job.concurrency is None else job.concurrency)
    loop.open_first()
    link.send(("ready",))
    t0_ns = link.recv()
    gc.collect()
    gc.freeze()
    gc.disable()                   # a collection over a million stored reads takes longer than a token
    cpu, wall = time.process_time(), time.monotonic()
    loop.run(t0_ns)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return Result(
        rows=[row(exchange, job.api, t0_ns, job.keep_chunks) for exchange in exchanges],
        cpu_s=cpu,
        wall_s=wall,
        loop_lag_p99_ms=_lag_p99_ms(np.frombuffer(loop.wakes, np.int64).reshape(-1, 2)),
        bytes=sum(len(data) for exchange in exchanges for data in exchange.reads),
        connections_peak=loop.peak,
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
