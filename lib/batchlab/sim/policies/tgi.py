"""TGI (2.x, and 3.x with PREFILL_CHUNKING=0): reserve everything, first come first served, a prefill pauses
generation; or, as 3.x does by default, chunks of prompts beside generation.

A request is taken into a batch only when its prompt and all its `max_new_tokens` fit into what
`max_batch_total_tokens` has left; the first in the queue that does not fit stops the rest (head of line). A new
batch is prefilled alone, whole prompts up to `max_batch_prefill_tokens`, and joins the generating one. To pause
generation rarely, a new batch must hold at least `waiting_served_ratio` of the generating one's size, unless
`max_waiting_tokens` iterations have passed since the last one.

With `prefill_chunking` every iteration generates a token for each running request, then goes on with the prompt that
was cut, and gives what is left of `max_batch_prefill_tokens` to waiting requests, the last prompt cut to fit. Nobody
waits for a batch to be large enough, and the batch size has no limit: --max-batch-size is not heeded then.

`max_batch_size` is --max-batch-size, `max_num_tokens` is --max-batch-prefill-tokens. Not modelled: the cap of 1,024
new tokens in a reservation (3.1.1 and later), which prefills longer outputs again.
"""

from typing import Any, ClassVar

import numpy as np

from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence


class Tgi(Policy):
    versions: ClassVar[str] = "TGI 2.x, and 3.x without prefill chunking; 3.x with it as an option"
    options: ClassVar[dict[str, Any]] = {
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "prefill_chunking": False,
    }
    kernels: ClassVar[str] = "vllm"
    block_size: ClassVar[int] = 1
    memory_fraction: ClassVar[float] = 0.95
    graph_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32)  # --cuda-graphs by default
    whole_prompts = True
    reserves = True

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        super().__init__(limits, kv, options)
        self.reserved = 0  # tokens of the running requests' worst cases
        self.waiting_tokens = 1  # iterations since a batch was taken in
        self.may_take = True  # after a batch was taken in, one decode comes first
        self.chunking = options["prefill_chunking"]
        self.whole_prompts = not self.chunking
        self.chunked: Sequence | None = None  # within its prompt

    @property
    def holding(self) -> int:
        return super().holding + (self.chunked is not None)

    def schedule(self) -> Step | None:
        step = Step()
        running = len(self.decodes)
        if self.chunking:
            step.decodes = running > 0
            self._chunks(step, self.limits.max_num_tokens - running)
            return step if step.decodes or step.prefills else None
        if not running:
            self._next_batch(step, 1)
            self.may_take = True
        elif self.may_take:
            self._next_batch(step, self._min_size())
            self.may_take = not step.prefills
        if step.prefills:
            self.waiting_tokens = 1
            return step
        step.decodes = running > 0
        return step if step.decodes else None

    def _chunks(self, step: Step, budget: int) -> None:
        """Fill the rest of an iteration with prompts, the one that was cut before them."""
        if self.chunked and budget > 0:
            budget -= self._chunk(step, self.chunked, budget)
        while self.waiting and budget > 0 and self._has_room(self.waiting[0]):
            seq = self.waiting.popleft()
            self.reserved += seq.worst_case
            budget -= self._chunk(step, seq, budget)

    def _chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        tokens = min(seq.known - seq.context, budget)
        self.plan_prefill(step, seq, tokens)
        self.chunked = seq if seq.context < seq.known else None
        return tokens

    def _has_room(self, seq: Sequence) -> bool:
        return self.reserved + seq.worst_case <= self.kv.total * self.kv.block_size

    def _min_size(self) -> int:
        if self.waiting_tokens >= self.opt["max_waiting_tokens"]:
            return 1
        return int(len(self.decodes) * self.opt["waiting_served_ratio"])

    def _fitting(self) -> list[Sequence]:
        """The front of the queue that fits the prompt budget, the tokens left and the slots."""
        prompts, left = self.limits.max_num_tokens, self.kv.total * self.kv.block_size - self.reserved
        slots = self.limits.max_batch_size - self.holding
        fitting = []
        for seq in self.waiting:
            prompts -= seq.prompt
            left -= seq.worst_case
            if prompts < 0 or left < 0 or len(fitting) >= slots:
                break
            fitting.append(seq)
        return fitting

    def _next_batch(self, step: Step, min_size: int) -> None:
        if len(self.waiting) < min_size:
            return
        fitting = self._fitting()
        if len(fitting) < min_size:
            return
        for seq in fitting:
            self.waiting.popleft()
            self.reserved += seq.worst_case
            self.plan_prefill(step, seq, seq.prompt)

    def advance(self, step: Step, steps: int) -> list[Sequence]:
        if step.decodes:
            self.waiting_tokens += steps
            self.may_take = True
        return super().advance(step, steps)

    def retire(self, seq: Sequence) -> None:
        self.reserved -= seq.worst_case
        super().retire(seq)

    def steady_steps(self, step: Step) -> int:
        if step.prefills:
            return 1
        until_end = self.decodes.steps_to_next_end()
        if not self.chunking and self.waiting and self._fitting():
            if not self.may_take:
                return 1
            return min(until_end, max(1, self.opt["max_waiting_tokens"] - self.waiting_tokens))
        return until_end

    def heeds_arrivals(self) -> bool:
        if self.chunking:
            return not self.waiting or self._has_room(self.waiting[0])
        return self.holding < self.limits.max_batch_size and (not self.waiting or bool(self._fitting()))

    def kv_use(self, step: Step, steps: int) -> np.ndarray:
        return np.full(steps, self.reserved / (self.kv.total * self.kv.block_size))
