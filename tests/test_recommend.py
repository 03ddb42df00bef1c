"""Service limits: the best settings under them, what they cost, and what is recommended, on invented points."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import synthetic
from batchlab import paths, plots, recommend, service
from batchlab.errors import UsageError
from batchlab.report import limits as told
from batchlab.service import ServiceLimits


def cell(batch, tok_s, tpot, rate=np.inf, ttft=100.0, tokens=512, **more):
    row = synthetic.row("prefill-heavy", batch, tokens, 0, "throughput")
    name = f"{more.get('engine', 'vllm')}-{batch}-{tokens}-{rate}-{more.get('evidence', 'measured')}"
    return row | {
        "cell": name,
        "engine_options": "{}",
        "token_rule": None,
        "request_rate": rate,
        "output_throughput_tok_s": tok_s,
        "tpot_mean_ms": tpot,
        "ttft_mean_ms": ttft,
        **more,
    }


LIMITS = ServiceLimits()
# TPOT keeps 20 ms up to a batch of 16; 15 does almost as much as 16
AT_ONCE = [cell(4, 400, 10), cell(8, 700, 13), cell(15, 990, 18), cell(16, 1000, 19), cell(32, 1500, 25)]


def frame(*rows):
    return pd.DataFrame(list(rows))


def test_the_best_setting_under_tpot_is_the_smallest_of_the_equally_good():
    (row,) = service.under_tpot(service.usable(frame(*AT_ONCE)), LIMITS).to_dict("records")
    assert (row["max_batch_size"], row["max_num_tokens"]) == (15, 512)
    assert row["throughput_left"] == pytest.approx(990 / 1500)
    assert row["gpus_for_unlimited"] == pytest.approx(1500 / 990) and pd.isna(row["gpus_relative"])


def test_no_setting_under_tpot_is_said_with_the_lowest():
    best = service.under_tpot(service.usable(frame(*AT_ONCE)), ServiceLimits(tpot_ms=5))
    assert pd.isna(best["max_batch_size"].iloc[0])
    assert "no setting keeps 5 ms; the lowest TPOT is 10.0 ms" in str(told.tpot_reading(best, ServiceLimits(tpot_ms=5)))


def test_the_highest_rate_ends_at_the_first_one_that_misses():
    rates = [cell(16, 100 * r, 12, rate=r, ttft=t) for r, t in ((1, 100), (2, 200), (4, 1500), (8, 900))]
    (row,) = service.under_ttft(service.usable(frame(*AT_ONCE, *rates)), LIMITS).to_dict("records")
    assert (row["request_rate"], row["request_rate_missed"]) == (2, 4)  # 8 keeps it again, which proves nothing
    late = [cell(16, 100, 12, rate=1, ttft=2000), cell(16, 200, 12, rate=2, ttft=500)]
    assert service.under_ttft(service.usable(frame(*late)), LIMITS).empty


def test_gpus_are_inverse_to_throughput_as_s1_argues():
    """S1's table 3: 5 req/s and 639 tok/s against 6 req/s and 743 tok/s under a TTFT of 1 s, 16.3% more GPUs."""
    mine = frame(cell(256, 500, 15, model="llama-3-8b", dataset="s1", input_len=2048, output_len=128))
    found = service.published(service.usable(mine))
    best = service.under_ttft(found, LIMITS).set_index("engine")
    assert best.loc["vllm", "request_rate"] == 5 and best.loc["tensorrt-llm", "request_rate"] == 6
    assert best.loc["vllm", "gpus_relative"] == pytest.approx(1.163, abs=5e-4)
    assert "16.3% more GPUs" in str(told.ttft_reading(service.under_ttft(found, LIMITS), LIMITS))
    tpot = service.under_tpot(found, LIMITS).set_index("engine")
    assert tpot["max_batch_size"].to_dict() == {"vllm": 8, "tensorrt-llm": 16}
    assert service.published(service.usable(frame(*AT_ONCE))).empty


