"""The definitions, on requests small enough to work out by hand, and as properties of any requests."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchlab import metrics, records

NO_ITERATIONS = records.table([], records.ITERATIONS).to_pandas()


def request(index=0, scheduled=0.0, sent=0.0, first=1.0, last=2.0, tokens=11, k=1, **more):
    row = {
        "index": index,
        "input_len": 5,
        "output_len": tokens,
        "scheduled_s": scheduled,
        "sent_s": sent,
        "first_s": first,
        "last_s": last,
        "end_s": last,
        "tokens": tokens,
        "first_tokens": k,
        "chunks": tokens - k + 1,
    }
    return row | more


def frame(*rows):
    return records.table(list(rows), records.REQUESTS).to_pandas()


def iterations(*rows):
    """(scheduled_s, output_s, running, prefill_tokens, decode_tokens) a row."""
    return records.table(
        [
            {
                "scheduled_s": s,
                "output_s": o,
                "running": n,
                "admitted": n,
                "waiting": 0,
                "prefill_tokens": p,
                "decode_tokens": d,
                "kv_use": 0.5,
                "preemptions": 0,
                "max_batch_size": 8,
                "max_num_tokens": 64,
            }
            for s, o, n, p, d in rows
        ],
        records.ITERATIONS,
    ).to_pandas()


def test_ttft_is_counted_from_the_schedule_not_from_the_send():
    late = frame(request(scheduled=0.0, sent=0.7, first=1.0))  # vllm 54101: a late client hides queueing
    assert metrics.ttft_ms(late)[0] == pytest.approx(1000.0)


def test_tpot_leaves_out_the_first_chunk_and_counts_tokens_not_chunks():
    merged = frame(request(first=1.0, last=2.0, tokens=11, k=3, chunks=2))  # vllm 27485: two chunks, eleven tokens
    assert metrics.tpot_ms(merged)[0] == pytest.approx(1000.0 / 8)


def test_one_chunk_has_no_tpot_but_a_ttft():
    single = frame(request(tokens=4, k=4, last=1.0))
    assert math.isnan(metrics.tpot_ms(single)[0]) and metrics.ttft_ms(single)[0] == pytest.approx(1000.0)


def test_a_failed_request_has_no_latency_and_adds_no_tokens():
    both = frame(request(0), request(1, error="broken", first=None, last=None, tokens=5))
    summary = metrics.summary(both, NO_ITERATIONS, max_batch_size=8)
    assert summary["completed"] == 1 and summary["failed"] == 1
    assert summary["ttft_mean_ms"] == pytest.approx(1000.0)
    assert summary["output_throughput_tok_s"] == pytest.approx(11 / 2.0)


def test_nothing_completed_is_null_never_zero():
    summary = metrics.summary(
        frame(request(error="no", first=None, last=None, tokens=0)), NO_ITERATIONS, max_batch_size=8
    )
    nulls = [
        k for k in metrics.SUMMARY_KEYS if k.startswith(("ttft", "tpot", "e2e", "output_", "request_", "duration"))
    ]
    assert all(summary[k] is None for k in nulls)
    assert summary["completed"] == 0 and summary["failed"] == 1


def test_throughput_spans_first_send_to_last_token():
    two = frame(request(0, sent=1.0, first=2.0, last=3.0), request(1, sent=1.5, first=3.0, last=5.0, end_s=9.0))
    assert metrics.summary(two, NO_ITERATIONS, max_batch_size=8)["output_throughput_tok_s"] == pytest.approx(22 / 4.0)


def test_every_summary_is_json_with_exactly_the_keys():
    summary = metrics.summary(frame(request()), NO_ITERATIONS, max_batch_size=8)
    assert tuple(summary) == (*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS)
    json.dumps(summary, allow_nan=False)


def test_running_batch_over_iterations_and_over_time():
    mean, weighted = metrics.running_batch(iterations((0.0, 1.0, 2, 0, 2), (1.0, 4.0, 6, 0, 6)))
    assert mean == 4.0 and weighted == pytest.approx((2 * 1 + 6 * 3) / 4)


def test_idle_time_counts_as_an_empty_batch():
    _, weighted = metrics.running_batch(iterations((0.0, 1.0, 4, 0, 4), (3.0, 4.0, 4, 0, 4)))
    assert weighted == pytest.approx(2.0)


def test_overlapped_scheduling_is_not_counted_twice():
    overlapped = iterations((0.0, 1.0, 4, 0, 4), (0.1, 2.0, 4, 0, 4))  # scheduled while the first still runs
    assert metrics.step_durations_s(overlapped).tolist() == pytest.approx([1.0, 1.0])


def test_steady_window_leaves_out_ramp_and_drain():
    run = iterations(*[(float(i), i + 1.0, n, 0, n) for i, n in enumerate([1, 10, 10, 10, 10, 1])])
    assert metrics.steady_window(run) == (2.0, 5.0)
    rate, window = metrics.steady_throughput_tok_s(frame(request(engine_first_s=0.5)), run)
    assert rate == pytest.approx(10.0) and window == pytest.approx(3.0)


def test_steady_throughput_counts_the_tokens_of_finished_prompts():
    run = iterations((0.0, 1.0, 2, 10, 0), (1.0, 2.0, 2, 5, 1), (2.0, 3.0, 2, 0, 2))
    rate, _ = metrics.steady_throughput_tok_s(frame(request(engine_first_s=2.0)), run)
    assert rate == pytest.approx((1 + 2 + 1) / 2.0)


def test_batch_means_cover_the_truth_of_a_noisy_constant():
    rng = np.random.default_rng(1)
    ends = np.cumsum(rng.normal(0.01, 0.001, 4000))
    run = iterations(*[(e - 0.01, e, 8, 0, 8) for e in ends])
    assert 0 < metrics.throughput_half(run) < 0.05 * 800


def test_batch_means_see_the_drift_that_a_plain_error_would_not():
    rng = np.random.default_rng(2)
    drifting = 10.0 + np.repeat([0, 1, 0, 2, 1, 3, 0, 1], 50) + rng.normal(0, 0.1, 400)
    plain = 1.96 * drifting.std() / math.sqrt(400)
    assert metrics.batch_means_half(drifting) > 5 * plain
    assert math.isnan(metrics.batch_means_half(drifting[:15]))


def test_ttft_has_no_interval_when_all_come_at_once():
    rows = [request(i, first=1.0 + i, last=2.0 + i) for i in range(20)]
    assert metrics.summary(frame(*rows), NO_ITERATIONS, max_batch_size=8)["ttft_mean_half_ms"] is None
    spread = [request(i, scheduled=i / 9, first=1.0 + i / 10, last=2.0 + i) for i in range(20)]
    assert metrics.summary(frame(*spread), NO_ITERATIONS, max_batch_size=8)["ttft_mean_half_ms"] > 0


def test_goodput_counts_a_missing_metric_as_a_miss():
    rows = frame(request(0, tokens=1, k=1, last=1.0, output_len=1), request(1, tokens=4, k=4, last=1.0), request(2))
    assert metrics.goodput_req_s(rows) == pytest.approx(3 / 2.0)
    # request 1 merged all its tokens in one chunk: no TPOT, so a miss; request 0 asked for one token and has
    # none to miss
    assert metrics.goodput_req_s(rows, tpot_limit_ms=1000) == pytest.approx(2 / 2.0)
    assert metrics.goodput_req_s(rows, ttft_limit_ms=999) == 0.0


times = st.floats(0, 100, allow_nan=False)


@st.composite
def any_request(draw, index):
    scheduled = draw(times)
    sent = scheduled + draw(st.floats(0, 1))
    first = sent + draw(st.floats(1e-6, 10))
    tokens = draw(st.integers(1, 300))
    k = draw(st.integers(1, tokens))
    last = first + draw(st.floats(0, 50)) if k < tokens else first
    error = draw(st.sampled_from([None, None, "broken"]))
    gone = error is not None
    return request(index, scheduled, sent, None if gone else first, None if gone else last, tokens, k, error=error)


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(*[any_request(i) for i in range(n)])))
def test_properties_of_any_requests(rows):
    r = frame(*rows)
    ttft, tpot, e2e = metrics.ttft_ms(r), metrics.tpot_ms(r), metrics.e2e_ms(r)
    done = metrics.completed(r)
    assert (ttft[done] > 0).all() and ttft[~done].isna().all()  # guidellm 216: never negative
    assert (tpot.dropna() >= 0).all()
    later = (r["tokens"] - r["first_tokens"]).where(done)
    identity = ttft + tpot.fillna(0) * later.fillna(0)
    assert np.allclose(identity[done], e2e[done], atol=1e-6)  # TTFT + TPOT * (n - k) = E2E
    summary = metrics.summary(r, NO_ITERATIONS, max_batch_size=4)
    assert summary["completed"] + summary["failed"] == len(rows)
    if done.any():
        assert summary["ttft_p50_ms"] <= summary["ttft_p90_ms"] <= summary["ttft_p99_ms"]
    shuffled = metrics.summary(frame(*rows[::-1]), NO_ITERATIONS, max_batch_size=4)
    assert all(_same(summary[k], shuffled[k]) for k in summary)  # the order of rows means nothing


def _same(a, b):
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-9))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_an_interval_holds_its_mean(values):
    mean, low, high = metrics.interval(np.array(values))
    assert low <= mean + 1e-6 and high >= mean - 1e-6


def test_an_interval_needs_two_repeats():
    mean, low, high = metrics.interval(np.array([3.0, np.nan]))
    assert mean == 3.0 and math.isnan(low) and math.isnan(high)
    assert metrics.interval(np.array([10.0, 12.0, 14.0])) == pytest.approx((12.0, 12 - 4.9683, 12 + 4.9683), abs=1e-3)


def test_how_far_a_front_end_is_behind():
    run = iterations((0.0, 1.0, 2, 10, 0), (1.0, 1.5, 2, 0, 2))
    assert metrics.behind_s(frame(request(0, last=1.75), request(1, last=1.25)), run) == pytest.approx(0.25)
    assert math.isnan(metrics.behind_s(frame(request()), NO_ITERATIONS))
