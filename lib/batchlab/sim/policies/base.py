"""What the policies share: the limits, the plan of an iteration, and the bookkeeping around a schedule.

A policy is one engine's scheduler, without its model. The core asks it for the next iteration (`schedule`), tells
it that the iteration ran (`advance`), and tells it of an end when the engine would notice (`retire`).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from batchlab.errors import UsageError
from batchlab.sim.state import DecodeSet, KvBlocks, Sequence

MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Limits:
    """The two limits of the study. What each means is the engine's: see the policies."""

    max_batch_size: int
    max_num_tokens: int


@dataclass(slots=True)
class Step:
    """One iteration. Every member of the policy's `decodes` generates a token in it when `decodes` is true."""

    prefills: list[tuple[Sequence, int, int]] = field(
        default_factory=list
    )  # (sequence, new tokens, tokens before them)
    decodes: bool = False
    group: int = 1  # iterations run on this plan before the scheduler is asked again
    preempted: int = 0
    swapped_blocks: int = 0  # moved between card and host before the iteration


class Policy(ABC):
    """Base of the policies. A subclass writes `schedule`, and changes what else its engine does differently."""

    versions: ClassVar[str] = ""  # the engine and versions whose scheduler this is
    options: ClassVar[dict[str, Any]] = {}  # option → default
    kernels: ClassVar[str] = "vllm"  # operator tables that fit the engine best
    block_size: ClassVar[int] = 16
    memory_fraction: ClassVar[float] = 0.9
    fraction_of: ClassVar[str] = "total"  # of the card; "free": of what weights and activations leave; "static"
    graph_sizes: ClassVar[tuple[int, ...]] = ()  # tokens for which kernels are recorded, ascending
    graphs_mixed: ClassVar[bool] = False  # iterations with prompts are padded to them too
    whole_prompts: bool = False  # a prompt longer than max_num_tokens cannot run
    reserves: bool = False  # blocks are reserved at admission, so none is counted later

    schedule_lag = 1  # an iteration is scheduled when the one this many before it has given its output
    finish_lag = 1  # an end is noticed by the schedule of the iteration this many after it
    keeps_ended = False  # ended sequences go on decoding until the end is noticed

    def __init__(self, limits: Limits, kv: KvBlocks, options: dict[str, Any]) -> None:
        self.limits = limits
        self.kv = kv
        self.opt = options
        self.waiting: deque[Sequence] = deque()
        self.decodes = DecodeSet(kv.block_size)
        self.joining: list[Sequence] = []  # their prefill ends in the planned iteration
        self.dropped: list[Sequence] = []  # with an error, by the last schedule
        self.draining = 0  # ended, unnoticed, no longer decoding

    # -- what the core calls ------------------------------------------------------------------------------------------

    def refusal(self, seq: Sequence) -> str | None:
        """Why a request could never run here, or None. It is asked before `add`."""
        if self.kv.of(seq.worst_case) > self.kv.total:
            return f"needs {self.kv.of(seq.worst_case)} KV blocks, the engine has {self.kv.total}"
        if self.whole_prompts and seq.prompt > self.limits.max_num_tokens:
            return f"prompt of {seq.prompt} tokens is over max_num_tokens {self.limits.max_num_tokens}"
        return None

    def add(self, seq: Sequence) -> None:
        """A request arrives."""
        self.waiting.append(seq)

    @abstractmethod
    def schedule(self) -> Step | None:
        """Plan the next iteration and take its memory; None when nothing can run."""

    def advance(self, step: Step, steps: int) -> list[Sequence]:
        """The planned iteration ran, `steps` times. Returns the sequences that got their last token."""
        ended = []
        if step.decodes:
            if not self.reserves:
                self.kv.used += self.decodes.blocks_needed(steps)
            ended = self.decodes.advance(steps)
            if not self.keeps_ended:
                for seq in ended:
                    self.decodes.remove(seq)
                self.draining += len(ended)
        for seq in self.joining:
            seq.produced += 1
            if seq.produced >= seq.output:
                ended.append(seq)
                self.draining += 1
            else:
                self.decodes.add(seq)
        self.joining.clear()
        return ended

    def retire(self, seq: Sequence) -> None:
        """The engine notices that `seq` has ended: its slot and its blocks are free."""
        if seq in self.decodes.members:
            self.decodes.remove(seq)
        else:
            self.draining -= 1
        if not self.reserves:
            self.kv.used -= self.kv.of(seq.context)

    def steady_steps(self, step: Step) -> int:
        """How often the planned iteration would be planned again if nothing arrived."""
        if step.prefills or step.preempted or step.swapped_blocks:
            return 1
        return min(self.decodes.steps_to_next_end(), self.decodes.steps_within(self.kv.free))

    def heeds_arrivals(self) -> bool:
        """Whether an arrival could change the next iteration. First come, first served: not while others wait."""
        return not self.waiting and self.holding < self.limits.max_batch_size

    @property
    def holding(self) -> int:
        """Requests that hold a slot."""
        return len(self.decodes) + len(self.joining) + self.draining

    @property
    def queue_length(self) -> int:
        """Requests that wait for a slot or for memory."""
        return len(self.waiting)

    def kv_use(self, step: Step, steps: int) -> np.ndarray:
        """Share of the blocks in use in each of the next `steps` iterations: float64 (steps,)."""
        if not step.decodes:
            return np.full(steps, self.kv.used / self.kv.total)
        return (self.kv.used + self.decodes.block_growth(steps)) / self.kv.total

    def padding(self, tokens: int, *, mixed: bool) -> int | None:
        """Tokens that an iteration is filled up with to the next size for which kernels are recorded; None where they
        are recorded for none as large, or not for iterations with prompts (`mixed`).
        """
        if not self.graph_sizes or tokens > self.graph_sizes[-1] or (mixed and not self.graphs_mixed):
            return None
        return self.graph_sizes[bisect_left(self.graph_sizes, tokens)] - tokens

    # -- what several policies do -------------------------------------------------------------------------------------

    def prefill(self, step: Step, seq: Sequence, tokens: int) -> None:
        """Plan `tokens` of a prompt and take their blocks."""
        self.kv.used += self.kv.of(seq.context + tokens) - self.kv.of(seq.context)
        self.plan_prefill(step, seq, tokens)

    def plan_prefill(self, step: Step, seq: Sequence, tokens: int) -> None:
        """Plan `tokens` of a prompt whose blocks are taken already."""
        step.prefills.append((seq, tokens, seq.context))
        seq.context += tokens
        if seq.context == seq.known:
            self.joining.append(seq)

    def preempt(self, step: Step, seq: Sequence) -> None:
        """Take a sequence's blocks; it waits in front and computes everything again. One that has ended unnoticed
        only loses them.
        """
        if seq in self.decodes.members:
            self.decodes.remove(seq)
        self.kv.used -= self.kv.of(seq.context)
        if seq.produced >= seq.output:
            seq.context = 0
            self.draining += 1
            return
        seq.forget_cache()
        step.preempted += 1
        self.waiting.appendleft(seq)

    def make_room(
        self,
        step: Step,
        need: Callable[[Sequence], int],
        last: Callable[[], Sequence],
        evict: Callable[[Sequence], None],
        steps: int = 1,
    ) -> None:
        """Go through the decoding sequences in order; while one lacks blocks, the last running one is evicted.

        `need` gives the blocks that must be free for a sequence's next step. Evicted ones are never before the one
        in hand, so what has been granted stays granted.
        """
        granted = 0
        for seq in list(self.decodes):
            if seq not in self.decodes.members:
                return
            wanted = need(seq)
            while wanted > self.kv.free - granted:
                victim = last()
                evict(victim)
                if victim is seq:
                    return
            granted += self.blocks_for_step(seq, steps)

    def blocks_for_step(self, seq: Sequence, steps: int = 1) -> int:
        """New blocks that a decoding sequence takes in its next `steps` iterations."""
        context = self.decodes.context_of(seq)
        return self.kv.of(context + steps) - self.kv.of(context)


def checked_options(engine: str, known: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """The policy's options with the given ones over the defaults; UsageError for an unknown one or one of a wrong
    type.
    """
    merged = dict(known)
    for key, value in (given or {}).items():
        if key not in known:
            raise UsageError(f"{engine}: unknown policy option '{key}'; there is: {', '.join(sorted(known)) or 'none'}")
        default = known[key]
        numbers = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, numbers) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise UsageError(f"{engine}: policy option '{key}' takes a {type(default).__name__}, got {value!r}")
        merged[key] = value
    return merged
