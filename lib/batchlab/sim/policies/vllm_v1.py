"""vLLM V1 (0.26 to 0.32): one rule for prompts and generation, "give each request what it lacks".

Running requests come first, in the order of their admission: a token each for those that decode, then the rest of
the prompt of the one that is still in it. What is left of `max_num_batched_tokens` goes to waiting requests, whose
prompts are cut to fit. Admission is optimistic: the whole prompt must fit now, the output need not. When a block is
missing, the last running request is preempted and will be computed again; nothing is admitted in such an iteration.

`max_batch_size` is max_num_seqs, `max_num_tokens` is max_num_batched_tokens. Asynchronous scheduling (its default
since 0.14) plans an iteration while the one before it runs. It knows from the lengths which requests need no
further step, but their slots and blocks are freed one iteration later, and an arrival waits for one iteration more.
"""

from typing import Any, ClassVar

from batchlab.errors import UsageError
from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence


class VllmV1(Policy):
    versions: ClassVar[str] = "vLLM 0.26 to 0.32, V1 scheduler"
    options: ClassVar[dict[str, Any]] = {
        "async_scheduling": True,
        "reserve_full_prompt": True,  # scheduler_reserve_full_isl: admit only when the whole prompt fits
        "watermark": 0.0,  # share of the blocks that admission leaves free
    }
    kernels: ClassVar[str] = "vllm"
    block_size: ClassVar[int] = 16
    memory_fraction: ClassVar[float] = 0.92
    # cudagraph_capture_sizes by default; prompts run through the piecewise graphs of the same sizes, and larger
    # iterations through none, which is the host's work (see sim.host)
    graph_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    graphs_mixed: ClassVar[bool] = True

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        if limits.max_num_tokens < limits.max_batch_size:
            raise UsageError(
                f"max_num_tokens {limits.max_num_tokens} is below max_batch_size {limits.max_batch_size}: "
                "vLLM refuses that; raise max_num_tokens or lower max_batch_size"
            )
        # one block of the pool is vLLM's null block and is never given out
        super().__init__(limits, KvBlocks(max(kv.total - 1, 1), kv.block_size), options)
        self.schedule_lag = self.finish_lag = 2 if options["async_scheduling"] else 1
        self.watermark_blocks = int(options["watermark"] * kv.total)
        self.running: dict[Sequence, None] = {}  # in the order of admission, with those whose end is unnoticed
        self.chunked: Sequence | None = None  # the one within its prompt; always the last that was admitted

    @property
    def holding(self) -> int:
        return len(self.running)

    def schedule(self) -> Step | None:
        step = Step()
        if self.decodes.blocks_needed(1) > self.kv.free:
            self.make_room(step, self.blocks_for_step, self._last, lambda seq: self._preempt(step, seq))
        step.decodes = len(self.decodes) > 0
        granted = self.decodes.blocks_needed(1)  # taken when the iteration runs
        budget = self.limits.max_num_tokens - len(self.decodes)
        if self.chunked:
            budget -= self._continue_prompt(step, self.chunked, budget, granted)
        if not step.preempted:
            self._admit(step, budget, granted)
        return step if step.decodes or step.prefills else None

    def _continue_prompt(self, step: Step, seq: Sequence, budget: int, granted: int) -> int:
        tokens = min(seq.known - seq.context, budget)
        if self.kv.of(seq.context + tokens) - self.kv.of(seq.context) > self.kv.free - granted:
            self._preempt(step, seq)
            return 0
        self._prefill(step, seq, tokens)
        return tokens

    def _admit(self, step: Step, budget: int, granted: int) -> None:
        while self.waiting and budget > 0 and self.holding < self.limits.max_batch_size:
            seq = self.waiting[0]
            tokens = min(seq.known, budget)
            must_fit = seq.known if self.opt["reserve_full_prompt"] else tokens
            headroom = self.watermark_blocks if self.holding else 0
            if self.kv.of(must_fit) + headroom > self.kv.free - granted:
                return
            self.running[self.waiting.popleft()] = None
            self._prefill(step, seq, tokens)
            budget -= tokens

    def _prefill(self, step: Step, seq: Sequence, tokens: int) -> None:
        self.prefill(step, seq, tokens)
        self.chunked = seq if seq.context < seq.known else None

    def _last(self) -> Sequence:
        return next(reversed(self.running))

    def _preempt(self, step: Step, seq: Sequence) -> None:
        del self.running[seq]
        if seq is self.chunked:
            self.chunked = None
        if seq.produced < seq.output or seq in self.decodes.members:
            self.preempt(step, seq)
            return
        # its last token is still under way: it loses its blocks, and ends when the token is there
        self.kv.used -= self.kv.of(seq.context)
        seq.forget_cache()
        step.preempted += 1

    def retire(self, seq: Sequence) -> None:
        super().retire(seq)
        self.running.pop(seq, None)