def advice(*rows, limits=LIMITS):
    return recommend.recommend(frame(*rows), limits)


def test_a_recommendation_is_confirmed_by_a_measured_cell_at_its_setting():
    kept = cell(15, 600, 15, rate=4.0, ttft=200)
    missed = cell(15, 700, 17, rate=6.0, ttft=1200)
    elsewhere = cell(32, 600, 15, rate=8.0, ttft=100)
    (made,) = advice(*AT_ONCE, kept, missed, elsewhere)
    assert (made.max_batch_size, made.max_num_tokens, made.any_load) == (15, 512, True)
    assert made.output_throughput_tok_s == 990 and made.throughput_left == pytest.approx(990 / 1500)
    assert made.confirmed and made.cells == (kept["cell"],)
    assert (made.request_rate, made.request_rate_missed) == (4, 6)
    assert "(600 tok/s, mean TPOT 15.0 ms, mean TTFT 200 ms, 61% of its throughput with all" in made.why
    assert "not at 6 req/s (700 tok/s, mean TPOT 17.0 ms, mean TTFT 1,200 ms)" in made.why
    assert made.as_dict()["status"] == "confirmed" and made.as_dict()["confirmed"] is True
    json.dumps(made.as_dict(), allow_nan=False)
    assert made.as_dict()["scenario_line"] == "defaults: {max_batch_size: 15, max_num_tokens: 512}"


def test_without_a_confirming_cell_it_is_unconfirmed():
    (made,) = advice(*AT_ONCE, cell(32, 600, 15, rate=4.0, ttft=100))
    assert not made.confirmed and made.request_rate is None and "no cell at this setting" in made.why
    simulated = [row | {"evidence": "simulated"} for row in (*AT_ONCE, cell(15, 600, 15, rate=4.0, ttft=200))]
    (made,) = advice(*simulated)
    assert not made.confirmed and made.why.startswith("unconfirmed: only simulated") and made.request_rate == 4
    (made,) = advice(*[row | {"evidence": "simulated"} for row in (*AT_ONCE, cell(15, 600, 25, rate=4.0))])
    assert made.status == "unconfirmed" and "at 4 req/s a cell has 600 tok/s, mean TPOT 25.0 ms" in made.why


def test_a_higher_rate_that_keeps_both_confirms_up_to_there():
    rates = [cell(15, 50 * r, 10 + r, rate=r, ttft=20 * r) for r in (4.0, 6.0, 9.0)]
    (made,) = advice(*AT_ONCE, *rates)
    assert made.status == "confirmed" and made.request_rate == 9 and made.request_rate_missed is None
    assert made.cells == (rates[-1]["cell"],) and "at 9 req/s (450 tok/s, mean TPOT 19.0 ms" in made.why
    reading = str(told.advice_reading([made], LIMITS))
    assert "1 of them confirmed by a measured cell (prefill-heavy at 15 / 512 up to 9 req/s" in reading


def test_a_measured_cell_that_misses_the_limit_refutes_it():
    kept = cell(15, 600, 15, rate=4.0, ttft=200)
    slow = cell(15, 700, 21, rate=6.0, ttft=300)  # all at once TPOT was 18 ms
    (made,) = advice(*AT_ONCE, kept, slow)
    assert made.status == "refuted" and not made.confirmed and made.cells == (slow["cell"],)
    assert (made.request_rate, made.request_rate_missed) == (4, 6)
    assert "at 6 req/s a cell has 700 tok/s, mean TPOT 21.0 ms" in made.why
    assert "highest rate up to which it is kept: keeps mean TPOT ≤ 20 ms and mean TTFT ≤ 1000 ms at 4 req/s" in made.why
    table, reading = str(told.advice_table([made], LIMITS)), str(told.advice_reading([made], LIMITS))
    assert "refuted" in table and "4 req/s" in table and "any load" not in table
    assert "0 of them confirmed by a measured cell, 1 refuted by one" in reading and "21.0 ms" in reading
    (none,) = advice(*AT_ONCE, cell(15, 600, 15, rate=4.0, ttft=3000))
    assert none.status == "refuted" and none.request_rate is None and "mean TTFT 3,000 ms" in none.why
    assert "none of the rates recorded at this setting keeps mean TPOT ≤ 20 ms and mean TTFT ≤ 1000 ms" in none.why
    assert "no rate measured" in str(told.advice_table([none], LIMITS))
    (late,) = advice(*AT_ONCE, kept, cell(15, 600, 15, rate=8.0, ttft=3000))  # queueing is no fault of the setting
    assert late.status == "confirmed" and late.request_rate == 4
    (either,) = advice(*AT_ONCE, kept, slow, limits=ServiceLimits(tpot_ms=None))
    assert either.max_batch_size == 32 and either.status == "unconfirmed"


