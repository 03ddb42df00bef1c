"""A card at its power limit: what it sustains is less than what its operators reach one by one.

Operator times are measured briefly, at full clock. Under a steady load of large batches a card meets its power limit
and lowers its clock: the recorded H200 cells draw up to 678 of 700 W and fall from 1,980 to 1,510 MHz on average. Here
iterations take on average at least as long as their energy would allow, with one share of the limit for each operation
and one for each byte of device memory. That form is a model: the records hold clock and power, not an operator's
energy. Its two constants belong to a card and an arithmetic, are fitted on measured cells (`fitting`), and without them
no limit is simulated.
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


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """What a card sustains: so much arithmetic with no byte moved, so many bytes with no arithmetic, or a mixture
    in proportion.
    """

    tflops: float  # 10^12 operations/s
    tbytes: float  # 10^12 bytes/s of device memory

    def seconds(self, operations: float, moved_bytes: float | np.ndarray) -> float | np.ndarray:
        return operations / (self.tflops * 1e12) + moved_bytes / (self.tbytes * 1e12)


class PowerLimited:
    """Step times that a card holds for a while only, and not on average, for want of power. Wraps other step times.

    The limit is on power averaged over a while. What light iterations and idle time leave of it is saved, up to
    `window_s`, and heavy iterations run at full speed as long as it lasts; then each takes the time that its energy
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
        told = {"tflops": self.limit.tflops, "tbytes": self.limit.tbytes, "window_s": self._window_s, "fitted": True}
        return {**inner, "power_limit": told}

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        tokens = decodes + sum(n for n, _ in prefills)
        pairs = context_tokens + sum(n * before + n * n / 2 for n, before in prefills)
        read = context_tokens + sum(before for _, before in prefills)
        energy_s = self.limit.seconds(self._operations(tokens, decodes + len(prefills), pairs), self._bytes(read))
        full_s = self.times.step_s(prefills, decodes, context_tokens, longest, padding)
        return float(self._held(np.array([full_s]), np.array([energy_s]))[0])

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        contexts = context_tokens + decodes * np.arange(steps)
        energy_s = self.limit.seconds(self._operations(decodes, decodes, contexts), self._bytes(contexts))
        return self._held(self.times.decode_run_s(decodes, context_tokens, steps, longest, padding), energy_s)

    def _held(self, full_s: np.ndarray, energy_s: np.ndarray) -> np.ndarray:
        """What the iterations take, from what they take at full speed and what their energy takes at the limit."""
        spare_s, saved = full_s - energy_s, self._saved_s
        if (spare_s >= 0).all():
            self._left = np.minimum(self._window_s, saved + np.cumsum(spare_s))
            return full_s
        if saved == 0 and (spare_s <= 0).all():
            self._left = np.zeros(len(full_s))
            return energy_s
        took, self._left = full_s.copy(), np.empty(len(full_s))
        for i, (full, energy) in enumerate(zip(full_s.tolist(), energy_s.tolist(), strict=True)):
            if energy > full + saved:
                took[i], saved = energy - saved, 0.0
            else:
                saved = min(self._window_s, saved + full - energy)
            self._left[i] = saved
        return took

    def ran(self, steps: int, idle_s: float) -> None:
        """Keep what these iterations left. Idle time before them is saved with it, which is late by one plan."""
        self._saved_s = min(self._window_s, float(self._left[steps - 1]) + idle_s)
        self.times.ran(steps, idle_s)

    def swap_s(self, tokens: int) -> float:
        return self.times.swap_s(tokens)

    def _operations(self, tokens: int, requests: int, pairs: float | np.ndarray) -> float | np.ndarray:
        model = self._model
        linear = model.layer_params * tokens + model.vocab_size * model.hidden * requests
        return (2 * linear + 4 * model.layers * model.heads * model.head_dim * pairs) / self._tp

    def _bytes(self, context_tokens: float | np.ndarray) -> float | np.ndarray:
        return self._weights + self._kv * context_tokens
