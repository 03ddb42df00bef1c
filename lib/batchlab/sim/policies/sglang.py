"""SGLang 0.5: prompts go first, cut into chunks; generation waits for them; too little memory retracts requests.

A batch of prompts is built whenever requests wait and the running batch is not known to be full: at most
`chunked_prefill_size` tokens, the last prompt cut to fit and continued by the next batch, with nobody decoding
meanwhile. Otherwise every running request decodes.

Admission looks ahead. When outputs have a fixed length (`ignore_eos`, as a benchmark sends, and no radix cache),
the memory of all requests is followed to their ends and must never run out. Else a request is expected to generate
`new_token_ratio` of what it may; the ratio falls from 0.7 while it goes well. When a decode step does not fit,
those with the fewest generated tokens are retracted to the end of the queue until 20 steps fit, and the ratio is
set from how far the others have come.

`max_batch_size` is --max-running-requests, `max_num_tokens` is --chunked-prefill-size. With the overlap scheduler
(default) ends are noticed one iteration late and those requests decode once more.
"""

from typing import Any, ClassVar

from batchlab.sim.policies.base import Limits, Policy, Step
from batchlab.sim.state import KvBlocks, Sequence

CLIP_MAX_NEW_TOKENS = 4096
RETRACT_DECODE_STEPS = 20
MIN_RATIO_FACTOR = 0.14
RATIO_DECAY_STEPS = 600


class SgLang(Policy):
    versions: ClassVar[str] = "SGLang 0.5 scheduler, no radix cache"
    options: ClassVar[dict[str, Any]] = {
        "ignore_eos": True,
        "overlap_schedule": True,
        "max_prefill_tokens": 16384,
        "new_token_ratio": 0.7,
    }
    kernels: ClassVar[str] = "sglang"
    block_size: ClassVar[int] = 1
    memory_fraction: ClassVar[float] = 0.88
    fraction_of: ClassVar[str] = "static"
    keeps_ended = True

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        super().__init__(limits, kv, options)
        self.schedule_lag = self.finish_lag = 2 if options["overlap_schedule"] else 1
        self.ratio = options["new_token_ratio"]
        self.chunked: Sequence | None = None
        self.batch_is_full = False

    @property
    def holding(self) -> int:
        return super().holding + (self.chunked is not None)

    def refusal(self, seq: Sequence) -> str | None:
        capacity = self.kv.total * self.kv.block_size
        if self.paged(seq.worst_case) + 2 > capacity:
            return f"needs {self.paged(seq.worst_case) + 2} KV tokens, the engine has {capacity}"
        return None

    def add(self, seq: Sequence) -> None:
        if not self.holding and not self.waiting:
            self.ratio = self.opt["new_token_ratio"]
        super().add(seq)

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages, and a page more, as admission counts them."""
        return (self.kv.of(tokens) + 1) * self.kv.block_size

    @property
    def free_tokens(self) -> int:
        return self.kv.free * self.kv.block_size

    def schedule(self) -> Step | None:
        step = Step()
        if self.chunked or (self.waiting and not self.batch_is_full):
            _PrefillAdder(self, step).fill()
        if step.prefills:
            return step
        if self.decodes.blocks_needed(1) > self.kv.free:
            self._retract(step)
        step.decodes = len(self.decodes) > 0
        return step if step.decodes else None

    def _retract(self, step: Step) -> None:
        order = sorted(self.decodes, key=lambda s: (self.produced(s), -s.prompt), reverse=True)
        while self.free_tokens < len(order) * RETRACT_DECODE_STEPS and len(order) > 1:
            seq = order.pop()
            self.preempt(step, seq)
            if seq.produced < seq.output:  # to the end of the queue; one that has ended unnoticed is just let go
                self.waiting.append(self.waiting.popleft())
        done = sum(self.produced(s) for s in order) + RETRACT_DECODE_STEPS * len(order)
        self.ratio = min(1.0, done / sum(s.output for s in order))
        self.batch_is_full = False

    def produced(self, seq: Sequence) -> int:
        """Tokens that a decoding sequence has by now."""
        return min(seq.output, seq.output - (seq.end_tick - self.decodes.tick))

    def advance(self, step: Step, steps: int) -> list[Sequence]:
        if step.decodes:
            first = self.opt["new_token_ratio"]
            self.ratio = max(
                first * MIN_RATIO_FACTOR, self.ratio - steps * first * (1 - MIN_RATIO_FACTOR) / RATIO_DECAY_STEPS
            )
        return super().advance(step, steps)

    def retire(self, seq: Sequence) -> None:
        super().retire(seq)
        self.batch_is_full = False

    def heeds_arrivals(self) -> bool:
        return not self.batch_is_full and super().heeds_arrivals()


class _PrefillAdder:
    """One batch of prompts, and what is left of the budgets while it is built."""

    def __init__(self, policy: SgLang, step: Step) -> None:
        self.policy, self.step = policy, step
        self.left_chunk = policy.limits.max_num_tokens
        self.left_input = policy.opt["max_prefill_tokens"]
        self.left_now = policy.free_tokens
        self.left_total = policy.free_tokens - policy.ratio * sum(
            min(s.output - policy.produced(s), CLIP_MAX_NEW_TOKENS) for s in policy.decodes
        )
        self.slots = policy.limits.max_batch_size - len(policy.decodes)

    def fill(self) -> None:
        policy = self.policy
        if policy.chunked:
            self._add(policy.chunked)
        while policy.waiting:
            if len(self.step.prefills) >= self.slots:
                policy.batch_is_full = True
                return
            seq = policy.waiting[0]
            if not self._fits(seq):
                policy.batch_is_full = True
                return
            if self.left_chunk <= 0 or self.left_input <= 0 or (self.step.prefills and seq.known >= self.left_input):
                return
            self._add(policy.waiting.popleft())
            if self.left_total <= 0 or self.left_now <= 0:
                policy.batch_is_full = True
                return

    def _add(self, seq: Sequence) -> None:
        tokens = min(seq.known - seq.context, self.left_chunk)
        self.policy.prefill(self.step, seq, tokens)
        whole = seq.context == seq.known
        self.policy.chunked = None if whole else seq
        taken = self.policy.paged(tokens)
        self.left_total -= taken + (min(seq.output - seq.produced, CLIP_MAX_NEW_TOKENS) if whole else 0)
        self.left_now -= taken
        self.left_input -= tokens
        self.left_chunk -= tokens

    def _fits(self, seq: Sequence) -> bool:
        if not self.policy.opt["ignore_eos"]:
            return self.policy.paged(seq.known) + min(seq.output - seq.produced, CLIP_MAX_NEW_TOKENS) < self.left_total
        if self.policy.paged(seq.known) > min(self.left_now, self.left_total):
            return False
        return self._lasts_to_the_end(seq)

    def _lasts_to_the_end(self, seq: Sequence) -> bool:
        """Follow all requests to their ends, the shortest first: no step may leave less than one free token for
        each.
        """
        policy = self.policy
        tick, states = policy.decodes.tick, []
        for s in policy.decodes:
            left = max(0, s.end_tick - tick)  # as in `produced`, which a call each would make slow
            states.append((left, s.prompt + s.output - left))
        states += [(s.output - s.produced, s.known) for s, _, _ in self.step.prefills]
        states.append((seq.output - seq.produced, seq.known))
        states.sort()
        free, freed = self.left_now - policy.paged(seq.known), 0
        for i, (left, held) in enumerate(states):
            running = len(states) - i
            if free + freed - left * running <= running:
                return False
            freed += held
        return True
