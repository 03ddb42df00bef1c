"""Time: pipelines, arrivals, closed loops, and the runs of iterations that are worked in one go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchlab import records
from batchlab.sim import POLICIES, HostOverheads, simulate
from batchlab.sim.host import LaunchTrace
from batchlab.sim.policies.base import Policy
from sim_driver import HandTimes

LIMITS = {"max_batch_size": 8, "max_num_tokens": 64}


def one(engine, requests, *, times=None, batch=8, tokens=64, blocks=1000, **more):
    options = more.pop("options", None)
    return simulate(
        engine,
        "a100_sxm",
        "llama-3-8b",
        requests,
        max_batch_size=batch,
        max_num_tokens=tokens,
        step_times=times or HandTimes(),
        memory={"kv_blocks": blocks, "block_size": 16},
        policy_options=options,
        **more,
    )


def seconds(result, *columns):
    return [tuple(round(row[c], 6) for c in columns) for row in result.rows]


def test_times_of_a_request_are_those_of_its_iterations():
    result = one("vllm-v1", [(0.0, 10, 3)], options={"async_scheduling": False})
    assert seconds(result, "engine_queued_s", "first_s", "last_s") == [(0, 1, 3)]
    assert result.iterations["output_s"].to_pylist() == [1, 2, 3]
    assert result.iterations["scheduled_s"].to_pylist() == [0, 1, 2]
    assert (result.rows[0]["tokens"], result.rows[0]["first_tokens"], result.rows[0]["chunks"]) == (3, 1, 3)


def test_asynchronous_scheduling_plans_an_iteration_while_the_last_one_runs():
    result = one("vllm-v1", [(0.0, 10, 5)])
    assert result.iterations["scheduled_s"].to_pylist() == [0, 0, 1, 2, 3]
    assert result.iterations["output_s"].to_pylist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("asynchronous", "first_s"), [(False, 4.0), (True, 5.0)])
def test_an_arrival_joins_the_next_plan(asynchronous, first_s):
    """It comes during the third iteration: the plan made at its end, or one iteration later when that is already
    made.
    """
    result = one("vllm-v1", [(0.0, 10, 50), (2.5, 10, 2)], options={"async_scheduling": asynchronous})
    assert result.rows[1]["first_s"] == first_s


def test_an_idle_engine_starts_at_the_arrival():
    result = one("vllm-v1", [(0.0, 10, 2), (10.25, 10, 2)])
    assert seconds(result, "first_s", "last_s") == [(1, 2), (11.25, 12.25)]


def test_a_full_batch_makes_arrivals_wait_and_counts_them():
    result = one("vllm-v1", [(0.0, 10, 6), (1.5, 10, 2), (2.5, 10, 2)], batch=1, options={"async_scheduling": False})
    assert result.iterations["waiting"].to_pylist() == [0, 0, 1, 2, 2, 2, 1, 1, 0, 0]
    assert seconds(result, "first_s") == [(1,), (7,), (9,)]


def test_a_closed_loop_sends_when_one_ends():
    result = one("vllm-v1", [(9.0, 10, 3)] * 5, concurrency=2, options={"async_scheduling": False})
    assert seconds(result, "scheduled_s", "first_s", "last_s") == [
        (0, 1, 3),
        (0, 1, 3),
        (3, 4, 6),
        (3, 4, 6),
        (6, 7, 9),
    ]
    assert max(result.iterations["admitted"].to_pylist()) == 2


def test_host_overheads_a_step_a_token_and_a_request():
    host = HostOverheads(step_us=1e5, token_us=1e4, request_us=2e5)
    result = one("vllm-v1", [(0.0, 10, 3), (0.0, 10, 3)], host=host, options={"async_scheduling": False})
    assert seconds(result, "engine_queued_s") == [(0.2,), (0.4,)]
    # the first iteration holds request 0 only and samples one token; the second samples two
    assert np.allclose(result.iterations["output_s"].to_numpy()[:2], [0.2 + 1.11, 0.2 + 1.11 + 1.12])
    assert result.provenance["host_overheads"]["fitted"]
    assert not one("vllm-v1", [(0.0, 10, 3)]).provenance["host_overheads"]["fitted"]


def test_a_large_iteration_with_prompts_holds_back_the_output_before_it():
    """vLLM plans ahead: while it launches the second request's prompt (32 layers of 0.1 s), it reads nothing."""
    host = HostOverheads(eager_us=1e5)
    result = one("vllm-v1", [(0.0, 10, 6), (1.5, 513, 2)], host=host, tokens=1024)
    # planned at 2 (when iteration 1 is read), launched at 5.2; iterations 2 and 3 end at 3 and 5.2, are read at 5.2
    assert np.allclose(result.iterations["scheduled_s"].to_numpy()[:5], [0, 0, 1, 2, 5.2])
    assert np.allclose(result.iterations["output_s"].to_numpy()[:5], [1, 2, 5.2, 5.2, 6.2])
    assert np.allclose([row["first_s"] for row in result.rows], [1, 5.2])
    recorded = one("vllm-v1", [(0.0, 10, 6), (1.5, 500, 2)], host=host, tokens=1024)
    assert np.allclose(recorded.iterations["output_s"].to_numpy()[:5], [1, 2, 3, 4, 5])


