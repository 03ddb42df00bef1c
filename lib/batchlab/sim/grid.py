"""Many simulations over all cores."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batchlab.sim.api import simulate
from batchlab.sim.result import SimResult

Job = TypeVar("Job")
Reduced = TypeVar("Reduced")
WORTH_A_PROCESS = 8  # jobs: a process takes seconds to import what it needs, a job a tenth of one


def simulate_many(
    calls: Iterable[dict[str, Any]], reduce: Callable[[int, SimResult], Reduced], processes: int | None = None
) -> list[Reduced]:
    """`simulate(**call)` for each call, reduced where it was computed; the results in the calls' order.

    `reduce(position, result)` must be a function of a module: it is sent to the workers, and what it returns comes
    back. Calls that share an engine and hardware should be neighbours: a worker reads the operator tables once for
    each. Raises what the first failing call raises.
    """
    return list(over_cores(partial(_run, reduce=reduce), list(enumerate(calls)), processes))


def over_cores(
    function: Callable[[Job], Reduced], jobs: Sequence[Job], processes: int | None = None
) -> Iterator[Reduced]:
    """`function` of each job, in the jobs' order, as they are done; in this process where there are few jobs.

    `function` must be one of a module, or a partial of one. Raises what the first failing job raises.
    """
    processes = processes or min(_cores(), -(-len(jobs) // WORTH_A_PROCESS))
    if processes <= 1:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context(_start_method())) as pool:
        chunk = max(1, min(32, len(jobs) // (4 * processes)))
        with _main_left_alone():
            results = pool.map(function, jobs, chunksize=chunk)
        yield from results


def _start_method() -> str:
    """fork where this process has one thread only, so that nothing is imported again; else spawn: a notebook's kernel
    has threads, which a forked child would inherit half-way.
    """
    tasks = Path("/proc/self/task")
    return "fork" if tasks.is_dir() and len(list(tasks.iterdir())) == 1 else "spawn"


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Processes spawned meanwhile do not import the program that runs: a script without a guard would start anew in
    each, one read from standard input cannot be imported, and a notebook's kernel takes long. No job needs it.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        main.__spec__ = None
        main.__dict__.pop("__file__", None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(job: tuple[int, dict[str, Any]], *, reduce: Callable[[int, SimResult], Reduced]) -> Reduced:
    position, call = job
    return reduce(position, simulate(**call))