def test_sweeps_that_test_something_else_recommend_nothing():
    apart = [row | {"dataset": "short", "sweep": "held-out-rates"} for row in AT_ONCE]
    assert advice(*apart) == [] and len(advice(*AT_ONCE, *apart)) == 1


def test_a_rate_that_keeps_both_limits_with_more_throughput_is_recommended_up_to_there():
    rates = [cell(32, 140 * r, 15 + r, rate=float(r), ttft=100) for r in (4, 8)]  # at 8: TPOT 23 ms
    at_five = cell(32, 1100, 19, rate=5.0, ttft=100)
    (made,) = advice(*AT_ONCE, *rates, at_five)
    assert (made.max_batch_size, made.any_load, made.request_rate, made.request_rate_missed) == (32, False, 5, 8)
    assert made.confirmed and made.output_throughput_tok_s == 1100 and made.tpot_ms == 19
    assert "a higher load lets the batch grow" in made.why
    assert "5 req/s" in str(told.advice_table([made], LIMITS)) and "any load" not in str(
        told.advice_table([made], LIMITS)
    )


def test_invalid_cells_recommend_and_confirm_nothing():
    best = cell(16, 5000, 10, tokens=1024, valid=False, invalid_reasons=["late"])
    (made,) = advice(*AT_ONCE, best, cell(15, 600, 15, rate=4.0, ttft=200, valid=False, invalid_reasons=["late"]))
    assert made.max_batch_size == 15 and not made.confirmed
    assert advice(best) == []


def test_finite_rates_alone_recommend_the_setting_that_carries_most():
    rows = [cell(b, 100 * r, 12, rate=r, ttft=100 if r <= b else 5000) for b in (2, 4) for r in (1, 2, 4)]
    (made,) = advice(*rows)
    assert made.max_batch_size == 4 and made.request_rate == 4 and made.confirmed


def test_engines_and_options_are_recommended_apart():
    other = [row | {"engine": "sglang", "cell": row["cell"] + "s"} for row in AT_ONCE]
    less = [row | {"engine_options": '{"kv_cache_gib": 1}', "cell": row["cell"] + "k"} for row in AT_ONCE]
    assert [(m.engine, m.engine_options) for m in advice(*AT_ONCE, *other, *less)] == [
        ("vllm", {}),
        ("sglang", {}),
        ("vllm", {"kv_cache_gib": 1}),
    ]


def test_other_statistics_and_single_limits():
    rows = [row | {"tpot_p99_ms": row["tpot_mean_ms"] * 1.5} for row in AT_ONCE]
    (made,) = advice(*rows, limits=ServiceLimits(tpot_ms=20, ttft_ms=None, statistic="p99"))
    assert made.max_batch_size == 8
    with pytest.raises(UsageError, match="statistic 'p95'"):
        ServiceLimits(statistic="p95")
    with pytest.raises(UsageError, match="tpot_ms 0"):
        ServiceLimits(tpot_ms=0)
    with pytest.raises(UsageError, match="give a limit"):
        ServiceLimits(None, None)


