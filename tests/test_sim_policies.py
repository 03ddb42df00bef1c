"""TensorRT-LLM, TGI, SGLang and static batching on cases that a hand can follow: who runs in which iteration, with
how much.
"""

import pytest

from batchlab.errors import UsageError
from batchlab.sim.policies import POLICIES, Limits, Policy
from batchlab.sim.state import KvBlocks
from sim_driver import decisions, run


def test_tensorrt_llm_fuses_generation_and_whole_prompts():
    assert run("tensorrt-llm", [(0, 10, 3), (0, 10, 3), (0, 10, 3)], batch=4, tokens=16) == [
        {0: 10},
        {0: 1, 1: 10},
        {0: 1, 1: 1, 2: 10},
        {1: 1, 2: 1},
        {2: 1},
    ]


def test_tensorrt_llm_max_num_tokens_caps_the_batch():
    """Claim 24 in small: with 16 tokens and prompts of 10, a prompt fits only beside 6 generating requests."""
    log = run("tensorrt-llm", [(0, 10, 12)] * 12, batch=12, tokens=16)
    assert max(len(tokens) for tokens in log) == 7
    assert max(len(tokens) for tokens in run("tensorrt-llm", [(0, 10, 12)] * 12, batch=12, tokens=160)) == 12


def test_tensorrt_llm_cuts_prompts_at_blocks_when_chunking():
    assert run(
        "tensorrt-llm", [(0, 32, 3), (0, 32, 3)], batch=4, tokens=50, block_size=16, enable_chunked_context=True
    ) == [{0: 32, 1: 16}, {0: 1, 1: 16}, {0: 1, 1: 1}, {1: 1}]


def test_tensorrt_llm_no_evict_reserves_the_whole_request_and_keeps_the_order():
    log = decisions("tensorrt-llm", [(0, 16, 20), (0, 16, 20), (0, 8, 4)], batch=4, tokens=64, blocks=5, block_size=16)
    assert all(not d.preempted for d in log)
    # three of five blocks are promised to request 0: request 1 waits for it, and 2 behind 1 although it would fit
    assert [d.tokens for d in log[:21]] == [{0: 16}, *[{0: 1}] * 19, {1: 16, 2: 8}]


def test_tensorrt_llm_max_utilization_pauses_the_last():
    log = decisions(
        "tensorrt-llm",
        [(0, 16, 6), (0, 16, 6)],
        batch=4,
        tokens=64,
        blocks=3,
        block_size=16,
        capacity_scheduler_policy="MAX_UTILIZATION",
    )
    assert log[0].tokens == {0: 16, 1: 16}
    assert (log[1].tokens, log[1].preempted) == ({0: 1}, [1])
    assert log[6].tokens == {1: 17}


def test_tensorrt_llm_overlap_frees_a_slot_one_iteration_later():
    requests = [(0, 10, 2), (0, 10, 2)]
    assert run("tensorrt-llm", requests, batch=1, tokens=32) == [{0: 10}, {0: 1}, {1: 10}, {1: 1}]
    assert run("tensorrt-llm", [(0, 10, 2), (0, 10, 5), (0, 10, 2)], batch=2, tokens=64, overlap_scheduler=True)[
        :4
    ] == [
        {0: 10, 1: 10},
        {0: 1, 1: 1},
        {1: 1},
        {1: 1, 2: 10},
    ]


def test_tgi_takes_a_batch_then_pauses_generation_for_the_next():
    assert run(
        "tgi", [(0, 10, 6), (0, 10, 3), (0, 10, 3), (1, 5, 2)], batch=8, tokens=20, waiting_served_ratio=0.0
    ) == [
        {0: 10, 1: 10},
        {2: 10, 3: 5},
        {0: 1, 1: 1, 2: 1, 3: 1},
        {0: 1, 1: 1, 2: 1},
        {0: 1},
        {0: 1},
        {0: 1},
    ]


def test_tgi_lets_a_small_batch_wait_until_max_waiting_tokens():
    log = run(
        "tgi",
        [(0, 10, 9), (0, 10, 9), (0, 10, 9), (1, 5, 2)],
        batch=8,
        tokens=30,
        waiting_served_ratio=1.2,
        max_waiting_tokens=4,
    )
    assert log[:5] == [{0: 10, 1: 10, 2: 10}, *[{0: 1, 1: 1, 2: 1}] * 3, {3: 5}]


def test_tgi_reserves_all_tokens_and_stops_at_the_head_of_the_line():
    log = run("tgi", [(0, 10, 5), (0, 70, 5), (0, 4, 5)], batch=8, tokens=100, blocks=80)
    assert log[0] == {0: 10}  # 15 of 80 are reserved; request 1 wants 75, and request 2 waits behind it
    assert log[5] == {1: 70}
    assert {2: 4} in log[6:]