def test_a_launch_runs_beside_the_card_until_it_takes_longer():
    requests = [(0.0, 10, 6)]
    for launch_s, ends in ((0.25, [1.25, 2.25, 3.25, 4.25]), (1.5, [3, 4.5, 6, 7.5])):
        result = one("vllm-v1", requests, host=HostOverheads(launch_us=launch_s * 1e6))
        assert np.allclose(result.iterations["output_s"].to_numpy()[:4], ends), launch_s
    waits = one("vllm-v1", requests, host=HostOverheads(launch_us=0.25e6), options={"async_scheduling": False})
    assert np.allclose(np.diff(waits.iterations["output_s"].to_numpy()), 1.25)


def test_a_closed_loop_follows_an_output_when_it_is_read():
    """Request 0 ends in an iteration whose output waits for the launch of a prompt."""
    host = HostOverheads(eager_us=1e5)
    result = one("vllm-v1", [(0.0, 10, 3), (0.0, 513, 2), (0.0, 10, 2)], host=host, tokens=1024, concurrency=2)
    sent = {row["index"]: row["scheduled_s"] for row in result.rows}
    assert sent[2] == min(row["last_s"] for row in result.rows if row["index"] < 2)


def test_prompts_that_no_kernels_are_recorded_for_cost_the_card_more():
    host = HostOverheads(prompt_us=3e5)
    for prompt, expected in ((513, [1.3, 2.3, 3.3]), (512, [1, 2, 3])):
        result = one("vllm-v1", [(0.0, prompt, 3)], host=host, tokens=1024, options={"async_scheduling": False})
        assert np.allclose(result.iterations["output_s"].to_numpy(), expected)


def test_messages_take_their_time_each_way():
    host = HostOverheads(message_us=2e5)
    result = one("vllm-v1", [(0.0, 10, 2)] * 3, host=host, concurrency=2, options={"async_scheduling": False})
    assert (
        seconds(result, "scheduled_s", "engine_queued_s", "engine_first_s", "first_s", "last_s")[:2]
        == [(0, 0.2, 1.2, 1.4, 2.4)] * 2
    )
    assert seconds(result, "scheduled_s", "engine_queued_s")[2] == (2.4, 2.6)


def test_swapping_takes_its_time():
    options = {"preemption_mode": "swap", "watermark": 0.0, "async_output_proc": False}
    without = one("vllm-v0", [(0.0, 16, 9)] * 2, blocks=4, options=options)
    with_swap = one("vllm-v0", [(0.0, 16, 9)] * 2, blocks=4, options=options, times=HandTimes(swap=0.01))
    moved_blocks = 2 * 2  # two blocks of request 1, out and in
    assert with_swap.duration_s - without.duration_s == pytest.approx(moved_blocks * 16 * 0.01)


