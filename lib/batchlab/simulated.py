"""Cells of simulated engines: the same records as measured ones, made by batchlab.sim on any machine.

They are cheap and never committed. They lie under `build/simulated/<digest>/<hardware>/`, where the digest is that of
all that makes their numbers: the simulator's code and constants, the model shapes, and the version of the package with
the operator times. So a changed simulator simulates anew, and stale numbers are never shown.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from batchlab import metrics, paths, provenance, validity
from batchlab.cell import Cell
from batchlab.errors import UsageError
from batchlab.store import Store
from batchlab.workload import draw_load

PACKAGE = "aiconfigurator-core"
# keys of `args` that are the simulation's own, beside the policy's options
OWN_ARGS = ("kernels", "step_times", "fitted")
DTYPES = (None, "auto", "bfloat16", "float16")  # the operator tables' arithmetic is 16 bits wide
# no part of a run varies by chance, so a run has no interval within it
NO_INTERVAL = dict.fromkeys(("output_throughput_half_tok_s", "ttft_mean_half_ms", "tpot_mean_half_ms"))


def store(hardware: str) -> Store:
    """Where the simulated cells of a card are, for the simulator as it is now."""
    return Store(paths.BUILD / "simulated" / digest() / hardware)


@cache
def digest() -> str:
    """12 hexadecimal digits of what the records are made from."""
    here = Path(__file__).parent
    code = [here / f"{name}.py" for name in ("simulated", "metrics", "records", "validity", "models")]
    code += [*here.glob("sim/**/*.py"), *here.glob("sim/*.json"), *here.glob("workload/*.py")]
    found = hashlib.sha256(_version().encode())
    for file in sorted([*code, *paths.MODELS.glob("*/config.json")]):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


def _version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "none"


def absent() -> str | None:
    """Why no operator times can be had on this machine; None where they can."""
    from batchlab.sim.hardware import NOT_INSTALLED, systems_folder

    return NOT_INSTALLED if systems_folder() is None else None


def arguments(cell: Cell) -> dict[str, Any]:
    """A cell as the arguments of `sim.simulate`, requests included.

    Of the engine's options, `args` holds the policy's own (num_scheduler_steps, …) and those of OWN_ARGS; kv_cache_gib,
    gpu_memory_utilization, quantization and tensor_parallel_size mean what they mean to a real engine. Constants that
    were fitted on the card come along, unless `fitted` is false. UsageError for an option that no simulation has.
    """
    from batchlab.sim.fitted import fitted_constants
    from batchlab.sim.policies import POLICIES
    from batchlab.sim.policies.base import checked_options

    options = cell.engine_options
    if options.get("dtype") not in DTYPES:
        raise UsageError(f"{cell.engine}, simulated: dtype {options['dtype']}: there is bfloat16 and float16")
    given = {key.replace("-", "_"): value for key, value in options.get("args", {}).items()}
    own = {key: given.pop(key) for key in OWN_ARGS if key in given}
    constants = fitted_constants(cell.engine, cell.hardware, options.get("quantization"))
    constants = constants if own.pop("fitted", True) else {}
    memory = {"kv_memory_gib": options.get("kv_cache_gib"), "memory_fraction": options.get("gpu_memory_utilization")}
    load = draw_load(
        cell.dataset,
        num_requests=cell.num_requests,
        request_rate=cell.request_rate,
        arrival=cell.arrival,
        seed=cell.seed,
        max_len=options.get("max_model_len"),
    )
    return {
        "engine": cell.engine,
        "hardware": cell.hardware,
        "model": cell.model,
        "requests": [(at, *lengths) for at, lengths in zip(load.times.tolist(), load.lengths.tolist(), strict=True)],
        "max_batch_size": cell.max_batch_size,
        "max_num_tokens": cell.max_num_tokens,
        "tp": options.get("tensor_parallel_size", 1),
        "concurrency": load.concurrency,
        "quantization": options.get("quantization"),
        "policy_options": checked_options(cell.engine, POLICIES[cell.engine].options, given),
        "memory": {key: value for key, value in memory.items() if value is not None},
        **own,
        **constants,
    }


def check(cells: Iterable[Cell]) -> None:
    """UsageError, listing what there is, for the first cell that names a card, model or option that is unknown."""
    from batchlab.sim.api import TENSOR_PARALLEL
    from batchlab.sim.hardware import load_card
    from batchlab.sim.memory import load_quantization
    from batchlab.sim.models import load_model

    for cell in {cell.launch_key(): cell for cell in cells}.values():
        call = arguments(cell)
        load_model(call["model"])
        load_quantization(call["quantization"], load_card(call["hardware"]))
        if call["tp"] not in TENSOR_PARALLEL:
            raise UsageError(
                f"{cell.engine}, simulated: tensor_parallel_size {call['tp']}: there is "
                f"{', '.join(map(str, TENSOR_PARALLEL))}"
            )


def missing(cells: Iterable[Cell]) -> list[Cell]:
    """The cells that the simulator as it is now has not simulated, each once."""
    each = list({c.id: c for c in cells}.values())
    there = {hardware: store(hardware).ids() for hardware in {c.hardware for c in each}}
    return [c for c in each if c.id not in there[c.hardware]]


def run(cells: list[Cell], *, keep_chunks: bool = False, tell: Callable[[int], None] = lambda done: None) -> int:
    """Simulate those of the cells that have no record yet, over all cores; how many that were.

    `tell` is called with the number of cells done. Another process that simulates the same waits and then finds them.
    UsageError as `check`, and for a cell that cannot run at all; the cells before it are recorded.
    """
    from batchlab.sim.grid import over_cores

    check(cells)
    _forget()
    done = 0
    for hardware in dict.fromkeys(cell.hardware for cell in cells):
        target = store(hardware)
        target.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(target.folder / ".lock"):
            # neighbours share their operator tables
            left = sorted(missing(c for c in cells if c.hardware == hardware), key=Cell.launch_key)
            job = partial(_record, folder=target.folder, keep_chunks=keep_chunks, commit=_commit())
            for _ in over_cores(job, left):
                done += 1
                tell(done)
    return done


def _forget() -> None:
    """Remove what older simulators left, all but the last one's: a study's records take some 50 MB."""
    folder = paths.BUILD / "simulated"
    others = [p for p in folder.glob("*") if p.is_dir() and p.name != digest()]
    for old in sorted(others, key=lambda p: p.stat().st_mtime)[:-1]:
        shutil.rmtree(old, ignore_errors=True)


@cache
def _commit() -> str:
    return provenance.git_commit(paths.ROOT)


def _record(cell: Cell, *, folder: Path, keep_chunks: bool, commit: str) -> str:
    """Simulate one cell and write it; its id. Runs in a worker process."""
    from batchlab.sim import simulate

    started, call = time.time(), arguments(cell)
    result = simulate(**call, keep_chunks=keep_chunks)
    requests = result.requests.to_pandas()
    iterations = result.iterations.to_pandas()
    reasons = validity.reasons(cell, requests, iterations, {}, traced=True)
    summary = metrics.summary(requests, iterations, max_batch_size=cell.max_batch_size, invalid_reasons=reasons)
    source = provenance.cell({**result.provenance, "start_s": 0.0}, started, None, commit=commit)
    meta = {
        "invalid_reasons": reasons,
        "checks": {},
        "duration_s": metrics.duration_s(requests),
        "note": None,
        "gpu": None,
        "summary": summary | NO_INTERVAL,
        "provenance": source,
    }
    Store(folder).save(cell, meta, result.requests, result.iterations, durable=False)
    return cell.id
