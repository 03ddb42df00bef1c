"""The simulated TensorRT-LLM against NVIDIA's own published throughput, which nothing here was fitted to.

The runs were made by trtllm-bench with its defaults, and so is the simulation: limits by its rule, whole prompts,
in-flight batching without eviction, the overlap scheduler, blocks of 32 tokens, 0.90 of the free memory.
"""

import csv
import math
from pathlib import Path
from typing import Any

from batchlab import paths
from batchlab.sim.api import simulate
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import GIB, VISIBLE_SHARE, load_quantization
from batchlab.sim.models import load_model
from batchlab.sim.policies import Limits

TABLE = paths.PUBLISHED / "trtllm_throughput.csv"
MEMORY_FRACTION = 0.90
POLICY_OPTIONS = {"overlap_scheduler": True}
TOKENS_PER_BLOCK = 32


def published_throughput(file: Path = TABLE) -> list[dict[str, Any]]:
    """NVIDIA's rows: model, hardware, tp, input_len, output_len, num_requests, output_throughput_tok_s."""
    with file.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [{k: v if k in ("model", "hardware") else int(v) for k, v in row.items()} for row in rows]


def trtllm_bench_limits(
    model: str,
    hardware: str,
    tp: int,
    input_len: int,
    output_len: int,
    quantization: str,
    memory_fraction: float = MEMORY_FRACTION,
) -> Limits:
    """The limits that trtllm-bench 1.0 chooses when none are given.

    Source: NVIDIA, TensorRT-LLM, tensorrt_llm/bench/build/tuning.py (the requests whose KV fits, rounded up) and
    bench/benchmark/utils/general.py (without chunked prefill, room for one prompt beside a full batch).
    """
    card, shape = load_card(hardware), load_model(model)
    quant = load_quantization(quantization, card)
    parameters = shape.layer_params + shape.embedding_params
    free = card.memory_bytes * VISIBLE_SHARE * tp - parameters * quant.weight_bytes
    per_request = (
        2 * shape.layers * max(tp, shape.kv_heads) * shape.head_dim * quant.kv_bytes * (input_len + output_len)
    )
    requests = min(free * memory_fraction / per_request, 4096)
    tokens = min(requests * (1 + input_len / output_len), 32768)
    unit = 32 if requests < 256 else 128 if requests < 1024 else 256
    batch = max(64, unit * math.ceil(requests / unit))
    unit = 256 if tokens < 4096 else 512 if tokens < 8192 else 1024
    return Limits(batch, max(2048, unit * math.ceil(tokens / unit), input_len + batch))


def compare_published(
    rows: list[dict[str, Any]] | None = None, memory_fraction: float = MEMORY_FRACTION
) -> list[dict[str, Any]]:
    """Each published row with what the simulation gives: its columns, and max_batch_size, max_num_tokens, kv_gib,
    running_batch_mean, simulated_tok_s and error (simulated / published - 1)."""
    compared = []
    for row in published_throughput() if rows is None else rows:
        shape = {k: row[k] for k in ("model", "hardware", "tp", "input_len", "output_len")}
        limits = trtllm_bench_limits(**shape, quantization="fp8", memory_fraction=memory_fraction)
        result = simulate(
            "tensorrt-llm",
            row["hardware"],
            row["model"],
            [(0.0, row["input_len"], row["output_len"])] * row["num_requests"],
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            tp=row["tp"],
            quantization="fp8",
            policy_options=POLICY_OPTIONS,
            memory={"memory_fraction": memory_fraction, "block_size": TOKENS_PER_BLOCK},
        )
        kv, simulated = result.provenance["kv"], result.output_throughput_tok_s
        compared.append(
            {
                **row,
                "max_batch_size": limits.max_batch_size,
                "max_num_tokens": limits.max_num_tokens,
                "kv_gib": kv["blocks"] * kv["block_bytes"] / GIB,
                "running_batch_mean": result.iterations["running"].to_numpy().mean(),
                "simulated_tok_s": simulated,
                "error": simulated / row["output_throughput_tok_s"] - 1,
            }
        )
    return compared


def error_summary(compared: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and largest absolute error, and the mean signed one, of compared rows."""
    errors = [row["error"] for row in compared]
    return {
        "rows": len(errors),
        "mean_abs": sum(map(abs, errors)) / len(errors),
        "max_abs": max(map(abs, errors)),
        "mean": sum(errors) / len(errors),
    }
