"""Recorded cells of real engines, made ready to be compared with their simulation."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np

from batchlab.errors import UsageError
from batchlab.sim.fitting import MeasuredCell
from batchlab.sim.host import Launch, LaunchTrace, completed, gather_us, launch_times, launch_trace
from batchlab.sim.models import load_model
from batchlab.sim.policies import POLICIES
from batchlab.store import Recorded

V0_VERSIONS = ("0.2.", "0.3.", "0.4.", "0.5.", "0.6.")
ENGINES = ("vllm", "tensorrt-llm", "tgi", "sglang")
RECORDED_TOKENS = POLICIES["vllm-v1"].graph_sizes[-1]  # the most for which vLLM V1 has graphs


def simulated_engine(engine: str, version: str) -> str:
    """The policy that stands for a measured engine of this version."""
    if engine not in ENGINES:
        raise UsageError(f"no policy stands for engine '{engine}'; there is one for: {', '.join(ENGINES)}")
    if engine != "vllm":
        return engine
    return "vllm-v0" if version.startswith(V0_VERSIONS) else "vllm-v1"


def measured_cell(recorded: Recorded, **changes: Any) -> MeasuredCell:
    """A recorded cell as arguments of `simulate` (the very requests at their very times) and the figures it measured.

    `changes` go over the arguments. The engine's own KV memory is taken where the cell's options pin it.
    """
    cell, requests = recorded.meta["cell"], recorded.requests.to_pandas()
    options = cell["engine_options"]
    memory = {"kv_memory_gib": options["kv_cache_gib"]} if options.get("kv_cache_gib") else None
    call = {
        "engine": simulated_engine(cell["engine"], cell["engine_version"]),
        "hardware": cell["hardware"],
        "model": cell["model"],
        "requests": list(
            zip(
                requests.scheduled_s.tolist(),
                requests.input_len.astype(int).tolist(),
                requests.output_len.astype(int).tolist(),
                strict=True,
            )
        ),
        "max_batch_size": cell["max_batch_size"],
        "max_num_tokens": cell["max_num_tokens"],
        "memory": memory,
        **changes,
    }
    done = requests[requests.error.isna() & (requests.tokens > requests.first_tokens)]
    running = recorded.iterations["running"].to_numpy()
    duration_s = float(done.last_s.max() - requests.sent_s.min())
    tpot_s = (done.last_s - done.first_s) / (done.tokens - done.first_tokens)
    measured = {
        "output_throughput_tok_s": float(done.tokens.sum() / duration_s),
        "tpot_mean_ms": float(1e3 * tpot_s.mean()),
        "ttft_mean_ms": float(1e3 * (done.first_s - done.scheduled_s).mean()),
        "running_batch_mean": float(np.mean(running[running > 0])) if len(running) else None,
        "preemptions": int(recorded.iterations["preemptions"].to_numpy().sum()),
    }
    at_once = requests.scheduled_s.max() == 0 and len(requests) > 1
    request_us = 1e6 * float(requests.sent_s.max() - requests.sent_s.min()) / (len(requests) - 1) if at_once else None
    launch = message_us = gathers_us = None
    if call["engine"] == "vllm-v1" and at_once:
        gathers_us = gather_us(recorded.iterations, recorded.requests)
    if call["engine"] == "vllm-v1" and requests.scheduled_s.max() > 0:
        launch = shown_launch(recorded)
    if requests.scheduled_s.max() > 0 and requests.engine_first_s.notna().any():
        message_us = 1e6 * float((requests.first_s - requests.engine_first_s).median())
    return MeasuredCell(
        recorded.id,
        call,
        measured,
        request_us=request_us,
        message_us=message_us,
        launch=launch,
        running=measured["running_batch_mean"],
        gather_us=gathers_us,
    )


def shown_launch(recorded: Recorded) -> Launch:
    """`launch_times` of a cell of vLLM V1."""
    layers = load_model(recorded.meta["cell"]["model"]).layers
    return launch_times(recorded.iterations, layers, RECORDED_TOKENS)


def engine_start(recorded: Recorded) -> tuple[Any, ...]:
    """What tells one start of an engine from another."""
    made = recorded.meta["provenance"]
    return made["machine"]["name"], made["machine"]["cores"], made["engine"].get("start_s")


def known_launches(cells: Iterable[Recorded]) -> dict[str, LaunchTrace]:
    """By id of cells of vLLM V1: how long their hosts took to launch iterations, on each cell's own clock, as far as it
    and the other cells of its engine start show it (`host.launch_trace`, `host.completed`).
    """
    starts: dict[tuple[Any, ...], list[tuple[Recorded, float, LaunchTrace]]] = {}
    for recorded in cells:
        trace = launch_trace(recorded.iterations, RECORDED_TOKENS)
        began_s = datetime.fromisoformat(recorded.meta["provenance"]["started"]).timestamp()
        starts.setdefault(engine_start(recorded), []).append((recorded, began_s, trace))
    known = {}
    for group in starts.values():
        for recorded, began_s, own in group:
            others = [(at - began_s, trace) for other, at, trace in group if other is not recorded]
            last = recorded.iterations["output_s"]
            middle_s = last[-1].as_py() / 2 if len(last) else 0.0
            whole = recorded.iterations["launched_s"].null_count == 0
            known[recorded.id] = own if whole else completed(own, _later(others), middle_s)
    return known


def _later(traces: list[tuple[float, LaunchTrace]]) -> LaunchTrace:
    """Traces of several runs as one; each began so many seconds later than the run on whose clock they are wanted."""
    moved = [[np.empty((0, 2))], [np.empty((0, 2))]]
    for later_s, trace in traces:
        for kind, rows in zip(moved, (trace.pieces, trace.eager), strict=True):
            kind.append(rows + np.array([later_s, 0.0]))
    return LaunchTrace(*(np.concatenate(kind) for kind in moved))
