"""vLLM's policies: V1 against what vLLM's own scheduler decided, V0 by hand."""

import json
from pathlib import Path

import pytest

from batchlab.errors import UsageError
from sim_driver import decisions, run

RECORDED = Path(__file__).parent / "data" / "sim"
CASES = {case["name"]: case for case in json.loads((RECORDED / "vllm_cases.json").read_text())}
# written by benchmarks/simulator/vllm_schedule.py with vLLM 0.32.0
VLLM = json.loads((RECORDED / "vllm_decisions.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_v1_decides_what_vllm_decided(name):
    case = CASES[name]
    ours = decisions(
        "vllm-v1",
        [tuple(request) for request in case["requests"]],
        batch=case["max_num_seqs"],
        tokens=case["max_num_batched_tokens"],
        blocks=case["num_blocks"],
        async_scheduling=case["async_scheduling"],
    )
    theirs = VLLM["decisions"][name]
    assert [d.tokens for d in ours] == [{request: n for request, n in tokens} for tokens, _ in theirs]
    assert [d.preempted for d in ours] == [preempted for _, preempted in theirs]


def test_the_recorded_cases_hold_what_they_are_for():
    iterations = [it for log in VLLM["decisions"].values() for it in log]
    assert len(iterations) > 1000
    assert sum(len(preempted) for _, preempted in iterations) >= 15
    assert any(case["async_scheduling"] for case in CASES.values())


def test_v1_cuts_the_prompt_that_meets_the_budget():
    assert run("vllm-v1", [(0, 10, 3), (0, 10, 3), (0, 10, 3)], batch=2, tokens=16, async_scheduling=False) == [
        {0: 10, 1: 6},
        {0: 1, 1: 4},
        {0: 1, 1: 1},
        {1: 1, 2: 10},
        {2: 1},
        {2: 1},
    ]


def test_v1_asynchronous_scheduling_fills_a_slot_one_iteration_later():
    assert run("vllm-v1", [(0, 10, 3), (0, 10, 3), (0, 10, 3)], batch=2, tokens=16)[3:5] == [{1: 1}, {2: 10}]


def test_v1_needs_tokens_for_a_full_batch():
    with pytest.raises(UsageError, match="max_num_tokens 8 is below max_batch_size 16"):
        decisions("vllm-v1", [(0, 4, 4)], batch=16, tokens=8)


def test_v0_runs_prompts_first_and_whole():
    assert run("vllm-v0", [(0, 10, 3), (0, 10, 3), (2, 10, 3)], batch=4, tokens=16, async_output_proc=False) == [
        {0: 10},
        {1: 10},
        {2: 10},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 1: 1, 2: 1},
    ]


def test_v0_asynchronous_output_decodes_once_more_than_it_must():
    assert run("vllm-v0", [(0, 10, 3)], batch=4, tokens=16) == [{0: 10}, {0: 1}, {0: 1}, {0: 1}]


def test_v0_multi_step_runs_on_past_an_end_and_lets_arrivals_wait():
    log = run("vllm-v0", [(0, 10, 6), (0, 10, 3), (2, 10, 3)], batch=4, tokens=32, num_scheduler_steps=4)
    assert log == [
        {0: 10, 1: 10},
        *[{0: 1, 1: 1}] * 4,  # request 1 has its last token after two of these
        {2: 10},
        *[{0: 1, 2: 1}] * 4,
    ]


def test_v0_preempts_the_last_and_computes_it_again():
    log = decisions(
        "vllm-v0", [(0, 16, 9), (0, 16, 9)], batch=4, tokens=64, blocks=5, watermark=0.0, async_output_proc=False
    )
    # four blocks are held after the first decode iteration; a fifth is free, as each sequence wants one: no preemption
    assert all(not d.preempted for d in log)
    log = decisions(
        "vllm-v0", [(0, 16, 9), (0, 16, 9)], batch=4, tokens=64, blocks=4, watermark=0.0, async_output_proc=False
    )
    assert log[1].tokens == {0: 1, 1: 1}
    assert (log[2].tokens, log[2].preempted) == ({0: 1}, [1])
    assert log[3].tokens == {1: 18}  # 16 of the prompt and the two tokens it had


def test_v0_swaps_out_and_in_without_computing_again():
    log = decisions(
        "vllm-v0",
        [(0, 16, 9), (0, 16, 9)],
        batch=4,
        tokens=64,
        blocks=4,
        watermark=0.0,
        async_output_proc=False,
        preemption_mode="swap",
    )
    assert log[2].preempted == [1]
    assert sum(d.tokens.get(1, 0) for d in log) == 16 + 8
    assert log[-1].tokens == {1: 1}


def test_v0_admits_no_prompt_while_one_is_swapped_out():
    log = run(
        "vllm-v0",
        [(0, 16, 9), (0, 16, 9), (3, 4, 2)],
        batch=4,
        tokens=64,
        blocks=4,
        watermark=0.0,
        async_output_proc=False,
        preemption_mode="swap",
    )
    first = next(i for i, tokens in enumerate(log) if 2 in tokens)
    assert 1 in log[first - 1] or 1 in log[first]


@pytest.mark.parametrize("option", [{"preemption_mode": "drop"}, {"num_scheduler_steps": 0}])
def test_v0_options_out_of_range(option):
    with pytest.raises(UsageError, match=next(iter(option))):
        decisions("vllm-v0", [(0, 4, 4)], batch=4, tokens=64, **option)
