"""A stand-in for cards without measured operator times: each operator at a fixed share of the data sheet's roof.

Not measured, and said to be so in the provenance. The shares were chosen near the measured tables of the A100 and
the H200. Against the tables it is off by 3 to 11% on average on A100, H100 and H200, and by 7 to 16% on the L40S
(benchmarks/simulator/roofline.py); a card that none of these resembles may lie further off.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchlab.errors import UsageError
from batchlab.models import Shape
from batchlab.sim.hardware import Card
from batchlab.sim.memory import Quantization

COMPUTE_SHARE = 0.75  # of the dense tensor peak, in linear maps over many tokens
ATTENTION_SHARE = 0.60  # of the same, in context attention
BANDWIDTH_SHARE = 0.75  # of the memory bandwidth
KERNEL_S = 5e-6  # each kernel's launch and tail
KERNELS_A_LAYER = 8


@dataclass(slots=True)
class RooflineTimes:
    """Step times of a model on a card's data sheet."""

    model: Shape
    card: Card
    quantization: Quantization
    tp: int
    provenance: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.provenance = {
            "kind": "roofline stand-in, not measured",
            "card": self.card.name,
            "source": self.card.source,
            "tp": self.tp,
            "weights_and_kv": self.quantization.name,
            "compute_share": COMPUTE_SHARE,
            "attention_share": ATTENTION_SHARE,
            "bandwidth_share": BANDWIDTH_SHARE,
            "kernel_us": KERNEL_S * 1e6,
        }
        if self.quantization.name == "fp8" and not self.card.flops_8:
            raise UsageError(f"quantization fp8: {self.card.name} has no fp8 arithmetic; use none")

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        tokens = decodes + sum(n for n, _ in prefills) + padding
        seconds = self._linear_s(tokens, decodes + len(prefills))
        if prefills:
            pairs = sum(n * before + n * (n + 1) / 2 for n, before in prefills)
            flops = 4 * self.model.layers * self.model.heads * self.model.head_dim * pairs / self.tp
            seconds += flops / (self._flops * ATTENTION_SHARE)
        if decodes:
            seconds += self._kv_s(context_tokens + decodes)
        return seconds

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        contexts = context_tokens + decodes * (1 + np.arange(steps))
        return self._linear_s(decodes + padding, decodes) + self._kv_s(contexts)

    def swap_s(self, tokens: int) -> float:
        return tokens * self.model.kv_bytes_at(self.quantization.kv_bytes, self.tp) / self.card.pcie

    def ran(self, steps: int, idle_s: float) -> None:
        """Nothing of it depends on what ran before."""

    @property
    def _flops(self) -> float:
        return self.card.flops_8 if self.quantization.name == "fp8" else self.card.flops_16

    @property
    def _bandwidth(self) -> float:
        return self.card.bandwidth * BANDWIDTH_SHARE

    def _linear_s(self, tokens: int, requests: int) -> float:
        model, tp = self.model, self.tp
        layers = max(
            2 * model.layer_params * tokens / tp / (self._flops * COMPUTE_SHARE),
            model.layer_params * self.quantization.weight_bytes / tp / self._bandwidth,
        )
        logits = max(
            2 * model.vocab_size * model.hidden * requests / tp / (self.card.flops_16 * COMPUTE_SHARE),
            model.vocab_size * model.hidden * 2 / tp / self._bandwidth,
        )
        # activations in and out of the element-wise work of a layer
        elementwise = model.layers * tokens * (8 * model.hidden + 3 * model.intermediate / tp) * 2 / self._bandwidth
        # a ring all-reduce after attention and after the MLP moves 2 (tp - 1) / tp of the activations
        reduce = 2 * model.layers * tokens * model.hidden * 2 * 2 * (tp - 1) / tp / self.card.link if tp > 1 else 0.0
        return layers + logits + elementwise + reduce + KERNEL_S * KERNELS_A_LAYER * model.layers

    def _kv_s(self, context_tokens: float | np.ndarray) -> float | np.ndarray:
        return context_tokens * self.model.kv_bytes_at(self.quantization.kv_bytes, self.tp) / self._bandwidth
