"""What a card cannot do better: bounds from its peak arithmetic, its memory's bandwidth and its memory's size.

Peaks are data-sheet values (`sim.hardware`), which no kernel reaches, so a table past a bound is wrong, and one below
it may be wrong still.
"""

import math
from dataclasses import dataclass

from batchlab.models import Shape
from batchlab.sim.hardware import Card
from batchlab.sim.memory import Quantization


@dataclass(frozen=True, slots=True)
class Roofs:
    """The bounds of one model on one card. Lengths in tokens, times in seconds, throughput in tokens a second."""

    card: Card
    shape: Shape
    quantization: Quantization

    @property
    def peak_flops(self) -> float:
        """Operations a second."""
        return float(self.card.flops_8 or 0) if self.quantization.name == "fp8" else self.card.flops_16

    @property
    def step_weight_bytes(self) -> float:
        """Bytes of weights that each iteration reads: all but the input embedding, of which it reads a few rows."""
        head = self.shape.vocab_size * self.shape.hidden * 2
        return self.shape.layer_params * self.quantization.weight_bytes + head

    @property
    def kv_token_bytes(self) -> float:
        return self.shape.kv_bytes_at(self.quantization.kv_bytes)

    def attention_flops(self, context_sum: float) -> float:
        """Of scores and values: 4 operations a layer, head and dimension for each pair of tokens."""
        return 4 * self.shape.layers * self.shape.heads * self.shape.head_dim * context_sum

    def prefill_flops(self, input_len: float) -> float:
        """Operations of one prompt, causal attention, one row of logits."""
        head = 2 * self.shape.vocab_size * self.shape.hidden
        return 2 * self.shape.layer_params * input_len + head + self.attention_flops(input_len**2 / 2)

    def request_flops(self, input_len: float, output_len: float) -> float:
        """Operations of one request: its prompt, then each of its other tokens."""
        later = output_len - 1
        head = 2 * self.shape.vocab_size * self.shape.hidden
        attention = self.attention_flops(later * (input_len + output_len / 2))
        return self.prefill_flops(input_len) + later * (2 * self.shape.layer_params + head) + attention

    def prefill_s(self, input_len: float) -> float:
        """The least time from a prompt to its first token, on an idle card at its peak."""
        return self.prefill_flops(input_len) / self.peak_flops

    def compute_tok_s(self, input_len: float, output_len: float) -> float:
        """Output throughput at the card's peak arithmetic."""
        return output_len * self.peak_flops / self.request_flops(input_len, output_len)

    def step_s(self, running: float, context: float) -> float:
        """The least time of a decode iteration: weights, and the keys and values of `running` requests of `context`
        tokens, read once at full bandwidth."""
        return (self.step_weight_bytes + running * context * self.kv_token_bytes) / self.card.bandwidth

    def kv_tokens(self, utilization: float = math.nan, kv_cache_gib: float = math.nan) -> float:
        """The most tokens that the KV cache holds: as given, else all that the weights leave of the engine's share."""
        if not math.isnan(kv_cache_gib):
            return kv_cache_gib * 2**30 / self.kv_token_bytes
        share = 1.0 if math.isnan(utilization) else utilization
        weights = self.shape.weight_bytes_at(self.quantization.weight_bytes)
        return max(0.0, (share * self.card.memory_bytes - weights) / self.kv_token_bytes)

    def running(self, context: float, max_batch_size: float, kv_tokens: float) -> float:
        """The most requests that run at once, on average, where each holds `context` tokens on average."""
        return min(kv_tokens / context, math.inf if math.isnan(max_batch_size) else max_batch_size)

    def memory_tok_s(self, running: float, context: float) -> float:
        """Decode throughput of `running` requests at full bandwidth."""
        return running / self.step_s(running, context)
