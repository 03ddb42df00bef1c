"""The set of decoding sequences against the same set kept naively."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchlab.sim.state import DecodeSet, KvBlocks, Sequence

sequences = st.lists(st.tuples(st.integers(1, 50), st.integers(2, 30)), min_size=1, max_size=8)


def member(index: int, prompt: int, output: int) -> Sequence:
    seq = Sequence(index, prompt, output)
    seq.context, seq.produced = prompt, 1
    return seq


@given(sequences, st.integers(1, 16), st.lists(st.integers(1, 12), max_size=6))
@settings(deadline=None)
def test_steps_ends_and_blocks_are_those_of_one_step_at_a_time(lengths, block_size, runs):
    fast = DecodeSet(block_size)
    kv = KvBlocks(10_000, block_size)
    naive: dict[int, list[int]] = {}
    members = [member(i, *length) for i, length in enumerate(lengths)]
    for seq in members:
        fast.add(seq)
        naive[seq.index] = [seq.context, seq.output - 1]
    for steps in runs:
        needed = growth = 0
        grown = []
        ended = []
        for _ in range(steps):
            for index, (context, left) in naive.items():
                growth += kv.of(context + 1) - kv.of(context)
                naive[index] = [context + 1, left - 1]
                if left == 1:
                    ended.append(index)
            grown.append(growth)
        needed = growth
        assert fast.blocks_needed(steps) == needed
        np.testing.assert_array_equal(fast.block_growth(steps), grown)
        if naive:
            assert fast.steps_within(needed) >= steps
            assert needed == 0 or fast.steps_within(needed - 1) < steps
        assert [s.index for s in fast.advance(steps)] == ended
        assert fast.context_tokens == sum(context for context, _ in naive.values())
        assert fast.longest_context == max((context for context, _ in naive.values()), default=0)
        for index in ended:
            fast.remove(members[index])
            assert members[index].produced == members[index].output
            assert members[index].context == naive.pop(index)[0]
        assert fast.longest_context == max((context for context, _ in naive.values()), default=0)
    assert len(fast) == len(naive)


def test_a_member_that_left_and_came_back_ends_once():
    decodes = DecodeSet(4)
    seq = member(0, 5, 4)
    decodes.add(seq)
    assert decodes.advance(1) == []
    decodes.remove(seq)
    assert (seq.produced, seq.context, seq.spans) == (2, 6, [(0, 1)])
    decodes.add(seq)
    assert decodes.steps_to_next_end() == 2
    assert decodes.advance(2) == [seq]
    decodes.remove(seq)
    assert seq.spans == [(0, 1), (1, 3)]


def test_steps_after_the_end_count_as_context_only():
    decodes = DecodeSet(4)
    seq = member(0, 5, 2)
    decodes.add(seq)
    assert decodes.advance(1) == [seq]
    assert decodes.advance(3) == []
    decodes.remove(seq)
    assert (seq.produced, seq.context, seq.spans) == (2, 9, [(0, 1)])
