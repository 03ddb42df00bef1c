"""Static batching, the baseline before in-flight batching: a batch is formed, prefilled, and decoded to its longest
output.

The batch is the front of the queue at the time, up to `max_batch_size`, as long as blocks for its longest prompt
and longest output are there for every member. Prompts are prefilled whole, up to `max_num_tokens` an iteration. A
request that ends early keeps its place, and decodes without use, until the batch ends.
"""

from collections import deque
from typing import Any, ClassVar

import numpy as np

from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence


class StaticBatching(Policy):
    versions: ClassVar[str] = "static batching"
    options: ClassVar[dict[str, Any]] = {}
    kernels: ClassVar[str] = "trtllm"
    block_size: ClassVar[int] = 64
    memory_fraction: ClassVar[float] = 0.9
    fraction_of: ClassVar[str] = "free"
    whole_prompts = True
    reserves = True
    keeps_ended = True

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        super().__init__(limits, kv, options)
        self.batch: list[Sequence] = []
        self.prompts: deque[Sequence] = deque()
        self.unfinished = 0
        self.reserved = 0

    @property
    def holding(self) -> int:
        return len(self.batch)

    def schedule(self) -> Step | None:
        if not self.batch:
            self._form_batch()
        step = Step()
        budget = self.limits.max_num_tokens
        while self.prompts and self.prompts[0].prompt <= budget:
            seq = self.prompts.popleft()
            self.plan_prefill(step, seq, seq.prompt)
            budget -= seq.prompt
        step.decodes = not step.prefills and len(self.decodes) > 0
        return step if step.decodes or step.prefills else None

    def _form_batch(self) -> None:
        longest_prompt = longest_output = 0
        while self.waiting and len(self.batch) < self.limits.max_batch_size:
            seq = self.waiting[0]
            longest_prompt, longest_output = max(longest_prompt, seq.prompt), max(longest_output, seq.output)
            reserved = (len(self.batch) + 1) * self.kv.of(longest_prompt + longest_output)
            if reserved > self.kv.total:
                break
            self.reserved = reserved
            self.batch.append(self.waiting.popleft())
        self.prompts.extend(self.batch)
        self.unfinished = len(self.batch)

    def retire(self, seq: Sequence) -> None:
        self.unfinished -= 1
        if self.unfinished == 0:
            for member in list(self.decodes):
                self.decodes.remove(member)
            self.batch.clear()
            self.draining = self.reserved = 0

    def steady_steps(self, step: Step) -> int:
        return 1 if step.prefills else self.decodes.steps_to_next_end()

    def heeds_arrivals(self) -> bool:
        return False

    def kv_use(self, step: Step, steps: int) -> np.ndarray:
        return np.full(steps, self.reserved / self.kv.total)
