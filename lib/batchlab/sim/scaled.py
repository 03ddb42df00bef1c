"""A card that is somewhat slower or faster than the one whose operators were measured."""

from typing import Any

import numpy as np

from batchlab.sim.core import StepTimes


class ScaledTimes:
    """Step times of a card that takes `factor` times as long for each operator. Wraps other step times."""

    def __init__(self, times: StepTimes, factor: float) -> None:
        self.times, self.factor = times, factor

    @property
    def provenance(self) -> dict[str, Any]:
        inner = getattr(self.times, "provenance", {"kind": type(self.times).__name__})
        return {**inner, "card_factor": self.factor}

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        return self.factor * self.times.step_s(prefills, decodes, context_tokens, longest, padding)

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        return self.factor * self.times.decode_run_s(decodes, context_tokens, steps, longest, padding)

    def swap_s(self, tokens: int) -> float:
        return self.times.swap_s(tokens)

    def ran(self, steps: int, idle_s: float) -> None:
        self.times.ran(steps, idle_s)
