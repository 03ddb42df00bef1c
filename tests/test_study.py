"""From records to the frame that notebooks stand on."""

import math

import numpy as np
import pandas as pd
import pytest

from batchlab import metrics, plan, scenario, study
from batchlab.errors import UsageError
from batchlab.store import Store
from batchlab.study import Study
from test_store import CELLS, META, tables

PROVENANCE = {
    "machine": {"name": "a machine"},
    "commit": "abc1234",
    "started": "2026-01-01T00:00:00+00:00",
    "engine": {"start_s": 1.0},
}


def frame(values, valid=None, **columns):
    """A frame of one point's repeats with invented throughputs."""
    rows = []
    for seed, value in enumerate(values):
        row = dict.fromkeys((*study.POINT, *metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS))
        row |= {
            "cell": f"c{seed}",
            "recorded": True,
            "output_throughput_tok_s": value,
            "num_requests": 4,
            "valid": True if valid is None else valid[seed],
            "invalid_reasons": [] if valid is None or valid[seed] else ["late"],
        }
        rows.append(row | columns)
    return pd.DataFrame(rows)


def test_repeats_give_a_t_interval():
    (row,) = study.aggregate(frame([10.0, 12.0, 14.0])).to_dict("records")
    assert (row["n"], row["interval"], row["valid"]) == (3, "repeats", True)
    assert row["output_throughput_tok_s"] == 12.0 and row["output_throughput_tok_s_lo"] == pytest.approx(
        12 - 4.9683, abs=1e-3
    )


def test_a_single_run_has_batch_means():
    (row,) = study.aggregate(frame([10.0], output_throughput_half_tok_s=0.5)).to_dict("records")
    assert (row["n"], row["interval"]) == (1, "batches")
    assert (row["output_throughput_tok_s_lo"], row["output_throughput_tok_s_hi"]) == (9.5, 10.5)
    (bare,) = study.aggregate(frame([10.0])).to_dict("records")
    assert math.isnan(bare["output_throughput_tok_s_lo"])


def test_a_single_run_of_waves_borrows_the_noise_of_repeated_points():
    """By hand: 98 and 102 differ from their mean by 2%, so s = 0.02·√2, and t has 1 degree of freedom, 12.706."""
    at_once = {"request_rate": math.inf, "evidence": "measured", "output_throughput_half_tok_s": 700.0}
    twice = frame([98.0, 102.0], max_batch_size=4, **at_once)
    once = frame([1000.0], max_batch_size=8, **at_once).assign(cell="once")
    _, row = study.aggregate(pd.concat([twice, once])).to_dict("records")
    half = 12.7062 * 0.02 * math.sqrt(2) * 1000
    assert row["interval"] == "pooled" and row["output_throughput_tok_s_hi"] == pytest.approx(1000 + half, rel=1e-4)
    _, simulated = study.aggregate(pd.concat([twice, once.assign(evidence="simulated")])).to_dict("records")
    assert math.isnan(simulated["output_throughput_tok_s_lo"])  # no part of it varies by chance
    _, other = study.aggregate(pd.concat([twice, once.assign(transport="http")])).to_dict("records")
    assert math.isnan(other["output_throughput_tok_s_lo"])  # a server's noise is not that of the engine alone
    (alone,) = study.aggregate(once).to_dict("records")  # nothing is repeated: no interval, whatever batch means say
    assert math.isnan(alone["output_throughput_tok_s_lo"])


def test_invalid_repeats_are_left_out_while_a_valid_one_is_there():
    (row,) = study.aggregate(frame([10.0, 99.0], valid=[True, False])).to_dict("records")
    assert (row["output_throughput_tok_s"], row["n"], row["invalid"], row["valid"]) == (10.0, 1, 1, True)
    (row,) = study.aggregate(frame([10.0, 99.0], valid=[False, False])).to_dict("records")
    assert (row["n"], row["invalid"], row["valid"], row["invalid_reasons"]) == (2, 2, False, ["late"])


def test_engine_options_make_another_point():
    both = pd.concat([frame([10.0]), frame([20.0], engine_options='{"kv_cache_gib": 1}').assign(cell="other")])
    assert sorted(study.aggregate(both)["output_throughput_tok_s"]) == [10.0, 20.0]


def test_repeats_that_were_chosen_by_their_outcome_are_left_out():
    cells = pd.DataFrame({"sweep": ["throughput", "missed-one", "missed-one"], "seed": [1, 0, 1], "cell": list("abc")})
    assert study.fair(cells)["cell"].tolist() == ["a", "b"]
    assert study.fair(cells[["cell"]])["cell"].tolist() == list("abc")


@pytest.fixture
def small(tmp_path):
    from test_scenario import GOOD

    loaded = scenario.Scenario(name="x", path="x.yml", **GOOD)
    return Study(loaded, plan.expand(loaded), Store(tmp_path))


def test_the_frame_shows_recorded_and_missing_cells(small):
    small.store.save(CELLS[0], META | {"provenance": PROVENANCE}, *tables())
    frame = small.frame()
    assert len(frame) == len(small.planned) and frame["recorded"].sum() == 1
    done = frame[frame["recorded"]].iloc[0]
    assert done["machine"] == "a machine" and done["completed"] == 49 and np.isinf(done["request_rate"])
    absent = frame[~frame["recorded"]].iloc[0]
    assert pd.isna(absent["output_throughput_tok_s"]) and absent["invalid_reasons"] == ["not measured"]


def test_a_damaged_cell_is_shown_as_missing(small):
    small.store.save(CELLS[0], META | {"provenance": PROVENANCE}, *tables()).write_bytes(b"x")
    assert not small.frame()["recorded"].any()


def test_an_unknown_sweep_lists_those_there_are(small):
    with pytest.raises(UsageError, match="no sweep `latency`; there are: throughput"):
        small.frame("latency")
