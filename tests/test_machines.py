"""How far machines alone move a figure: cells "measured" on cards of one kind that are not equally fast."""

import pandas as pd
import pytest

import test_host_times
from batchlab import host_times, machines, simulated, validation
from batchlab.report import machines as told
from batchlab.report import validation as told_errors
from batchlab.sim import simulate
from test_validation import opened, save

pytest.importorskip("aiconfigurator_core")

SCENARIO = test_host_times.SCENARIO | {
    "datasets": {"long": {"input_len": 700, "output_len": 130}},
    "num_requests": 40,
    "sweeps": [
        {"name": "throughput", "transport": "inprocess", "max_batch_size": [16, 20, 24]},
        {"name": "latency", "transport": "inprocess", "max_batch_size": [32], "request_rate": [5, 6]},
        {"name": "missed-one", "transport": "inprocess", "repeats": 2, "max_batch_size": [20]},
    ],
}
SLOW = {16: 1.25, 20: 1.11, 24: 1.25}  # of the first run, times as long as the tables say


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Two engine starts: one on a slow card, whose seed-0 cells were all missed; one as the tables say."""
    with opened(tmp_path_factory.mktemp("machines"), SCENARIO) as made:
        for cell in made.cells():
            second = bool(cell.seed) or cell.request_rate == 6
            card = 1.0 if second or cell.request_rate else SLOW[cell.max_batch_size]
            _save(made, cell, card, 2.0 if second else 1.0)
        yield made


def _save(made, cell, card, start_s):
    call = machines.on_machine(simulated.arguments(validation.twin(cell)), card, {})
    source = {"machine": {"name": "m", "cores": 8}, "commit": "c", "started": f"2026-01-0{start_s:.0f}T10:00"}
    save(made, cell, simulate(**call), source | {"engine": {"start_s": start_s}})


@pytest.fixture(scope="module")
def found(mine):
    compared = validation.compare(mine)
    cells = host_times.by_cell(mine, compared)
    return compared, machines.spread(cells), machines.missed(mine, compared, cells)


def test_the_spread_is_that_of_equal_iterations(found):
    spread = found[1]
    # one point was measured in both starts: on a card 11% slow, and on one as the tables say
    assert spread.card == pytest.approx(0.105, abs=0.01)
    assert 0 < spread.shortest["eager_us"] <= spread.longest["eager_us"]


def test_missed_figures_lie_inside_what_machines_make_of_them_or_not(found):
    missed = found[2][found[2]["figure"] == "tpot_mean_ms"].set_index("max_batch_size")
    assert set(missed.index) == {16, 20, 24}
    assert (missed["fastest"] < missed["simulated"]).all() and (missed["simulated"] < missed["slowest"]).all()
    assert not missed["inside"].any()  # half of the spread is 5%, and they are off by 10% and more
    assert missed["others"].map(len).to_dict() == {16: 0, 20: 1, 24: 0}
    assert missed.at[20, "others"][0] == pytest.approx(0, abs=0.01)


def test_a_machine_within_the_spread_is_inside(mine, found):
    (cell,) = (c for c in mine.cells("throughput") if c.max_batch_size == 24)
    call = simulated.arguments(validation.twin(cell))
    fast, as_told, slow = (simulate(**machines.on_machine(call, card, {})).figures() for card in (0.9, 1.0, 1.1))
    assert as_told == simulate(**call).figures()
    assert fast["tpot_mean_ms"] < as_told["tpot_mean_ms"] < slow["tpot_mean_ms"]


def test_repeats_of_missed_cells_count_in_no_mean(found):
    compared = found[0]
    assert compared.drop_duplicates("cell")["set"].value_counts()[validation.AGAIN] == 1
    sentences = told_errors.reading(compared).sentences
    assert sentences[0].startswith("output throughput, 5 cells that nothing was fitted on")
    assert sentences[-1].startswith("1 cells were measured once more because they had been missed")


def test_what_the_report_says_of_machines(found):
    _, spread, missed = found
    first, second, *_ = told.missed_reading(missed, spread).sentences
    assert first.startswith("The recorded cards differ by up to 10.") and "kernel by kernel" in first
    off = missed[missed["figure"] != "ttft_mean_ms"]
    again = sum(map(len, off["others"]))
    assert f": {len(off)}. Between" in second and f"another run of it: {again} more" in second
    assert f"left: {len(off) - again} (" in second
    assert len(told.missed_table(missed, spread).rows) == len(missed)


def test_one_machine_alone_has_no_spread(mine):
    compared = validation.compare(mine)
    cells = host_times.by_cell(mine, compared)
    alone = cells[cells["start"] == 1]
    assert machines.spread(alone) is None
    nothing = machines.missed(mine, compared, alone)
    assert nothing.empty and set(machines.COLUMNS) <= set(nothing.columns)
    assert "No two engine starts" in told.missed_reading(nothing, None).sentences[0]
    assert "No two engine starts" in repr(told.missed_table(nothing, None))


def test_nothing_measured_is_nothing_missed(mine):
    empty = pd.DataFrame(columns=list(validation.COLUMNS))
    assert machines.missed(mine, empty, host_times.by_cell(mine, empty)).empty
