"""How many KV blocks an engine gets: card, weights, memory fraction, and an estimate of what activations take.

Engines differ in what their fraction is of. vLLM and TGI take a share of the card and subtract weights and
activations; TensorRT-LLM takes a share of what those leave free; SGLang's static share holds weights and KV, and
activations use the rest. A measured engine prints its own number of blocks: give that as an override and nothing is
estimated.
"""

from dataclasses import dataclass
from typing import Any

from batchlab.errors import UsageError
from batchlab.models import Shape
from batchlab.sim.hardware import Card
from batchlab.sim.policies.base import Limits, Policy
from batchlab.sim.state import KvBlocks

GIB = 2**30
# CUDA reports 79.1 of an A100's or H100's 80 GiB and 139.8 of an H200's 141 GiB: the rest is the driver's.
VISIBLE_SHARE = 0.99
# CUDA context, library workspaces and captured graphs; engines report 0.5 to 1.5 GiB.
RUNTIME_BYTES = 1.0 * GIB
OVERRIDES = ("memory_fraction", "kv_blocks", "kv_tokens", "kv_memory_gib", "block_size")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Bytes of a weight (embeddings and output layer stay at 16 bits) and of a KV element."""

    name: str
    weight_bytes: float
    kv_bytes: float


QUANTIZATIONS = {"none": Quantization("none", 2, 2), "fp8": Quantization("fp8", 1, 1)}


def load_quantization(name: str | None, card: Card) -> Quantization:
    """`none` (bf16), or `fp8` for weights, KV cache and the tensor cores' arithmetic."""
    if (name or "none") not in QUANTIZATIONS:
        raise UsageError(f"unknown quantization '{name}'; there is: {', '.join(QUANTIZATIONS)}")
    quantization = QUANTIZATIONS[name or "none"]
    if quantization.name == "fp8" and not card.flops_8:
        raise UsageError(f"quantization fp8: {card.name} has no fp8 arithmetic; use none")
    return quantization


def activation_bytes(model: Shape, limits: Limits, tp: int) -> float:
    """The largest set of activations alive at once: the MLP of max_num_tokens tokens, or the logits of
    max_batch_size requests.
    """
    mlp = limits.max_num_tokens * (2 * model.hidden + 3 * model.intermediate / tp) * 2
    logits = limits.max_batch_size * model.vocab_size * (2 + 4)  # bf16, and a float32 copy to sample from
    return max(mlp, logits)


def kv_blocks(
    policy: type[Policy],
    model: Shape,
    card: Card,
    quantization: Quantization,
    tp: int,
    limits: Limits,
    overrides: dict[str, Any] | None = None,
) -> tuple[KvBlocks, dict[str, Any]]:
    """The blocks of each card (all hold the same tokens) and how their number came about.

    `overrides` may hold memory_fraction, block_size, and one of kv_blocks, kv_tokens, kv_memory_gib (a card).
    """
    given = dict(overrides or {})
    if unknown := [k for k in given if k not in OVERRIDES]:
        raise UsageError(f"memory: unknown key '{unknown[0]}'; there is: {', '.join(OVERRIDES)}")
    sizes = [k for k in ("kv_blocks", "kv_tokens", "kv_memory_gib") if given.get(k)]
    if len(sizes) > 1:
        raise UsageError(f"memory: give one of {' and '.join(sizes)}, not both")
    block = int(given.get("block_size") or policy.block_size)
    per_block = model.kv_bytes_at(quantization.kv_bytes, tp) * block
    how: dict[str, Any] = {"block_size": block, "block_bytes": per_block}
    if given.get("kv_blocks"):
        blocks, how["from"] = int(given["kv_blocks"]), "kv_blocks, as given"
    elif given.get("kv_tokens"):
        blocks, how["from"] = int(given["kv_tokens"]) // block, "kv_tokens, as given"
    elif given.get("kv_memory_gib"):
        blocks, how["from"] = int(given["kv_memory_gib"] * GIB // per_block), "kv_memory_gib, as given"
    else:
        budget, details = _estimate(policy, model, card, quantization, tp, limits, given.get("memory_fraction"))
        blocks = int(budget // per_block)
        how |= {"from": "estimated", **details}
    how |= {"blocks": blocks, "tokens": blocks * block}
    if blocks < 1:
        raise UsageError(
            f"no room for a KV cache: {model.name} ({quantization.name}) on {tp} x {card.name} ({how}); "
            "use more cards, fp8 or a larger memory_fraction"
        )
    return KvBlocks(blocks, block), how


def _estimate(
    policy: type[Policy],
    model: Shape,
    card: Card,
    quantization: Quantization,
    tp: int,
    limits: Limits,
    fraction: float | None,
) -> tuple[float, dict[str, Any]]:
    fraction = policy.memory_fraction if fraction is None else float(fraction)
    if not 0 < fraction <= 1:
        raise UsageError(f"memory: memory_fraction {fraction} is not in (0, 1]")
    visible = card.memory_bytes * VISIBLE_SHARE
    weights = model.weight_bytes_at(quantization.weight_bytes, tp)
    rest = activation_bytes(model, limits, tp) + RUNTIME_BYTES
    budget = {
        "total": fraction * visible - weights - rest,
        "free": fraction * (visible - weights - rest),
        "static": fraction * visible - weights,
    }[policy.fraction_of]
    gib = {"card": visible, "weights": weights, "activations_and_runtime": rest, "kv": budget}
    return budget, {
        "memory_fraction": fraction,
        "fraction_of": policy.fraction_of,
        "gib": {k: round(v / GIB, 3) for k, v in gib.items()},
    }