def test_tgi_chunks_prompts_beside_generation_and_heeds_no_batch_size():
    """8 tokens an iteration: the second prompt is cut, its rest goes first; three run although the limit is 1."""
    plans = run("tgi", [(0, 6, 4), (0, 6, 3), (1, 3, 2)], batch=1, tokens=8, prefill_chunking=True)
    assert plans == [{0: 6, 1: 2}, {0: 1, 1: 4, 2: 3}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}]


def test_tgi_chunking_still_reserves_all_tokens():
    plans = run("tgi", [(0, 6, 2), (0, 6, 2)], batch=9, tokens=64, blocks=12, prefill_chunking=True)
    assert plans == [{0: 6}, {0: 1}, {1: 6}, {1: 1}]
    whole = run("tgi", [(0, 20, 2)], batch=1, tokens=8, prefill_chunking=True)
    assert whole == [{0: 8}, {0: 8}, {0: 4}, {0: 1}]


def test_sglang_runs_prompts_first_in_chunks():
    assert run("sglang", [(0, 10, 4), (0, 30, 3), (2, 5, 2)], batch=8, tokens=16, overlap_schedule=False) == [
        {0: 10, 1: 6},
        {1: 16},
        {1: 8, 2: 5},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 1: 1},
        {0: 1},
    ]


def test_sglang_overlap_decodes_once_more_than_it_must():
    assert run("sglang", [(0, 10, 2), (0, 10, 3)], batch=8, tokens=64) == [{0: 10, 1: 10}, *[{0: 1, 1: 1}] * 2, {1: 1}]


def test_sglang_with_known_lengths_never_runs_out():
    log = decisions("sglang", [(0, 40, 30)] * 3 + [(0, 5, 2)], batch=8, tokens=256, blocks=170, overlap_schedule=False)
    assert all(not d.preempted for d in log)


def test_sglang_retracts_those_with_the_fewest_tokens_to_the_end_of_the_queue():
    requests = [(0, 5, 2), (0, 40, 60), (0, 40, 60), (3, 40, 60), (3, 30, 5)]
    log = decisions(
        "sglang",
        requests,
        batch=4,
        tokens=256,
        blocks=220,
        overlap_schedule=False,
        ignore_eos=False,
        new_token_ratio=0.1,
    )
    retraction = next(d for d in log if d.preempted)
    assert retraction.preempted == [3]  # it came last and has the fewest tokens
    assert all(sum(d.tokens.get(i, 0) for d in log) >= p + o - 1 for i, (_, p, o) in enumerate(requests))


def test_static_batching_waits_for_the_longest():
    assert run("static", [(0, 10, 2), (0, 10, 4), (0, 10, 2)], batch=2, tokens=64) == [
        {0: 10, 1: 10},
        *[{0: 1, 1: 1}] * 3,
        {2: 10},
        {2: 1},
    ]


def test_static_batching_prefills_in_pieces_of_whole_prompts():
    assert run("static", [(0, 10, 2)] * 3, batch=3, tokens=25) == [{0: 10, 1: 10}, {2: 10}, {0: 1, 1: 1, 2: 1}]


def test_iterations_are_padded_to_the_sizes_that_kernels_are_recorded_for():
    def padding(engine, tokens, mixed=False):
        kind = POLICIES[engine]
        return kind(Limits(512, 2048), KvBlocks(100, 16), dict(kind.options)).padding(tokens, mixed=mixed)

    assert [padding("vllm-v1", n) for n in (1, 3, 4, 9, 16, 250, 257, 512, 513)] == [0, 1, 0, 7, 0, 6, 15, 0, None]
    assert (padding("vllm-v1", 140, mixed=True), padding("vllm-v0", 140, mixed=True)) == (4, None)
    assert [padding("vllm-v0", n) for n in (5, 256, 257)] == [3, 0, None]
    assert [padding("tgi", n) for n in (17, 33)] == [15, None] and padding("tensorrt-llm", 9) is None


def test_a_policy_without_a_schedule_cannot_be_made():
    class Idle(Policy):
        pass

    with pytest.raises(TypeError, match="schedule"):
        Idle(Limits(1, 1), KvBlocks(1, 1), {})


@pytest.mark.parametrize("engine", ["tensorrt-llm", "vllm-v1"])
def test_an_unknown_option_lists_what_there_is(engine):
    with pytest.raises(UsageError, match=r"unknown policy option 'colour'; there is: "):
        decisions(engine, [(0, 4, 4)], batch=4, tokens=64, colour="red")


@pytest.mark.parametrize("value", ["yes", 1])
def test_an_option_of_a_wrong_type(value):
    with pytest.raises(UsageError, match="overlap_scheduler' takes a bool"):
        decisions("tensorrt-llm", [(0, 4, 4)], batch=4, tokens=64, overlap_scheduler=value)


def test_an_unknown_capacity_policy():
    with pytest.raises(UsageError, match="GUARANTEED_NO_EVICT, MAX_UTILIZATION"):
        decisions("tensorrt-llm", [(0, 4, 4)], batch=4, tokens=64, capacity_scheduler_policy="STATIC_BATCH")
