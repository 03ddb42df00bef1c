"""TensorRT-LLM 0.14: in-flight fused batching. Prompts and generation share an iteration; running requests are
taken first.

Two schedulers follow one another. The capacity scheduler decides who may hold memory. GUARANTEED_NO_EVICT (the
default) admits a request only when the blocks of its whole prompt and of all its output are still unpromised, so
that nobody is ever paused. MAX_UTILIZATION admits what fits now; when a block is missing, the request that started
last is paused, loses its blocks and is computed again. The micro-batch scheduler then fills the iteration: a token
for each generating request, and whole prompts in order while `max_num_tokens` lasts (the first that does not fit
ends it). With context chunking a prompt may be cut, at a multiple of the KV block, first come first served.

`overlap_scheduler` is the 1.0 PyTorch backend's default: an iteration is planned while the one before it runs, so
slots and blocks are freed one iteration later.
"""

from typing import Any, ClassVar

from batchlab.errors import UsageError
from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence

CAPACITY_POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")


class TensorRtLlm(Policy):
    versions: ClassVar[str] = "TensorRT-LLM 0.14 to 1.0, in-flight fused batching"
    options: ClassVar[dict[str, Any]] = {
        "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
        "enable_chunked_context": False,
        "overlap_scheduler": False,
    }
    kernels: ClassVar[str] = "trtllm"
    block_size: ClassVar[int] = 64
    memory_fraction: ClassVar[float] = 0.9
    fraction_of: ClassVar[str] = "free"

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        if options["capacity_scheduler_policy"] not in CAPACITY_POLICIES:
            raise UsageError(
                f"tensorrt-llm: capacity_scheduler_policy is one of {', '.join(CAPACITY_POLICIES)}, "
                f"not '{options['capacity_scheduler_policy']}'"
            )
        super().__init__(limits, kv, options)
        self.no_evict = options["capacity_scheduler_policy"] == "GUARANTEED_NO_EVICT"
        self.chunking = options["enable_chunked_context"]
        self.whole_prompts = not self.chunking
        # a generating request takes a token of the iteration, so no more than max_num_tokens can ever run
        self.max_running = min(limits.max_batch_size, limits.max_num_tokens)
        self.schedule_lag = self.finish_lag = 2 if options["overlap_scheduler"] else 1
        self.promised = 0  # blocks that started requests need to their ends
        self.chunked: Sequence | None = None  # started, within its prompt

    @property
    def holding(self) -> int:
        return super().holding + (self.chunked is not None)

    def heeds_arrivals(self) -> bool:
        return not self.waiting and self.holding < self.max_running

    def schedule(self) -> Step | None:
        step = Step()
        if not self.no_evict and self.decodes.blocks_needed(1) > self.kv.free:
            self.make_room(step, self.blocks_for_step, self._last, lambda seq: self._pause(step, seq))
        step.decodes = len(self.decodes) > 0
        budget = self.limits.max_num_tokens - len(self.decodes)
        if self.chunked:
            budget = self._context(step, self.chunked, budget)
        while not step.preempted and self.waiting and budget > 0 and self.holding < self.max_running:
            seq = self.waiting[0]
            if self._over_limit(seq):
                continue
            if not self._fits(seq) or self._chunk(seq, budget) == 0:
                break
            self.waiting.popleft()
            self.promised += self.kv.of(seq.worst_case)
            budget = self._context(step, seq, budget)
        return step if step.decodes or step.prefills else None

    def _context(self, step: Step, seq: Sequence, budget: int) -> int:
        tokens = self._chunk(seq, budget)
        if tokens:
            if seq.context == 0:  # the first chunk takes the blocks of the whole prompt
                self.kv.used += self.kv.of(seq.known)
            self.plan_prefill(step, seq, tokens)
            self.chunked = seq if seq.context < seq.known else None
        return budget - tokens

    def _chunk(self, seq: Sequence, budget: int) -> int:
        left = seq.known - seq.context
        if left <= budget:
            return left
        return budget // self.kv.block_size * self.kv.block_size if self.chunking else 0

    def _fits(self, seq: Sequence) -> bool:
        if self.no_evict:
            return self.kv.of(seq.worst_case) <= self.kv.total - self.promised
        return self.kv.of(seq.known) <= self.kv.free - self.decodes.blocks_needed(1)

    def _over_limit(self, seq: Sequence) -> bool:
        """A paused request may have grown past max_num_tokens: without chunking it can never run again."""
        if self.chunking or seq.known <= self.limits.max_num_tokens:
            return False
        seq.error = f"{seq.known} tokens to compute again are over max_num_tokens {self.limits.max_num_tokens}"
        self.dropped.append(self.waiting.popleft())
        return True

    def _last(self) -> Sequence:
        return self.chunked or self.decodes.last()

    def _pause(self, step: Step, seq: Sequence) -> None:
        if seq is self.chunked:
            self.chunked = None
            seq.context = seq.known  # it holds the blocks of its whole prompt
        self.promised -= self.kv.of(seq.worst_case)
        self.preempt(step, seq)

    def retire(self, seq: Sequence) -> None:
        self.promised -= self.kv.of(seq.worst_case)
        super().retire(seq)
