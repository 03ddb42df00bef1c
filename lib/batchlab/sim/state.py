"""What every policy keeps: sequences, KV blocks, and the set of sequences that decode.

A sequence's `context` is the number of tokens whose KV is stored. A prefill of all its known tokens yields one
token, whose own KV is stored by the next decode iteration; so a decoding sequence has `context = prompt + produced
- 1`.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import numpy as np


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside an engine. `produced` and `context` are exact while it is outside a `DecodeSet`."""

    index: int
    prompt: int
    output: int
    queued_s: float = 0.0
    produced: int = 0
    context: int = 0
    preemptions: int = 0
    error: str | None = None
    # Where its tokens came from, in order: (-1, iteration) for a prefill's end, (first, stop) for decode ticks.
    spans: list[tuple[int, int]] = field(default_factory=list)
    # kept by DecodeSet while the sequence is a member
    entry: int = 0
    offset: int = 0
    joined_tick: int = 0
    end_tick: int = 0

    @property
    def known(self) -> int:
        """Tokens to have in the cache before the next one can be sampled (more than the prompt after a
        recomputation).
        """
        return self.prompt + self.produced

    @property
    def worst_case(self) -> int:
        """Tokens of the whole request, as engines that reserve count them."""
        return self.prompt + self.output

    def forget_cache(self) -> None:
        """Its blocks were taken: everything must be computed again."""
        self.context = 0
        self.preemptions += 1


@dataclass(slots=True)
class KvBlocks:
    """The pool of KV blocks, counted and not placed."""

    total: int
    block_size: int
    used: int = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class DecodeSet:
    """Sequences that generate one token in each iteration, in the order in which they joined.

    A step costs no work per member: contexts are stored as offsets against a common tick, the ends lie in a heap,
    and the members that need a new block at a step are those of one phase. Leaving is explicit (`remove`): a policy
    may keep a finished member for a while, as engines do that notice an end one iteration late.
    """

    __slots__ = ("_ends", "_longest", "_offsets", "_phases", "_serial", "block_size", "members", "tick")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tick = 0
        self.members: dict[Sequence, None] = {}
        self._offsets = 0
        self._phases = [0] * block_size  # members by the tick, modulo the block size, at which they need a block
        self._ends: list[tuple[int, int, Sequence]] = []
        self._longest: list[tuple[int, int, Sequence]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    @property
    def context_tokens(self) -> int:
        """KV tokens stored for all members, before the coming step."""
        return self._offsets + len(self.members) * self.tick

    @property
    def longest_context(self) -> int:
        """KV tokens stored for the member that has the most, before the coming step; 0 without members."""
        while self._longest and not self._is_current(self._longest[0]):
            heapq.heappop(self._longest)
        return self.tick - self._longest[0][0] if self._longest else 0

    def add(self, seq: Sequence) -> None:
        self._serial += 1
        seq.entry = self._serial
        seq.offset = seq.context - self.tick
        seq.joined_tick = self.tick
        seq.end_tick = self.tick + seq.output - seq.produced
        self.members[seq] = None
        self._offsets += seq.offset
        self._phases[-seq.offset % self.block_size] += 1
        heapq.heappush(self._ends, (seq.end_tick, seq.entry, seq))
        heapq.heappush(self._longest, (-seq.offset, seq.entry, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a member out; its `context` and `produced` are exact again (steps after its end count as context
        only).
        """
        del self.members[seq]
        stop = min(self.tick, seq.end_tick)
        if stop > seq.joined_tick:
            seq.spans.append((seq.joined_tick, stop))
        self._offsets -= seq.offset
        self._phases[-seq.offset % self.block_size] -= 1
        seq.context = seq.offset + self.tick
        seq.produced = min(seq.output, seq.output - (seq.end_tick - self.tick))

    def last(self) -> Sequence:
        return next(reversed(self.members))

    def context_of(self, seq: Sequence) -> int:
        return seq.offset + self.tick

    def steps_to_next_end(self) -> int:
        """Steps until the next member has all its tokens; a large number when none will."""
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.tick if self._ends else 1 << 40

    def advance(self, steps: int) -> list[Sequence]:
        """Run `steps` iterations; returns the members that got their last token, in order of their ends."""
        self.tick += steps
        ended = []
        while self._ends and self._ends[0][0] <= self.tick:
            top = heapq.heappop(self._ends)
            if self._is_current(top):
                ended.append(top[2])
        return ended

    def _is_current(self, end: tuple[int, int, Sequence]) -> bool:
        """Whether an entry of a heap is of a member, and not of an earlier membership of it."""
        return end[2] in self.members and end[1] == end[2].entry

    def _next_phases(self, steps: int) -> list[int]:
        """New blocks in each of the next `steps` iterations, at most a block's worth of them."""
        start = self.tick % self.block_size
        ahead = self._phases[start : start + steps]
        return ahead + self._phases[: steps - len(ahead)]

    def blocks_needed(self, steps: int) -> int:
        """New blocks that the next `steps` iterations take."""
        if steps == 1:
            return self._phases[self.tick % self.block_size]
        rounds, rest = divmod(steps, self.block_size)
        return rounds * len(self.members) + sum(self._next_phases(rest))

    def block_growth(self, steps: int) -> np.ndarray:
        """Blocks taken after each of the next `steps` iterations, cumulative: int64 (steps,)."""
        period = np.array(self._next_phases(min(steps, self.block_size)), dtype=np.int64)
        if steps > self.block_size:
            period = np.tile(period, -(-steps // self.block_size))[:steps]
        return period.cumsum()

    def steps_within(self, free: int) -> int:
        """The most iterations whose new blocks fit into `free`; a large number when there is no member."""
        if not self.members:
            return 1 << 40
        rounds, left = divmod(free, len(self.members))
        taken = accumulate(self._next_phases(self.block_size))
        return rounds * self.block_size + sum(1 for _ in takewhile(lambda blocks: blocks <= left, taken))
