"""Measure what is missing: one warm engine a group of cells, a cell at a time, each stored before the next begins."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from batchlab import metrics, models, provenance, records, validity
from batchlab.cell import Cell
from batchlab.engines.attach import AttachedEngine
from batchlab.engines.sglang import SglangEngine
from batchlab.engines.tensorrt_llm import TensorRtLlmEngine
from batchlab.engines.tgi import TgiEngine
from batchlab.engines.vllm import VllmEngine
from batchlab.errors import EngineError, UsageError
from batchlab.plan import largest_limits
from batchlab.progress import Progress
from batchlab.scenario import Limits, Scenario
from batchlab.store import DamagedCell, Store
from batchlab.workload import Workload, build

ENGINES = {
    "vllm": VllmEngine,
    "tensorrt-llm": TensorRtLlmEngine,
    "tgi": TgiEngine,
    "sglang": SglangEngine,
    "attach": AttachedEngine,
}
WARM_UP_REQUESTS = 8
RESTARTS = 2  # of an engine that dies while measuring, for each group of cells


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did. `failures` are engines that could not start: (engine, reason, its last lines).

    `simulated` counts cells of simulated engines, which are not among the measured ones. `absent`: engines that were
    left out because this machine has them not, with the reason.
    """

    measured: int
    invalid: int
    failures: list[tuple[str, str, str]]
    simulated: int = 0
    absent: dict[str, str] = field(default_factory=dict)


def missing(
    cells: Iterable[Cell], store: Store, *, retry_invalid: bool = False, tell: Any = lambda line: None
) -> list[Cell]:
    """The cells without a usable record. A damaged file is named, and its cell counts as missing."""
    absent, ids = [], store.ids()
    for cell in cells:
        if cell.id not in ids:
            absent.append(cell)
            continue
        try:
            recorded = store.load(cell.id)
        except DamagedCell as error:
            tell(f"{error}; it is measured again")
            absent.append(cell)
            continue
        if retry_invalid and recorded.meta["invalid_reasons"]:
            absent.append(cell)
    return absent


def run(
    scenario: Scenario,
    wanted: list[Cell],
    every: list[Cell],
    store: Store,
    progress: Progress,
    *,
    restart_each: bool = False,
) -> Outcome:
    """Measure `wanted`. `every` is the scenario's whole plan: it sets the limits that engines are started with,
    so that a resumed run measures on an engine that was started as the first run's was.

    `restart_each` starts the engine anew for each cell, with that cell's limits: the slow way, for comparison.
    """
    failures, before = [], (progress.done, progress.invalid)
    order = {cell.id: n for n, cell in enumerate(wanted)}
    groups = groupby(sorted(wanted, key=Cell.launch_key), key=Cell.launch_key)
    with store.writing():
        for key, members in sorted(((k, list(m)) for k, m in groups), key=lambda g: order[g[1][0].id]):
            siblings = [c for c in every if c.launch_key() == key]
            for batch in [[c] for c in members] if restart_each else [members]:
                limits = largest_limits(batch if restart_each else siblings)
                try:
                    _group(scenario, sorted(batch, key=lambda c: order[c.id]), limits, store, progress)
                except EngineError as error:
                    failures.append((key[0], error.reason, error.tail))
                    progress.failed(error.reason, batch)
    return Outcome(progress.done - before[0], progress.invalid - before[1], failures)


def stream(
    scenario: Scenario, cells: Iterator[Cell], most: Callable[[Cell], Limits], store: Store, progress: Progress
) -> None:
    """Measure cells as they come, on one warm engine while they share a launch key.

    The next cell is asked for when the last is recorded, so that it may depend on it. most: the limits that an engine
    for such a cell is started with. EngineError when an engine cannot start or dies too often.
    """
    with store.writing():
        for _, members in groupby(cells, key=Cell.launch_key):
            alike = iter(members)
            first = next(alike)
            _group(scenario, chain([first], alike), most(first), store, progress)


def _group(scenario: Scenario, cells: Iterable[Cell], limits: Limits, store: Store, progress: Progress) -> None:
    """Measure cells that share an engine. A death costs the cell that it came in, and a restart."""
    cells = iter(cells)
    first = next(cells)
    model = models.materialize(first.model)
    log = store.folder / f".{first.engine}-{first.transport}.log"
    try:
        engine = ENGINES[first.engine](
            scenario.engines[first.engine], first.engine_options, model, first.transport, log=log
        )
    except UsageError as error:  # it was there when the run began
        raise EngineError(str(error)) from None
    deaths = 0
    try:
        for cell in chain([first], cells):
            if not engine.alive():
                progress.starting(first, limits)
                engine.start(limits, tick=progress.waiting)
                progress.started(engine.start_s)
                warmed: set[str] = set()
            progress.begin(cell)
            try:
                reasons = _cell(scenario, cell, engine, model, store, warmed, progress)
            except EngineError as error:
                deaths += 1
                _save_failed(cell, error, engine, store)
                engine.stop()
                reasons = [error.reason]
                if deaths > RESTARTS:
                    progress.end(cell, reasons)
                    raise EngineError(
                        f"{error.reason} (death {deaths}; the cells after it are left out)", error.tail
                    ) from None
            progress.end(cell, reasons)
    finally:
        engine.stop()


