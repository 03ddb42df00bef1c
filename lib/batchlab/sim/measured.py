"""Recorded cells of real engines, made ready to be compared with their simulation."""

from typing import Any

import numpy as np

from batchlab.errors import UsageError
from batchlab.sim.fitting import MeasuredCell
from batchlab.sim.host import Launch, gather_us, launch_times, launches
from batchlab.sim.models import load_model
from batchlab.sim.policies import POLICIES
from batchlab.store import Recorded

V0_VERSIONS = ("0.2.", "0.3.", "0.4.", "0.5.", "0.6.")
ENGINES = ("vllm", "tensorrt-llm", "tgi", "sglang")


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
    return MeasuredCell(recorded.id, call, measured, request_us, message_us, launch, gathers_us)


def shown_launch(recorded: Recorded) -> Launch:
    """`launch_times` of a cell of vLLM V1."""
    layers = load_model(recorded.meta["cell"]["model"]).layers
    return launch_times(recorded.iterations, layers, POLICIES["vllm-v1"].graph_sizes[-1])


def cell_launches(recorded: Recorded) -> dict[str, np.ndarray]:
    """`launches` of a cell of vLLM V1: each time, not medians."""
    return launches(recorded.iterations, POLICIES["vllm-v1"].graph_sizes[-1])
