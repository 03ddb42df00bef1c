"""vLLM V0 (0.6): an iteration is either prompts or generation, and prompts go first.

While no request is swapped out, waiting prompts are taken whole, in order, as long as `max_num_batched_tokens`,
`max_num_seqs` and the blocks (less a watermark of 1%) allow; if any was taken, the running requests stand still for
that iteration. Otherwise each running request gets a token. When there is no free block, the last running request
is preempted: its blocks are dropped and it is computed again (the default), or moved to the host and back
(`preemption_mode: swap`).

`num_scheduler_steps` runs that many decode iterations a scheduling. A request that ends within them runs on to the
last, without use; and an arrival waits. `async_output_proc` (on by default in 0.6) handles the output of an
iteration during the next one, so an end is noticed one iteration late and that request decodes once more than it
must.
"""

from collections import deque
from typing import Any, ClassVar

from batchlab.errors import UsageError
from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence


class VllmV0(Policy):
    versions: ClassVar[str] = "vLLM 0.6, V0 scheduler without chunked prefill"
    options: ClassVar[dict[str, Any]] = {
        "num_scheduler_steps": 1,
        "preemption_mode": "recompute",  # or swap
        "async_output_proc": True,
        "watermark": 0.01,
    }
    kernels: ClassVar[str] = "vllm"
    block_size: ClassVar[int] = 16
    memory_fraction: ClassVar[float] = 0.9
    graph_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, *range(8, 257, 8))
    whole_prompts = True
    keeps_ended = True

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        if options["preemption_mode"] not in ("recompute", "swap"):
            raise UsageError(f"vllm-v0: preemption_mode is recompute or swap, not '{options['preemption_mode']}'")
        if options["num_scheduler_steps"] < 1:
            raise UsageError("vllm-v0: num_scheduler_steps is 1 or more")
        super().__init__(limits, kv, options)
        self.group = options["num_scheduler_steps"]
        self.finish_lag = 2 if options["async_output_proc"] and self.group == 1 else 1
        self.watermark_blocks = int(options["watermark"] * kv.total)
        self.swapped: deque[Sequence] = deque()

    @property
    def queue_length(self) -> int:
        return len(self.waiting) + len(self.swapped)

    def refusal(self, seq: Sequence) -> str | None:
        if self.kv.of(seq.prompt) + self.watermark_blocks > self.kv.total:
            return f"prompt of {seq.prompt} tokens does not fit beside {self.watermark_blocks} KV blocks of watermark"
        return super().refusal(seq)

    def schedule(self) -> Step | None:
        step = Step()
        if not self.swapped:
            self._schedule_prefills(step)
        if not step.prefills:
            self._schedule_running(step)
        return step if step.decodes or step.prefills else None

    def _schedule_prefills(self, step: Step) -> None:
        budget = self.limits.max_num_tokens
        while self.waiting:
            seq = self.waiting[0]
            if error := self._never_again(seq):
                seq.error = error
                self.dropped.append(self.waiting.popleft())
                continue
            if (
                self.kv.of(seq.known) + self.watermark_blocks > self.kv.free
                or seq.known > budget
                or self.holding >= self.limits.max_batch_size
            ):
                return
            self.waiting.popleft()
            self.prefill(step, seq, seq.known)
            budget -= seq.known

    def _never_again(self, seq: Sequence) -> str | None:
        """A preempted request may have grown past what a prefill can hold: vLLM drops it."""
        if seq.known > self.limits.max_num_tokens:
            return f"{seq.known} tokens to compute again are over max_num_tokens {self.limits.max_num_tokens}"
        if self.kv.of(seq.known) + self.watermark_blocks > self.kv.total:
            return (
                f"{seq.known} tokens to compute again do not fit beside {self.watermark_blocks} KV blocks of watermark"
            )
        return None

    def _schedule_running(self, step: Step) -> None:
        # one step at a time, the block manager of 0.6 wants a free block for each sequence, needed or not
        spare = 1 if self.group == 1 else 0
        if self.decodes.blocks_needed(self.group) + spare > self.kv.free:
            self.make_room(
                step,
                lambda seq: max(spare, self.blocks_for_step(seq, self.group)),
                self.decodes.last,
                lambda seq: self._preempt(step, seq),
                self.group,
            )
        if not step.preempted:
            self._swap_in(step)
        step.decodes = len(self.decodes) > 0
        step.group = self.group if step.decodes else 1

    def _preempt(self, step: Step, seq: Sequence) -> None:
        if self.opt["preemption_mode"] == "recompute" or seq.end_tick <= self.decodes.tick:
            self.preempt(step, seq)
            return
        self.decodes.remove(seq)
        blocks = self.kv.of(seq.context)
        self.kv.used -= blocks
        step.swapped_blocks += blocks
        seq.preemptions += 1
        step.preempted += 1
        self.swapped.append(seq)

    def _swap_in(self, step: Step) -> None:
        while self.swapped and self.holding < self.limits.max_batch_size:
            seq = self.swapped[0]
            blocks = self.kv.of(seq.context)
            if blocks + 1 + self.watermark_blocks > self.kv.free - self.decodes.blocks_needed(self.group):
                return
            self.swapped.popleft()
            self.kv.used += blocks
            step.swapped_blocks += blocks
            self.decodes.add(seq)

    def heeds_arrivals(self) -> bool:
        return not self.swapped and super().heeds_arrivals()

    def steady_steps(self, step: Step) -> int:
        steady = super().steady_steps(step)
        if self.group == 1 or not step.decodes:
            return min(steady, max(1, self._steps_with_one_block_spare()))
        return max(1, steady // self.group) * self.group

    def _steps_with_one_block_spare(self) -> int:
        return self.decodes.steps_within(max(self.kv.free - 1, 0))
