"""Hosts of measured cells: what their iterations show of them, and what is left of an error beside it."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml

from batchlab import host_times, paths, records, simulated, validation
from batchlab.report import host_times as told
from batchlab.report.readings import Reading
from batchlab.sim import HostOverheads, simulate
from batchlab.sim.fitted import fitted_constants
from batchlab.sim.host import LaunchTrace, completed, launch_times, launch_trace
from batchlab.sim.measured import known_launches
from batchlab.study import open_study
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


@pytest.mark.parametrize(("fewer", "how"), [(0, "its own"), (30, "those of others")])
def test_launches_that_were_not_recorded_are_those_that_show_or_the_nearest_of_others(fewer, how):
    own = LaunchTrace(np.empty((0, 2)), np.array([[float(i), 1000.0 + i] for i in range(40 - fewer)]))
    others = LaunchTrace(np.empty((0, 2)), np.array([[100.0 + i, 5000.0] for i in range(-20, 20)]))
    found = completed(own, others, middle_s=100.0)
    assert len(found.pieces) == 0 and found.launch_s(0.0, prompts=True, recorded=True) is None
    if how == "its own":
        assert found.eager is own.eager
        of_five_around = found.launch_s(20.2, prompts=True, recorded=False)
        assert of_five_around == pytest.approx(1020.5e-6, abs=1e-6)
    else:
        assert found.eager.tolist() == [[100.0, 5000.0]]
    assert len(completed(own, LaunchTrace(own.pieces, own.eager[:5]), 0.0).eager) == (40 if fewer == 0 else 0)


def test_recorded_launches_are_all_told_up_to_the_output_that_follows_them():
    """Plans at 0, 10, 20, … ms; each is launched after 3 ms, and the output before it is read 1.5 ms later."""
    n = 60
    prompts = np.where(np.arange(n) % 2, 600, 0)
    rows = [
        {
            "scheduled_s": 0.01 * i,
            "launched_s": 0.01 * i + 0.003,
            "output_s": 0.01 * (i + 1) + 0.0045,
            "running": 2,
            "prefill_tokens": int(prompts[i]),
            "decode_tokens": 1,
        }
        for i in range(n)
    ]
    found = launch_trace(records.table(rows, records.ITERATIONS), 512)
    assert len(found.pieces) == 0 and found.eager[:, 0] == pytest.approx(0.01 * np.flatnonzero(prompts))
    assert found.graph[:, 0] == pytest.approx(0.01 * np.flatnonzero(prompts == 0))
    assert found.eager[:, 1] == pytest.approx(4400)  # no two iterations of decodes before one with prompts: READ_US
    for i in range(0, n, 4):  # and where there are, from the launch to the output before is what they show
        rows[i + 1] |= {"prefill_tokens": 0}
    found = launch_trace(records.table(rows, records.ITERATIONS), 512)
    assert len(found.eager) == n // 4 and found.eager[:, 1] == pytest.approx(4500)


def test_an_error_that_is_the_hosts_goes_with_the_runs_own_launches(compared):
    mine, rows = compared
    cells = host_times.by_cell(mine, rows)
    found = host_times.known(mine, rows, cells)
    assert set(found["cell"]) == set(cells["cell"]) and set(found["launches"]) == {host_times.OWN}
    ttft = found[found["figure"] == "ttft_mean_ms"]
    assert (ttft["error"] < -0.2).all() and (found["own_error"].abs() < 0.03).all() and (found["why"] == "").all()
    assert found["card"].to_numpy() == pytest.approx(1, abs=0.01)
    assert (ttft["low"] < ttft["measured"]).all() and ttft["own"].between(ttft["low"], ttft["high"]).all()
    assert found.loc[found["figure"] == "running_batch_mean", "low"].isna().all()
    before, after = (row for row in told.twice_table(found).rows if "TTFT" in row[1])
    assert (before[0], before[-1], after[-1]) == ("all tested, 4", "4", "0")
    reading = repr(told.twice_reading(found, rows))
    assert "4 cells with their machine known" in reading and "none of 16 figures above 8%" in reading
    assert "shown by the cell in 4 of 4 cells" in reading and "Left out" not in reading
    assert "No figure that was tested" in repr(told.above_table(found))


def test_the_card_is_told_by_the_other_cells_of_the_start():
    starts = pd.Series({"a": 1, "b": 1, "c": 1, "d": 2})
    ratio = {"a": 9.0, "b": 1.1, "c": 1.3, "d": 1.5}
    assert host_times._others_median(ratio, starts, "a") == pytest.approx(1.2)
    assert host_times._others_median(ratio, starts, "d") == 1.0


def test_a_cell_whose_launches_nothing_shows_is_left_out_and_named(compared, monkeypatch):
    mine, rows = compared
    nothing = LaunchTrace(np.empty((0, 2)), np.empty((0, 2)))
    first = rows["cell"].iloc[0]
    monkeypatch.setattr(
        "batchlab.sim.measured.known_launches",
        lambda cells: {c.id: nothing if c.id == first else known_launches([c])[c.id] for c in cells},
    )
    found = host_times.known(mine, rows, host_times.by_cell(mine, rows))
    assert first not in set(found["cell"]) and found["cell"].nunique() == 3
    assert f"nothing shows how long their hosts took to launch: {first};" in repr(told.twice_reading(found, rows))


def test_what_is_left_is_told_with_its_interval_and_the_iterations(compared):
    mine, rows = compared
    found = host_times.known(mine, rows.assign(measured=rows["measured"] * 1.5), host_times.by_cell(mine, rows))
    table = told.above_table(found)
    assert len(table.rows) == len(found) and "16 of 16 figures above 8%" in repr(told.twice_reading(found, rows))
    place = table.headings.index("against the simulation")
    assert all(row[place] == "no kind of iteration differs by more than 3%" for row in table.rows)


def test_each_start_has_its_own_row(compared):
    cells = host_times.by_cell(*compared)
    starts = host_times.by_start(cells)
    assert starts["start"].tolist() == [1, 2] and starts["cells"].tolist() == [2, 2]
    host = fitted_constants("vllm-v1", "h200_sxm")["host"]
    expected_ms = (host.launch_us + 32 * host.eager_us * SLOWER) / 1e3
    assert starts["eager_us"].to_numpy() / 1e3 == pytest.approx(expected_ms, rel=0.05)
    first = told.starts_table(cells).rows[0]
    assert first[0] == "2026-01-01 10:00" and first[3:5] == ("not shown", "not shown")


@pytest.mark.parametrize("machine", ["alone", "known"])
def test_the_blind_cells_of_the_h200_are_within_the_goals(tmp_path, machine):
    """Cells of shapes and limits that were measured after the constants had been committed."""
    scenario = yaml.safe_load((paths.SCENARIOS / "h200.yml").read_text())
    scenario["sweeps"] = [sweep for sweep in scenario["sweeps"] if sweep["name"].startswith(validation.BLIND)]
    scenario["engines"] = {"vllm": scenario["engines"]["vllm"]}
    recorded = paths.DATA / "results"  # the module has folders of its own
    with opened(tmp_path, scenario) as mine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", recorded)
        mine = open_study(mine.scenario.path)
        rows = validation.compare(mine)
        found = host_times.known(mine, rows, host_times.by_cell(mine, rows))
    assert found["cell"].nunique() == rows["cell"].nunique() == 22 and set(rows["set"]) == {validation.BLIND}
    assert set(found["launches"]) == {host_times.RECORDED}
    if machine == "known":
        assert found["own_error"].abs().max() <= validation.WORST
        for figure, group in found.groupby("figure"):
            assert group["own_error"].abs().mean() <= validation.GOALS[figure], figure
    else:  # how fast its host is, the simulation does not know: it moves what is close to what a machine can sustain
        assert rows.loc[rows["figure"] == "output_throughput_tok_s", "error"].abs().max() <= validation.WORST


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
    none = host_times.known(mine, rows.iloc[:0], empty)
    assert "No figure that was tested" in repr(told.above_table(none))
    assert repr(told.twice_table(none)) == told.LEFT_OUT and told.twice_reading(none, rows).sentences == (
        told.LEFT_OUT,
    )
    assert repr(told.known_errors(mine, none)) == repr(Reading((told.LEFT_OUT,)))