def _workload(
    cell: Cell, model: models.ModelFiles, num_requests: int, nonce: str, rate: float | None, *, text: bool
) -> Workload:
    longest = cell.engine_options.get("max_model_len")
    return build(
        cell.dataset,
        num_requests=num_requests,
        request_rate=rate,
        arrival=cell.arrival if nonce == cell.id else None,
        seed=cell.seed,
        nonce=nonce,
        vocab_size=model.vocab_size,
        tokenizer=model.tokenizer if text else None,
        max_len=longest,
    )


def _cell(
    scenario: Scenario,
    cell: Cell,
    engine: VllmEngine,
    model: models.ModelFiles,
    store: Store,
    warmed: set[str],
    progress: Progress,
) -> list[str]:
    """One cell: new limits, a warm-up of the real shape, the replay, the checks, the record."""
    engine.reconfigure(Limits(max_batch_size=cell.max_batch_size, max_num_tokens=cell.max_num_tokens))
    shape = str(sorted(cell.dataset.items()))
    if shape not in warmed:
        # the first requests of a shape pay for what is compiled or allocated on first use (vllm 16858)
        engine.replay(
            _workload(cell, model, WARM_UP_REQUESTS, f"{cell.id}/warm-up", None, text=engine.text_prompts),
            timeout_s=scenario.cell_timeout_s,
            keep_chunks=False,
        )
        engine.take_trace(0, WARM_UP_REQUESTS)
        warmed.add(shape)

    workload = _workload(cell, model, cell.num_requests, cell.id, cell.request_rate, text=engine.text_prompts)
    started, load = time.time(), provenance.load_average()
    with provenance.gpu_sampler() as gpu:
        replayed = engine.replay(
            workload,
            timeout_s=scenario.cell_timeout_s,
            keep_chunks=scenario.keep_chunks,
            progress=progress.requests,
            **({"token_rule": cell.token_rule} if cell.token_rule else {}),
        )
    traced = engine.take_trace(replayed.t0_ns, sum(row["error"] is None for row in replayed.rows))
    rows = [row | traced.requests.get(row["index"], {}) for row in sorted(replayed.rows, key=lambda r: r["index"])]
    requests = records.table(rows, records.REQUESTS)
    iterations = records.table(traced.iterations, records.ITERATIONS)
    frame, inside = requests.to_pandas(), iterations.to_pandas()
    traces = traced.source != "none"
    late_ms = 1000 * metrics.behind_s(frame, inside)
    reasons = validity.reasons(
        cell,
        frame,
        inside,
        replayed.check,
        traced=traces,
        by_request=traced.source == "scheduler",
    )
    reasons += traced.reasons
    store.save(
        cell,
        {
            "invalid_reasons": reasons,
            "checks": replayed.check,
            "unchecked": list(traced.unchecked),
            "iterations_from": traced.source,
            "told": traced.facts | ({} if math.isnan(late_ms) else {"last_token_behind_ms": round(late_ms, 1)}),
            "duration_s": metrics.duration_s(frame),
            "note": workload.note,
            "gpu": gpu.summary(),
            "provenance": provenance.cell(engine.describe(), started, load),
        },
        requests,
        iterations,
    )
    return reasons


def _save_failed(cell: Cell, error: EngineError, engine: VllmEngine, store: Store) -> None:
    """A cell in which the engine died: recorded as invalid with the reason, without rows."""
    store.save(
        cell,
        {
            "invalid_reasons": [error.reason],
            "checks": {},
            "duration_s": 0.0,
            "note": None,
            "gpu": None,
            "engine_tail": error.tail,
            "provenance": provenance.cell(engine.describe(), time.time(), provenance.load_average()),
        },
        records.table([], records.REQUESTS),
        records.table([], records.ITERATIONS),
    )


def has_limits(scenario: Scenario, cell: Cell) -> bool:
    """Whether the cell's limits can be had: an engine that somebody else started has those that it was started with."""
    stated = scenario.engines[cell.engine].limits
    return stated is None or stated == Limits(max_batch_size=cell.max_batch_size, max_num_tokens=cell.max_num_tokens)


def obstacles(scenario: Scenario, engines: Iterable[str]) -> dict[str, str]:
    """Which of these (real) engines this machine cannot measure, and why, in one line each."""
    here = provenance.hardware()
    if scenario.hardware not in ("cpu", here):
        reason = (
            f"{scenario.path}: asks for {scenario.hardware}, this machine is {here}; "
            "recorded cells can still be rendered here"
        )
        return dict.fromkeys(sorted(engines), reason)
    found = {}
    for name in sorted(engines):
        try:
            ENGINES[name].find(scenario.engines[name])
        except UsageError as error:
            found[name] = str(error)
    return found


def obstacle(scenario: Scenario, engines: Iterable[str]) -> str | None:
    """Why this machine can measure none of these (real) engines, in one line; None when it can measure one or more."""
    engines = set(engines)
    found = obstacles(scenario, engines)
    return next(iter(found.values())) if found and len(found) == len(engines) else None
