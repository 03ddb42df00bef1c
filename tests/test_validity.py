"""A cell that did not measure what it says is found out, with the reason."""

import dataclasses

import pytest

from batchlab import records, validity
from test_metrics import frame, iterations, request
from test_store import CELLS

CELL = dataclasses.replace(CELLS[0], max_batch_size=8, max_num_tokens=64)
NO_ITERATIONS = records.table([], records.ITERATIONS).to_pandas()


def good(index=0, **more):
    return request(
        index,
        engine_queued_s=0.1,
        engine_first_s=0.999,
        engine_last_s=1.999,
        prompt_tokens=5,
        cached_tokens=0,
        preemptions=0,
        count_source="usage",
        **more,
    )


RUN = iterations((0.0, 1.0, 8, 60, 4), (1.0, 2.0, 8, 0, 8))


def reasons(*rows, cell=CELL, run=RUN, client=None, traced=True):
    return validity.reasons(cell, frame(*rows), run, client or {"cpu_share_max": 0.2}, traced=traced)


def test_a_sound_cell_has_no_reason():
    assert reasons(good(0), good(1)) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (good(first=None, last=None, tokens=0, error="HTTP 500: x"), "1 of 2 requests failed: HTTP 500: x"),
        (
            good() | {"output_len": 12},
            "output length differs from the one asked for in 1 requests (requests 0: 11 instead of 12)",
        ),
        (
            good() | {"prompt_tokens": 6},
            "prompt length differs from the one sent in 1 requests (requests 0: 6 instead of 5)",
        ),
        (good() | {"cached_tokens": 16}, "prefix cache hit in 1 requests"),
        (good() | {"count_source": "chunks"}, "neither token ids nor usage"),
        (good() | {"sent_s": 0.5}, "the last request was sent 500 ms late"),
        (good() | {"sent_s": None}, "1 requests were never sent"),
        (good() | {"engine_last_s": None, "engine_first_s": None}, "the engine's trace lacks 1 requests"),
        (good() | {"last_s": 2.3}, "the client's mean TPOT is 130.00 ms, the engine's 100.00 ms"),
        (
            good() | {"last_s": 2.2, "first_s": 1.2},
            "the client saw last tokens 201 ms (p99) after the engine (limit 50 ms)",
        ),
        (good() | {"first_s": 0.99}, "the client saw a token 9.0 ms before the engine made it (limit 1 ms)"),
        (good() | {"last_s": 1.99}, "the client saw a token 9.0 ms before the engine made it (limit 1 ms)"),
    ],
)
def test_every_fault_of_a_request(row, expected):
    # TensorRT-LLM 10824 and TGI 1944 (stopped early), vllm 10847 (prompt lengths), 54227 (prefix cache), aiperf
    # 339 (token counts)
    found = reasons(row, good(1)) if "lacks" in expected or "1 of 2" in expected else reasons(row)
    assert any(expected in reason for reason in found), found


def test_a_batch_above_the_limit():
    assert any("reached 9, above the limit 8" in r for r in reasons(good(), run=iterations((0, 1, 9, 0, 9))))


def test_an_iteration_above_the_budget():
    assert any("65 tokens, above the limit 64" in r for r in reasons(good(), run=iterations((0, 1, 8, 60, 5))))


def test_limits_that_were_not_those_of_the_cell():
    other = RUN.assign(max_batch_size=4)
    assert any("limits were 4/64, not 8/64" in r for r in reasons(good(), run=other))


def test_an_engine_without_iterations():
    assert reasons(good(), run=NO_ITERATIONS) == ["the engine wrote no iteration"]
    assert reasons(good(), run=NO_ITERATIONS, traced=False) == []


def test_a_client_at_its_limit():
    assert any("busy 97%" in r for r in reasons(good(), client={"cpu_share_max": 0.97}))


def test_a_client_that_read_too_late_to_time_the_tokens():
    late = {"cpu_share_max": 0.2, "merged_share": 0.4, "receive_lag_p99_ms": 250.0}
    assert any("read 40% of the chunks too late" in r for r in reasons(good(), client=late))
    engine_merges = late | {"receive_lag_p99_ms": 0.3}
    assert reasons(good(), client=engine_merges) == []


def test_a_front_end_behind_its_engine_is_no_fault_of_a_client_that_reads_at_once():
    behind = good() | {"last_s": 2.3}
    slow = {"cpu_share_max": 0.2, "receive_lag_p99_ms": 40.0}
    assert any("the client's mean TPOT" in r for r in reasons(behind, client=slow))
    assert reasons(behind, client=slow | {"receive_lag_p99_ms": 0.6}) == []


def test_achieved_rate_below_the_asked_one():  # vllm 21104, guidellm 93
    cell = dataclasses.replace(CELL, request_rate=4.0)
    rows = [
        good(i, scheduled=i / 4, sent=i / 3, first=i + 1.0, last=i + 2.0)
        | {"engine_first_s": i + 0.999, "engine_last_s": i + 1.999}
        for i in range(12)
    ]
    found = reasons(*rows, cell=cell)
    assert any("arrivals took 3.7 s instead of 2.8 s" in r for r in found)
    assert any("sent late, p99" in r for r in found)
