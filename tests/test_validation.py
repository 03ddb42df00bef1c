"""Simulated against measured: which cells have a twin, what the errors are, and what is said where there is nothing."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from batchlab import paths, records, simulated, study, validation
from batchlab.cell import Cell
from batchlab.plots import validation as figures
from batchlab.report import ahead
from batchlab.report import validation as told
from batchlab.sim import SimResult, simulate
from batchlab.study import Study

pytest.importorskip("aiconfigurator_core")

SCENARIO = {
    "title": "t",
    "hardware": "h200_sxm",
    "model": "llama-3-8b",
    "engines": {"vllm": {"version": "0.26.0", "max_model_len": 2048, "args": {"enforce_eager": True}}},
    "datasets": {"short": {"input_len": 64, "output_len": 20}},
    "defaults": {"max_batch_size": 4, "max_num_tokens": 256},
    "num_requests": 12,
    "repeats": 1,
    "sweeps": [
        {"name": "throughput", "transport": "inprocess", "max_batch_size": [2, 4]},
        {"name": "latency", "transport": "inprocess", "max_batch_size": [2, 8, 16, 32], "request_rate": 3},
        {"name": "http"},
        {"name": "kv", "transport": "inprocess", "engine_options": {"kv_cache_gib": 1}},
    ],
}


@contextmanager
def opened(folder: Path, scenario: dict) -> Iterator[Study]:
    """A study of this scenario, with results and build folders of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "BUILD", folder / "build")
        patch.setattr(paths, "RESULTS", folder / "results")
        file = folder / "mine.yml"
        file.write_text(yaml.safe_dump(scenario, sort_keys=False))
        yield study.open_study(file)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Iterator[Study]:
    """A study whose records are simulations without the host's time, which stand for measured cells here."""
    with opened(tmp_path_factory.mktemp("validation"), SCENARIO) as mine:
        for cell in mine.cells():
            result = bare(cell)
            source = {"machine": {"name": "m"}, "commit": "c", "started": "2026-01-01", "engine": {"start_s": 1.0}}
            save(mine, cell, result, source)
        yield mine


def save(mine: Study, cell: Cell, result: SimResult, source: dict) -> None:
    """A simulation's rows as the record of a measured cell."""
    meta = {"invalid_reasons": [], "checks": {}, "duration_s": 1.0, "gpu": None, "provenance": source}
    mine.store.save(cell, meta, result.requests, result.iterations.cast(records.ITERATIONS))


def bare(cell):
    call = simulated.arguments(validation.twin(cell))
    return simulate(**{k: v for k, v in call.items() if k not in ("host", "power")})


