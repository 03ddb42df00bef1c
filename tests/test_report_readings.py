"""Readings, tables and best settings: every number in them comes from the frame."""

import numpy as np
import pandas as pd
import pytest

import synthetic
from batchlab import plots
from batchlab.report import readings, summary, tables


def points_from(values: dict[int, float], metric: str, spread: float = 0.01, axis: str = "max_batch_size",
                **others: object) -> pd.DataFrame:
    """One dataset's points with these values on the axis, each with an interval of ± spread."""
    rows = []
    for at, value in values.items():
        rows.append({"engine": "vllm", "evidence": "measured", "transport": "http", "dataset": "d",
                     "max_batch_size": 8, "max_num_tokens": 512, "request_rate": np.inf, "recorded": True,
                     "valid": True, metric: value, f"{metric}_lo": value * (1 - spread),
                     f"{metric}_hi": value * (1 + spread), **others, axis: at})
    return pd.DataFrame(rows)


THROUGHPUT = "output_throughput_tok_s"


@pytest.mark.parametrize(("values", "expected"), [
    ({1: 100, 2: 200, 4: 390, 8: 400, 16: 398}, "grows 4.0 times, from 100 tok/s at max_batch_size 1 to 400 tok/s "
     "at 8; from 4 on it stays within 5% of the best"),
    ({1: 100, 2: 200, 4: 400}, "grows 4.0 times, from 100 tok/s at max_batch_size 1 to 400 tok/s at 4, and has not "
     "saturated at the largest value recorded"),
    ({1: 100, 2: 400, 4: 200}, "to 400 tok/s at 2, then falls to 200 tok/s at 4"),
    ({1: 100, 2: 400, 4: 385}, "from 2 on it stays within 5% of the best; at 4 it is 4% lower"),
    ({1: 400, 2: 401, 4: 399}, "does not change with max_batch_size beyond the noise (400 tok/s at max_batch_size 1, "
     "399 tok/s at 4)"),
    ({1: 400, 2: 300, 4: 200}, "falls by 50% (400 tok/s at max_batch_size 1, 200 tok/s at 4)"),
])
def test_throughput(values, expected):
    assert expected in str(readings.throughput(points_from(values, THROUGHPUT), "max_batch_size"))


@pytest.mark.parametrize(("values", "expected"), [
    ({1: 4000, 2: 300, 4: 105, 8: 100, 16: 104}, "falls from 4,000 ms at max_batch_size 1 to 100 ms at 8; from 4 on it "
     "stays between 100 and 105 ms"),
    ({1: 4000, 2: 300, 4: 100}, "was still falling at the largest value recorded"),
    ({1: 4000, 2: 100, 4: 300}, "to 100 ms at 2, then rises to 300 ms at 4"),
    ({1: 100, 2: 100, 4: 101}, "does not change with max_batch_size beyond the noise"),
])
def test_ttft(values, expected):
    assert expected in str(readings.ttft(points_from(values, "ttft_mean_ms"), "max_batch_size"))


def test_tpot_grows_and_its_range_is_told():
    text = str(readings.tpot(points_from({1: 2, 8: 5, 64: 40}, "tpot_mean_ms"), "max_batch_size"))
    assert text == "d: mean TPOT grows 20 times, from 2.00 ms at max_batch_size 1 to 40.0 ms at 64."
    cells = pd.concat([points_from({1: 1.0, 8: 2.0}, "tpot_min_ms").assign(tpot_p50_ms=3.0, tpot_max_ms=[2.0, 10.0])])
    assert str(readings.tpot_range(cells, "max_batch_size")) == (
        "d: the slowest request's TPOT is 2.0 to 5.0 times the fastest one's; the range is widest at max_batch_size 8, "
        "2.00 to 10.0 ms.")


def test_wide_intervals_are_no_effect():
    values = {128: 100.0, 1024: 110.0}
    clear = points_from(values, "ttft_mean_ms", spread=0.01, axis="max_num_tokens")
    noisy = points_from(values, "ttft_mean_ms", spread=0.2, axis="max_num_tokens")
    assert "rises by 10%" in str(readings.ttft(clear, "max_num_tokens"))
    assert "does not change with max_num_tokens beyond the noise" in str(readings.ttft(noisy, "max_num_tokens"))


def test_single_runs_differ_by_more_than_a_twentieth():
    for last, expected in ((103, "does not change"), (110, "rises by 10%"), (110, readings.SINGLE)):
        frame = points_from({128: 100, 1024: last}, THROUGHPUT, axis="max_num_tokens")
        frame[[f"{THROUGHPUT}_lo", f"{THROUGHPUT}_hi"]] = np.nan
        assert expected in str(readings.throughput(frame, "max_num_tokens"))


@pytest.mark.parametrize(("values", "expected"), [
    ({1: 1, 8: 7.9, 32: 20}, "fills at least 90% of the limit up to max_batch_size 8; at 32 the mean is 20.0, 62%"),
    ({1: 1, 8: 7.9, 32: 30}, "fills at least 90% of every limit recorded; at 32 the mean is 30.0, 94%"),
    ({4: 2, 8: 2}, "stays under 90% of the limit already at max_batch_size 4; at 8 the mean is 2.00, 25%"),
])
def test_running(values, expected):
    assert expected in str(readings.running(points_from(values, "running_batch_mean")))