def test_multi_step_plans_a_group_at_its_first_iteration():
    result = one("vllm-v0", [(0.0, 10, 9), (2.5, 10, 2)], options={"num_scheduler_steps": 4})
    assert result.iterations["scheduled_s"].to_pylist()[:7] == [0, 1, 1, 1, 1, 5, 6]
    assert result.rows[1]["first_s"] == 6


def test_multi_step_pays_for_a_scheduling_once_a_group():
    host = HostOverheads(step_us=5e5)
    result = one("vllm-v0", [(0.0, 10, 9)], options={"num_scheduler_steps": 4}, host=host)
    assert np.diff(result.iterations["output_s"].to_numpy()).tolist() == [1.5, 1, 1, 1, 1.5, 1, 1, 1]
    every = one("vllm-v0", [(0.0, 10, 9)], options={"async_output_proc": False}, host=host)
    assert np.diff(every.iterations["output_s"].to_numpy()).tolist() == [1.5] * 8


def test_gaps_between_tokens():
    result = one(
        "vllm-v1", [(0.0, 10, 4), (1.5, 30, 2)], times=HandTimes(token=0.1), options={"async_scheduling": False}
    )
    row = result.rows[0]
    # ends 2.0, then 3.1, then with the prompt of request 1 beside it 7.2, then two decode
    assert (row["first_s"], row["last_s"]) == (pytest.approx(2.0), pytest.approx(8.4))
    assert row["itl_max_ms"] == pytest.approx(4100)
    assert row["itl_p50_ms"] == pytest.approx(1200)


def test_chunks_are_written_when_asked_for():
    result = one("vllm-v1", [(0.0, 10, 4)], keep_chunks=True)
    assert result.rows[0]["chunk_us"] == [0, 1_000_000, 2_000_000, 3_000_000]
    assert result.rows[0]["chunk_tokens"] == [1, 1, 1, 1]
    assert one("vllm-v1", [(0.0, 10, 4)]).rows[0]["chunk_us"] is None


def test_a_request_that_can_never_run_is_refused_and_the_rest_goes_on():
    result = one("vllm-v1", [(0.0, 10, 3), (0.0, 200, 100), (0.0, 10, 3)], blocks=12)
    assert result.rows[1]["error"] == "needs 19 KV blocks, the engine has 11"
    assert (result.rows[1]["first_s"], result.rows[1]["tokens"]) == (None, 0)
    assert [row["error"] for row in result.rows if row["index"] != 1] == [None, None]
    long = one("tensorrt-llm", [(0.0, 100, 3), (0.0, 10, 3)])
    assert long.rows[0]["error"] == "prompt of 100 tokens is over max_num_tokens 64"
    assert long.rows[1]["tokens"] == 3