def test_what_notebooks_share_is_there_ahead_of_them(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr("batchlab.report.elsewhere.names", lambda: [])
    assert len(ahead.unknown(measured.store, measured.cells())) == len(measured.cells())
    twins = list({other.id: other for _, other in validation.pairs(measured)}.values())
    assert simulated.missing(twins) == twins != []
    ahead.ahead(str(measured.scenario.path))
    assert simulated.missing(twins) == [] and ahead.unknown(measured.store, measured.cells()) == []
    ahead.ahead(str(tmp_path / "absent.yml"))  # it is the notebook that says so


def test_a_twin_is_the_same_point_on_the_policy_of_that_release(measured):
    cell = measured.cells("kv")[0]
    other = validation.twin(cell)
    assert (other.engine, other.transport, other.seed, other.dataset) == ("vllm-v1", "simulated", 0, cell.dataset)
    assert other.engine_options == {"max_model_len": 2048, "kv_cache_gib": 1}


@pytest.mark.parametrize(
    "change", [{"hardware": "test_machine"}, {"engine": "attach"}, {"token_rule": {"most": 4}}, {"model": "none"}]
)
def test_what_cannot_be_simulated_has_no_twin(measured, change):
    assert validation.twin(replace(measured.cells()[0], **change)) is None


def test_errors_are_simulated_over_measured(measured):
    compared = validation.compare(measured)
    assert len(compared[compared["figure"] == "output_throughput_tok_s"]) == 8
    finite = compared[compared["figure"] == "ttft_mean_ms"]
    assert len(finite) == 4 and all(math.isfinite(r) for r in finite["request_rate"])
    row = compared[compared["figure"] == "tpot_mean_ms"].iloc[0]
    cell = next(c for c in measured.cells() if c.id == row["cell"])
    host_included = simulate(**simulated.arguments(validation.twin(cell))).figures()["tpot_mean_ms"]
    assert row["simulated"] == pytest.approx(host_included, rel=1e-4) and row["error"] > 0.005
    assert row["error"] == pytest.approx(host_included / bare(cell).figures()["tpot_mean_ms"] - 1, abs=1e-4)


def test_cells_are_told_apart_by_what_they_test(measured):
    cells = validation.compare(measured).drop_duplicates("cell")
    assert cells["set"].value_counts().to_dict() == {"same shapes": 6, "over HTTP": 1, "KV memory held": 1}


def test_another_engine_is_a_set_of_its_own(measured):
    cell = replace(measured.cells("http")[0], engine="sglang", engine_version="0.5.13", engine_options={})
    assert validation.sets([cell]) == ["another engine"] and validation.twin(cell).engine == "sglang"


def test_the_table_of_errors_by_hand():
    frame = pd.DataFrame(
        {"figure": ["a", "a", "a"], "set": ["x", "fitted on", "x"], "error": [0.02, 0.01, -0.06]}, index=[5, 6, 7]
    )
    fitted, tested = validation.errors(frame).to_dict("records")
    assert fitted["set"] == "fitted on" and fitted["cells"] == 1
    assert (tested["mean_abs"], tested["max_abs"], tested["worst"]) == (pytest.approx(0.04), 0.06, 7)
    assert tested["mean"] == pytest.approx(-0.02)


def test_runs_of_one_load_are_those_whose_limits_never_bound(measured):
    (row,) = validation.same_load(measured, validation.compare(measured)).to_dict("records")
    assert row["cells"] == 3 and row["lowest"] == row["highest"] == pytest.approx(row["measured"])


def test_what_the_report_says(measured, tmp_path):
    compared = validation.compare(measured)
    first = told.reading(compared).sentences[0]
    assert first.startswith("output throughput, 7 cells that nothing was fitted on: off by ")
    assert "goal of 3%" in first and "goal of 8%" in first
    last = told.reading(compared).sentences[-1]
    assert last.startswith("vLLM, HTTP, 1 cells, with no constant of its server: off on average by output th")
    assert len(told.error_table(compared).rows) == 10
    assert "Neither the engine nor the simulation preempted in any of 8 cells." in repr(told.preemption_table(compared))
    stands = repr(told.stands_on(measured, compared))
    assert "aiconfigurator-core" in stands and "host time of an iteration" in stands and "TFLOP/s" in stands


def test_a_scenario_without_such_cells_says_so_in_a_line():
    nothing = pd.DataFrame(columns=list(validation.COLUMNS))
    assert "can be simulated" in repr(told.stands_on(None, nothing))
    assert told.errors(None, nothing).sentences == told.reading(nothing).sentences == (told.LEFT_OUT,)
    assert "plans no simulated cell" in told.published_reading(pd.DataFrame()).sentences[0]


def test_the_figure_has_a_panel_a_figure_and_every_cell(measured):
    compared = validation.compare(measured)
    axes = figures.errors(compared, validation.GOALS, told.SETS)
    assert [ax.get_title(loc="left").split(",")[0] for ax in axes] == [
        "Output throughput",
        "Mean TPOT",
        "Mean running batch size",
        "Mean TTFT",
    ]
    drawn = [len(line.get_xdata()) for line in axes[0].lines if line.get_marker() not in ("None", None, "")]
    assert sum(drawn) == 8
    low, high = axes[0].get_ylim()
    assert low < compared["error"].min() and compared["error"].max() < high


def test_the_published_figure_shows_every_row():
    rows = pd.DataFrame(
        {
            "model": ["a", "a", "b"],
            "hardware": "h",
            "tp": [1, 1, 2],
            "output_throughput_tok_s": [1000, 2000, 500],
            "simulated_tok_s": [1100.0, 1900.0, 500.0],
            "error": [0.1, -0.05, 0.0],
            "input_len": 1,
            "output_len": 2,
        }
    )
    ax = figures.published(rows)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a on h", "b on 2 × h"]
    reading = told.published_reading(rows).sentences[0]
    assert "off by 5.0% on average and by 10.0% at most (a, 1 × h, 1 in, 2 out)" in reading
    assert told.published_table(rows).rows[0][:4] == ("a", "1 × h", "2", "7.5%")