def test_invalid_points_are_not_read():
    frame = points_from({1: 100, 2: 200, 4: 9999}, THROUGHPUT)
    frame.loc[2, "valid"] = False
    assert "200 tok/s at 2" in str(readings.throughput(frame, "max_batch_size"))
    frame["valid"] = False
    assert str(readings.throughput(frame, "max_batch_size")) == "d: too few valid points to read."


def test_nothing_planned_is_said():
    empty = plots.points(synthetic.cells().iloc[0:0])
    assert str(readings.throughput(empty, "max_batch_size")) == "Nothing is planned for this figure."
    assert str(readings.tpot_range(synthetic.cells().iloc[0:0], "max_batch_size")).startswith("Nothing is planned")


def test_several_engines_are_named():
    both = pd.concat([synthetic.cells(), synthetic.cells("throughput", "tensorrt-llm", "simulated")])
    text = str(readings.throughput(plots.points(both), "max_batch_size", synthetic.DEFAULTS))
    assert "prefill-heavy, vLLM: " in text and "decode-heavy, TensorRT-LLM, simulated: " in text


def test_reading_is_escaped_html():
    assert readings.Reading(("a < b",))._repr_html_() == '<div class="reading"><p>a &lt; b</p></div>'


def test_coverage_counts_a_cell_once():
    cells = synthetic.cells()
    cells = synthetic.make_missing(cells, cells["max_batch_size"] == 2)
    cells = synthetic.make_invalid(cells, cells["max_batch_size"] == 32)
    twice = pd.concat([cells, cells])
    text = "48 of 54 cells are recorded, 42 of them valid. 6 are missing and shown as missing."
    assert str(readings.coverage(twice)) == text
    assert summary.counts(twice) == summary.Counts(valid=42, invalid=6, missing=6)


def test_best_setting_is_the_smallest_that_cannot_be_told_from_the_best():
    frame = points_from({4: 300, 8: 396, 16: 400, 32: 399}, THROUGHPUT)
    assert summary.frugal_best(frame, THROUGHPUT, highest=True)["max_batch_size"] == 8
    frame = points_from({4: 105, 8: 50.4, 16: 50, 32: 50.2}, "ttft_mean_ms")
    assert summary.frugal_best(frame, "ttft_mean_ms", highest=False)["max_batch_size"] == 8
    assert summary.frugal_best(frame.iloc[0:0], "ttft_mean_ms", highest=False) is None


def test_best_settings_follow_the_articles_rule():
    throughput = points_from({1: 100, 8: 390, 16: 400, 32: 399}, THROUGHPUT, spread=0.002).assign(
        tpot_mean_ms=[1.0, 5.0, 9.0, 20.0], ttft_mean_ms=np.nan)
    latency = points_from({1: 900, 8: 50}, "ttft_mean_ms", request_rate=4.0)
    latency = latency.assign(tpot_mean_ms=3.0, **{THROUGHPUT: 50})
    table = summary.best_settings(pd.concat([throughput, latency]))
    rows = {row[1]: row[2:] for row in table.rows}
    assert rows == {
        "highest output throughput": ("16", "512", "400 ± 1 tok/s"),
        "lowest mean TPOT with at least 95% of that throughput": ("8", "512", "5.00 ms"),
        "lowest mean TPOT at any throughput": ("1", "512", "1.00 ms"),
        "lowest mean TTFT at 4 req/s": ("8", "512", "50.0 ± 0.5 ms")}


def test_invalid_points_are_never_the_best():
    frame = points_from({1: 100, 8: 9999}, THROUGHPUT).assign(tpot_mean_ms=1.0, ttft_mean_ms=1.0)
    frame.loc[1, "valid"] = False
    assert all("9,999" not in cell for row in summary.best_settings(frame).rows for cell in row)
    assert "no best setting yet" in str(summary.best_settings(frame.assign(valid=False)))


def test_tables_write_limits_exactly_and_figures_to_three_digits():
    frame = pd.DataFrame({"engine": ["vllm"], "max_num_tokens": [16384.0], "request_rate": [np.inf],
                          "ttft_mean_ms": [1234.567], "invalid_reasons": [["a", "b<c"]], "flag": [True]})
    table = tables.table(frame)
    assert table.headings == ("engine", "max_num_tokens", "request_rate", "mean TTFT (ms)", "invalid_reasons", "flag")
    assert table.rows == (("vLLM", "16384", "all at once", "1,235", "a; b<c", "yes"),)
    assert "b&lt;c" in table._repr_html_() and '<td class="number">16384</td>' in table._repr_html_()
    assert "16384" in repr(table)


def test_invalid_table_shows_reasons_and_says_when_there_are_none():
    cells = synthetic.cells()
    assert str(tables.invalid_table(cells)) == "All 54 recorded cells are valid."
    bad = synthetic.make_invalid(cells, (cells["max_batch_size"] == 32) & (cells["repeat"] == 0), "late")
    assert len(tables.invalid_table(bad).rows) == 2
    assert "late" in str(tables.invalid_table(bad))
    assert str(tables.invalid_table(synthetic.make_missing(cells, cells["cell"].notna()))) == "No cell is recorded yet."