def test_the_figures_show_limit_and_best_setting():
    found = service.usable(frame(*AT_ONCE, *[cell(16, 100 * r, 12, rate=r, ttft=100 * r) for r in (1.0, 2.0, 4.0)]))
    best = service.under_tpot(found, LIMITS)
    (ax,) = plots.tradeoff(service.at_once(found), LIMITS.tpot, 20, best)
    assert any("15 / 512" in t.get_text() for t in ax.texts) and any("20 ms" in t.get_text() for t in ax.texts)
    assert "ring: best setting under the limit" in ax.figure.get_label()
    (ax,) = plots.rates(service.rate_lines(found), LIMITS.ttft, 1000)
    drawn = [line.get_xydata().tolist() for line in ax.lines if len(line.get_xdata()) == 3]
    assert [[1, 100], [2, 200], [4, 400]] in drawn
    assert "1000 ms" in " ".join(t.get_text() for t in ax.texts)


def test_many_rows_are_told_in_sum():
    rows = [row | {"dataset": f"d{n}", "cell": f"{row['cell']}-{n}"} for n in range(5) for row in AT_ONCE]
    rows += [cell(4, 100, 30, dataset="slow")]
    best = service.under_tpot(service.usable(frame(*rows)), LIMITS)
    summed = str(told.tpot_reading(best, LIMITS))
    assert "5 of the table's 6 rows keep the limit, 0 at no cost" in summed and "It costs most here: d0" in summed
    assert "slow, vLLM 0.32.0, measured, HTTP: no setting keeps 20 ms" in summed
    assert summed.count("best is max_batch_size") == 1


def test_options_that_differ_are_shown_and_only_those():
    options = ['{"dtype": "bfloat16", "kv_cache_gib": 1}', '{"dtype": "bfloat16"}']
    rows = [row | {"engine_options": o, "cell": row["cell"] + o} for o in options for row in AT_ONCE]
    best = service.under_tpot(service.usable(frame(*rows)), LIMITS)
    for shown in (told.tpot_table(best, LIMITS), told.advice_table(advice(*rows), LIMITS)):
        assert "kv_cache_gib 1" in str(shown) and "dtype" not in str(shown)


def test_a_scenario_without_two_rates_has_a_line_in_place_of_the_figure():
    found = service.usable(frame(*AT_ONCE))
    assert "no figure against the rate" in str(told.ttft_figure(found, service.under_ttft(found, LIMITS), LIMITS, None))


def run(quick_build, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "batchlab", "recommend", *arguments],
        env=quick_build.env,
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_recommends_from_the_records(quick_build):
    done = run(quick_build, "quick", "--tpot-ms", "7", "--ttft-ms", "1000", "--json")
    made = json.loads(done.stdout)
    assert done.returncode == 0 and {m["dataset"] for m in made} == {"prefill-heavy", "decode-heavy"}
    assert all(m["tpot_ms"] <= 7 for m in made)
    # the cell that would confirm (16, 128) decode-heavy is the one that is not recorded
    assert {m["dataset"]: (m["confirmed"], bool(m["cells"])) for m in made} == {
        "prefill-heavy": (True, True),
        "decode-heavy": (False, False),
    }
    text = run(quick_build, "quick", "--tpot-ms", "7")
    assert text.returncode == 0 and "defaults: {max_batch_size: " in text.stdout
    none = run(quick_build, "quick", "--tpot-ms", "0.1")
    assert none.returncode == 1 and "no recorded setting keeps" in none.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("quick",), "give a limit on TPOT, on TTFT, or both"),
        (("quick", "--tpot-ms", "0"), "--tpot-ms"),
        (("quik", "--tpot-ms", "20"), "did you mean `quick`"),
    ],
)
def test_bad_input_is_one_line(quick_build, arguments, expected):
    done = run(quick_build, *arguments)
    assert done.returncode == 2 and expected in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
