"""A card at its power limit: what it sustains is less than what its operators reach one by one.

Operator times are measured briefly, at full clock. Under a steady load of large batches a card meets its power limit
and lowers its clock: the recorded H200 cells draw up to 679 of 700 W and fall from 1,980 to 1,547 MHz on average. A
lower clock slows arithmetic and leaves the bandwidth of device memory, so an iteration is taken apart: the attention of
decodes, which waits for memory, takes the tables' time at any clock; the rest takes its arithmetic at that clock, where
that is longer than the tables' time. The clock is the highest one at which the iteration's energy fits into its time:
an operation takes the less energy, the lower the clock, since the voltage falls with it, a byte of device memory always
the same. That form is a model: the records hold the clock and the power of whole cells, not an operator's energy. Its
three constants belong to a card and an arithmetic, are fitted on measured cells (`fitting`), and without them no limit
is simulated.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from batchlab.models import Shape
from batchlab.sim.core import StepTimes
from batchlab.sim.memory import Quantization

# How long a card may save power for later: drivers average it over tens of milliseconds and more. Assumed: the cells
# that are fitted on tell 0 (each iteration for itself) from the rest, but not 0.05 from 0.2 or 1.
WINDOW_S = 0.05
LOWEST = 0.3  # of the full clock; no card lowers it further


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """What a card sustains, at its full clock."""

    tflops: float  # 10^12 operations/s that its power allows with no byte moved
    tbytes: float  # 10^12 bytes/s of device memory that its power allows with no arithmetic
    reached_tflops: float  # 10^12 operations/s that the operators of an iteration reach, whatever the power

    def slower(self, factor: float) -> "PowerLimit":
        """The limit of a card that takes `factor` times as long."""
        return PowerLimit(self.tflops / factor, self.tbytes / factor, self.reached_tflops / factor)


class PowerLimited:
    """Step times that a card holds for a while only, and not on average, for want of power. Wraps other step times.

    The limit is on power averaged over a while. What light iterations and idle time leave of it is saved, up to
    `window_s`, and heavy iterations run at full clock as long as it lasts; then each runs at the clock that its energy
    asks for. Savings are counted in seconds at the limit. One object serves one simulation.
    """

    def __init__(
        self,
        times: StepTimes,
        limit: PowerLimit,
        model: Shape,
        quantization: Quantization,
        tp: int,
        window_s: float = WINDOW_S,
    ) -> None:
        self.times, self.limit = times, limit
        self._model, self._tp = model, tp
        self._kv = model.kv_bytes_at(quantization.kv_bytes, tp)
        self._weights = model.weight_bytes_at(quantization.weight_bytes, tp)
        self._window_s = self._saved_s = window_s
        self._left: np.ndarray = np.empty(0)  # saved after each of the iterations last asked for

    @property
    def provenance(self) -> dict[str, Any]:
        inner = getattr(self.times, "provenance", {"kind": type(self.times).__name__})
        limit = self.limit
        told = {"tflops": limit.tflops, "tbytes": limit.tbytes, "reached_tflops": limit.reached_tflops}
        return {**inner, "power_limit": told | {"window_s": self._window_s, "fitted": True}}

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        tokens = decodes + sum(n for n, _ in prefills)
        pairs = sum(n * before + n * n / 2 for n, before in prefills)
        moved = self._bytes(context_tokens + sum(before for _, before in prefills))
        full_s = self.times.step_s(prefills, decodes, context_tokens, longest, padding)
        operations = self._operations(tokens, decodes + len(prefills), pairs)
        arithmetic_s = self._arithmetic_s(full_s, prefills, decodes, padding)
        return float(self._held(np.array([full_s]), arithmetic_s, operations, np.array([moved]))[0])

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        full_s = self.times.decode_run_s(decodes, context_tokens, steps, longest, padding)
        moved = self._bytes(context_tokens + decodes * np.arange(steps))
        arithmetic_s = self._arithmetic_s(float(full_s.min()), [], decodes, padding)
        return self._held(full_s, arithmetic_s, self._operations(decodes, decodes, 0), moved)

    def _arithmetic_s(self, full_s: float, prefills: list[tuple[int, int]], decodes: int, padding: int) -> float:
        """Of an iteration that takes `full_s`, all but what its decodes' contexts take: as if each were one token."""
        return min(self.times.step_s(prefills, decodes, decodes, 0, padding), full_s) if decodes else full_s

    def _held(self, full_s: np.ndarray, arithmetic_s: float, operations: float, moved: np.ndarray) -> np.ndarray:
        """What iterations take that differ in the bytes they move, from what they take at full clock."""
        limit, saved, window_s = self.limit, self._saved_s, self._window_s
        attention_s, reached_s = full_s - arithmetic_s, operations / (limit.reached_tflops * 1e12)
        took = attention_s + max(arithmetic_s, reached_s)
        for_operations_s, for_bytes_s = operations / (limit.tflops * 1e12), moved / (limit.tbytes * 1e12)
        wanting_s = for_operations_s + for_bytes_s - took

        def slowed(at: slice, saved_s: float) -> np.ndarray:
            """At the clock f where f·for_operations + for_bytes = attention + max(arithmetic, reached / f) + saved."""
            spare_s = attention_s[at] + saved_s - for_bytes_s[at]
            clock = (spare_s + arithmetic_s) / for_operations_s
            slow = clock * arithmetic_s < reached_s
            root = (spare_s + np.sqrt(spare_s**2 + 4 * for_operations_s * reached_s)) / (2 * for_operations_s)
            clock = np.clip(np.where(slow, root, clock), LOWEST, 1.0)
            at_lowest_s = LOWEST * for_operations_s + for_bytes_s[at] - saved_s  # energy that no clock makes less
            return np.maximum(attention_s[at] + np.maximum(arithmetic_s, reached_s / clock), at_lowest_s)

        if (wanting_s <= 0).all():
            self._left = np.minimum(window_s, saved + np.cumsum(-wanting_s))
            return took
        if saved == 0 and (wanting_s >= 0).all():
            self._left = np.zeros(len(took))
            return slowed(slice(None), 0.0)
        self._left = np.empty(len(took))
        for i, wanting in enumerate(wanting_s.tolist()):
            if wanting > saved:
                took[i], saved = slowed(slice(i, i + 1), saved)[0], 0.0
            else:
                saved = min(window_s, saved - wanting)
            self._left[i] = saved
        return took

    def ran(self, steps: int, idle_s: float) -> None:
        """Keep what these iterations left. Idle time before them is saved with it, which is late by one plan."""
        self._saved_s = min(self._window_s, float(self._left[steps - 1]) + idle_s)
        self.times.ran(steps, idle_s)

    def swap_s(self, tokens: int) -> float:
        return self.times.swap_s(tokens)

    def _operations(self, tokens: int, requests: int, pairs: float) -> float:
        """Of linear maps, and of the attention of prompts over so many pairs of tokens."""
        model = self._model
        linear = model.layer_params * tokens + model.vocab_size * model.hidden * requests
        return (2 * linear + 4 * model.layers * model.heads * model.head_dim * pairs) / self._tp

    def _bytes(self, context_tokens: float | np.ndarray) -> float | np.ndarray:
        return self._weights + self._kv * context_tokens
