"""Many simulations over all cores."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from batchlab.sim.api import simulate
from batchlab.sim.result import SimResult

Reduced = TypeVar("Reduced")


def simulate_many(
    calls: Iterable[dict[str, Any]], reduce: Callable[[int, SimResult], Reduced], processes: int | None = None
) -> list[Reduced]:
    """`simulate(**call)` for each call, reduced where it was computed; the results in the calls' order.

    `reduce(position, result)` must be a function of a module: it is sent to the workers, and what it returns comes
    back (so write a cell's records in it, or keep a few numbers). Calls that share an engine and hardware should be
    neighbours: a worker reads the operator tables once for each. One process, or one call, runs here. Raises what
    the first failing call raises.
    """
    jobs = list(enumerate(calls))
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    if processes <= 1:
        return [_run(job, reduce) for job in jobs]
    # spawn: a notebook's kernel has threads, which a forked child would inherit half-way
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        chunk = max(1, min(32, len(jobs) // (4 * processes)))
        return list(pool.map(_run, jobs, [reduce] * len(jobs), chunksize=chunk))


def _run(job: tuple[int, dict[str, Any]], reduce: Callable[[int, SimResult], Reduced]) -> Reduced:
    position, call = job
    return reduce(position, simulate(**call))