workloads = st.lists(
    st.tuples(st.floats(0, 30, allow_nan=False), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12
)
engines = st.sampled_from(
    [
        ("vllm-v1", {}),
        ("vllm-v1", {"async_scheduling": False}),
        ("vllm-v0", {}),
        ("vllm-v0", {"num_scheduler_steps": 3}),
        ("vllm-v0", {"preemption_mode": "swap", "async_output_proc": False}),
        ("tensorrt-llm", {}),
        ("tensorrt-llm", {"capacity_scheduler_policy": "MAX_UTILIZATION", "enable_chunked_context": True}),
        ("tensorrt-llm", {"overlap_scheduler": True}),
        ("tgi", {}),
        ("sglang", {}),
        ("sglang", {"ignore_eos": False, "new_token_ratio": 0.2}),
        ("static", {}),
    ]
)


class StepByStep:
    """Makes every policy plan each iteration anew."""

    def __enter__(self):
        self.kept = {kind: kind.steady_steps for kind in [*POLICIES.values(), Policy]}
        for kind in self.kept:
            kind.steady_steps = lambda self, step: 1

    def __exit__(self, *_):
        for kind, method in self.kept.items():
            kind.steady_steps = method


@given(engines, workloads, st.integers(1, 8), st.integers(8, 40), st.sampled_from([None, None, 3]))
@settings(deadline=None, max_examples=250)
def test_runs_in_one_go_equal_single_iterations(engine, requests, batch, blocks, concurrency):
    """And whatever happens: exact token counts, memory and limits obeyed, times in order, schema kept."""
    name, options = engine
    # no round numbers: an iteration that ends just when a request arrives could be rounded to either side
    times = HandTimes(base=0.7071067811, token=0.0101730221, context=0.0010191137, swap=0.0010038719)
    arguments = {
        "times": times,
        "batch": batch,
        "tokens": 128,
        "blocks": blocks,
        "options": options,
        "concurrency": concurrency,
    }
    result = one(name, requests, **arguments)
    with StepByStep():
        single = one(name, requests, **arguments)
    assert len(result.rows) == len(requests)
    for a, b in zip(result.rows, single.rows, strict=True):
        assert a["error"] == b["error"]
        assert (a["tokens"], a["preemptions"]) == (b["tokens"], b["preemptions"])
        for key in ("engine_queued_s", "first_s", "last_s", "itl_p50_ms", "itl_max_ms"):
            assert (a[key] is None) == (b[key] is None), key
            assert a[key] is None or a[key] == pytest.approx(b[key], rel=1e-9, abs=1e-9), key
    assert result.iterations.num_rows == single.iterations.num_rows
    for column in records.ITERATIONS.names:
        np.testing.assert_allclose(
            result.iterations[column].to_numpy(), single.iterations[column].to_numpy(), rtol=1e-6, atol=1e-9
        )

    assert result.requests.schema == records.REQUESTS
    its = result.iterations.to_pandas()
    assert (its.running <= batch).all()
    assert (its.prefill_tokens + its.decode_tokens <= 128).all()
    assert (its.kv_use <= 1 + 1e-6).all()
    assert (its.output_s.diff().dropna() > 0).all() and (its.scheduled_s <= its.output_s).all()
    for row, (_, prompt, output) in zip(result.rows, requests, strict=True):
        if row["error"] is None:
            assert (row["tokens"], row["prompt_tokens"]) == (output, prompt)
            assert row["scheduled_s"] <= row["first_s"] <= row["last_s"]


@pytest.mark.parametrize("engine", POLICIES)
def test_equal_arguments_give_equal_results(engine):
    requests = [(0.3 * i, 5 + 7 * i % 50, 1 + 11 * i % 30) for i in range(30)]
    a, b = (one(engine, requests, times=HandTimes(token=0.01)) for _ in range(2))
    assert a.rows == b.rows and a.iterations.equals(b.iterations) and a.provenance == b.provenance


def test_an_idle_engine_takes_in_what_comes_right_behind():
    requests, host = [(0.0, 10, 3)] * 4, HostOverheads(request_us=200, message_us=1000, gather_us=500)
    result = one("vllm-v1", requests, host=host)
    prompts = [n for n in result.iterations["prefill_tokens"].to_pylist() if n]
    assert prompts == [30, 10]  # those of 1.2, 1.4 and 1.6 ms; then the fourth
    assert result.iterations["scheduled_s"][0].as_py() == pytest.approx(1.6e-3)
    alone = one("vllm-v1", requests[:1], host=host)
    assert alone.iterations["scheduled_s"][0].as_py() == pytest.approx(1.2e-3)  # nobody is waited for


def test_launches_of_a_run_stand_in_place_of_the_constants():
    """By hand: a decode takes 10 ms of the card, its launch 4 ms until t = 1 s and 25 ms after; then the host sets the
    pace, and each output is read when the next launch is done. A request is served before, and one after.
    """
    graph = np.array([[i / 10, 4_000.0 if i < 10 else 25_000.0] for i in range(20)])
    trace = LaunchTrace(np.empty((0, 2)), np.empty((0, 2)), graph)
    call = {"max_batch_size": 4, "max_num_tokens": 64, "step_times": HandTimes(base=0.01), "launches": trace}
    result = simulate("vllm-v1", "h200_sxm", "llama-3-8b", [(0.0, 8, 50), (1.5, 8, 50)], **call)
    outputs = result.iterations["output_s"].to_numpy()
    gaps = np.diff(outputs)
    assert len(gaps) == 99 and gaps[3:48] == pytest.approx(0.01) and gaps[53:-1] == pytest.approx(0.025)
