"""Hosts of measured cells: what their iterations show of them, and what is left of an error beside it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from batchlab import host_times, simulated, validation
from batchlab.report import host_times as told
from batchlab.sim import HostOverheads, simulate
from batchlab.sim.host import launch_times
from sim_driver import HandTimes
from test_validation import opened, save

pytest.importorskip("aiconfigurator_core")

SCENARIO = {
    "title": "t",
    "hardware": "h200_sxm",
    "model": "llama-3-8b",
    "engines": {"vllm": {"version": "0.26.0", "max_model_len": 2048}},
    "datasets": {"long": {"input_len": 768, "output_len": 40}},
    "defaults": {"max_batch_size": 32, "max_num_tokens": 8192},
    "num_requests": 60,
    "repeats": 1,
    "sweeps": [{"name": "latency", "transport": "inprocess", "max_batch_size": [32], "request_rate": [5, 6, 7, 8]}],
}
SLOWER = 2  # times as long for a launch as the fitted host


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A study, its cells "measured" on a host that launches kernels half as fast, and how they compare."""
    with opened(tmp_path_factory.mktemp("hosts"), SCENARIO) as mine:
        for start, cell in enumerate(mine.cells()):
            call = simulated.arguments(validation.twin(cell))
            result = simulate(**call | {"host": replace(call["host"], eager_us=SLOWER * call["host"].eager_us)})
            machine = {"name": "m", "cores": 8}
            source = {"machine": machine, "commit": "c", "started": f"2026-01-0{start + 1}T10:00"}
            source["engine"] = {"start_s": float(start // 2)}
            save(mine, cell, result, source)
        yield mine, validation.compare(mine)


def test_iterations_show_the_launches():
    host = HostOverheads(launch_us=1000, pieces_us=400, eager_us=900)
    times = HandTimes(base=0.004, token=1e-5)
    for prompt, expected in ((600, (None, None, 1000 + 32 * 900)), (100, (1000, 1000 + 32 * 400, None))):
        requests = [(i / 15, prompt, 30) for i in range(60)]
        result = simulate(
            "vllm-v1", "h200_sxm", "llama-3-8b", requests, max_batch_size=64, max_num_tokens=2048, host=host,
            step_times=times,
        )  # fmt: skip
        shown = launch_times(result.iterations, 32, 512)
        for found, true in zip((shown.graph_us, shown.pieces_us, shown.eager_us), expected, strict=True):
            assert found is None if true is None else found == pytest.approx(true, rel=0.02)


def test_a_launch_that_is_hidden_behind_the_card_is_not_told():
    quick = HostOverheads(launch_us=1000, pieces_us=50, eager_us=50)
    result = simulate(
        "vllm-v1", "h200_sxm", "llama-3-8b", [(i / 15, 600, 30) for i in range(60)], max_batch_size=64,
        max_num_tokens=2048, host=quick, step_times=HandTimes(base=0.004, token=1e-5),
    )  # fmt: skip
    assert launch_times(result.iterations, 32, 512).eager_us is None
    assert launch_times(result.iterations.slice(0, 2), 32, 512).eager_us is None


def test_the_first_cell_at_a_finite_rate_that_shows_a_launch_calibrates():
    rows = [(1, "a", True, 900.0), (1, "b", False, np.nan), (1, "c", False, 800.0), (1, "d", False, 700.0)]
    rows += [(2, "e", True, np.nan), (2, "f", True, 900.0), (3, "g", False, np.nan)]
    cells = pd.DataFrame(rows, columns=["start", "cell", "at_once", "eager_us"]).assign(
        graph_us=np.nan, pieces_us=np.nan
    )
    assert host_times.calibrating(cells) == {1: "c", 2: "f"}


def test_an_error_that_is_the_hosts_goes_with_another_cell_of_its_start(compared):
    mine, rows = compared
    cells = host_times.by_cell(mine, rows)
    found = host_times.calibrated(mine, rows, cells)
    assert set(found["cell"]) == set(cells["cell"]) - set(host_times.calibrating(cells).values())
    assert found["cell"].nunique() == 2 and set(found["calibrated_on"]) == set(cells.groupby("start")["cell"].first())
    ttft = found[found["figure"] == "ttft_mean_ms"]
    assert (ttft["error"] < -0.2).all() and (found["own_error"].abs() < 0.03).all()
    assert (ttft["low"] < ttft["measured"]).all() and ttft["own"].between(ttft["low"], ttft["high"]).all()
    assert found.loc[found["figure"] == "running_batch_mean", "low"].isna().all()
    before, after = (row for row in told.twice_table(found).rows if "TTFT" in row[0])
    assert (before[2], before[-1], after[2], after[-1]) == ("2", "2", "2", "0")
    assert "2 of 2 engine starts" in repr(told.twice_reading(found, rows))
    assert "No figure that was tested" in repr(told.above_table(found))


def test_what_is_left_is_told_with_its_interval_and_the_iterations(compared):
    mine, rows = compared
    cells = host_times.by_cell(mine, rows)
    found = host_times.calibrated(mine, rows, cells.assign(graph_us=np.nan, pieces_us=np.nan, eager_us=np.nan))
    assert found["calibrated_on"].isna().all() and (found["own"] == found["simulated"]).all()
    table = told.above_table(found)
    place = table.headings.index("against the simulation")
    assert len(table.rows) == (found["error"].abs() > validation.WORST).sum() > 0
    assert all("launches kernel by kernel took 4" in row[place] for row in table.rows)
    assert " to " in table.rows[0][table.headings.index("measured (95% interval)")]


def test_each_start_has_its_own_row(compared):
    cells = host_times.by_cell(*compared)
    starts = host_times.by_start(cells)
    assert starts["start"].tolist() == [1, 2] and starts["cells"].tolist() == [2, 2]
    fitted_ms = 3.3 + 32 * 0.69 * SLOWER
    assert starts["eager_us"].to_numpy() / 1e3 == pytest.approx(fitted_ms, rel=0.05)
    first = told.starts_table(cells).rows[0]
    assert first[0] == "2026-01-01 10:00" and first[3:5] == ("not shown", "not shown")


def test_equal_iterations_are_compared_between_starts_and_within():
    frame = pd.DataFrame(
        [("d", 16, 1, True, 100.0), ("d", 16, 1, True, 102.0), ("d", 16, 2, True, 111.1), ("d", 8, 1, True, 50.0)],
        columns=["dataset", "max_batch_size", "start", "at_once", "decode_us"],
    )
    (row,) = host_times.same_iteration(frame).to_dict("records")
    assert (row["starts"], row["lowest_us"], row["highest_us"]) == (2, 101, 111.1)
    assert row["within"] == pytest.approx(0.02)
    reading = repr(told.starts_reading(frame.assign(eager_us=np.nan, pieces_us=np.nan)))
    assert "at 1 points" in reading and "up to 10.0% longer in one start" in reading


def test_nothing_to_tell_is_one_line(compared):
    mine, rows = compared
    empty = host_times.by_cell(mine, rows.iloc[:0])
    assert "No measured iteration shows" in repr(told.starts_table(empty))
    assert "No iteration was measured in more than one" in repr(told.starts_reading(empty))
    none = host_times.calibrated(mine, rows.iloc[:0], empty)
    assert "No figure that was tested" in repr(told.above_table(none))
    assert repr(told.twice_table(none)) == told.LEFT_OUT and told.twice_reading(none, rows).sentences == (
        told.LEFT_OUT,
    )
