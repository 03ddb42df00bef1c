"""Weights from a file against dummy ones, on invented cells."""

import json

import pandas as pd
import pytest

import synthetic
from batchlab import noise, weights
from batchlab.report import weights as told

FILE = json.dumps({"dtype": "bfloat16", "args": {"load_format": "safetensors"}})


def both(factor: float = 1.0) -> pd.DataFrame:
    """Three repeats with dummy weights, and one run from a file whose throughput is `factor` times the middle one."""
    dummy = synthetic.cells().assign(engine_options='{"dtype": "bfloat16"}', token_rule=None)
    file = dummy[(dummy["repeat"] == 1) & dummy["max_batch_size"].isin([4, 32])]
    file = file.assign(engine_options=FILE, cell=file["cell"] + "-file", sweep="weights-from-a-file")
    return pd.concat([dummy, file.assign(output_throughput_tok_s=file["output_throughput_tok_s"] * factor)])


def test_the_load_format_is_taken_out_of_the_options():
    assert weights.split(FILE) == ('{"dtype": "bfloat16"}', "safetensors")
    assert weights.split('{"args": {"seed": 1}}') == ('{"args": {"seed": 1}}', "dummy")


def test_ratio_and_interval_come_from_both_means_and_the_noise_of_repeats():
    cells = both(0.9)
    found = weights.compare(cells)
    assert len(found) == 2 * 2 * 2 and set(found["max_batch_size"]) == {4, 32}
    row = found[(found["figure"] == "output_throughput_tok_s") & (found["max_batch_size"] == 32)].iloc[0]
    mine = cells[(cells["dataset"] == row["dataset"]) & (cells["max_batch_size"] == 32)]
    means = mine.groupby("engine_options")["output_throughput_tok_s"].mean()
    assert row["ratio"] == pytest.approx(means[FILE] / means.drop(FILE).iloc[0])
    repeats = cells[cells["engine_options"] != FILE].groupby(["dataset", "max_batch_size", "max_num_tokens"])
    spread, freedom = noise.repeat_noise(g["output_throughput_tok_s"].to_numpy() for _, g in repeats)
    assert freedom == 36
    half = row["ratio"] * 2.0281 * spread * (1 + 1 / 3) ** 0.5
    assert row["ratio_hi"] - row["ratio"] == pytest.approx(half, rel=1e-4)
    assert row["n_file"] == 1 and row["n_dummy"] == 3 and row["differs"]


def test_the_verdict_is_computed():
    assert "No difference beyond noise" in str(told.reading(weights.compare(both())))
    apart = str(told.reading(weights.compare(both(0.8))))
    assert "No difference" not in apart and "4 of 8 ratios differ by more than the noise" in apart


def test_without_repeats_or_without_a_file_it_says_so():
    once = both()
    once = once[once["repeat"] == 1]
    assert "not known" in str(told.reading(weights.compare(once))) and weights.compare(once)["differs"].isna().all()
    for cells in (synthetic.cells().assign(engine_options="{}", token_rule=None), both().iloc[0:0]):
        nothing = weights.compare(cells)
        assert str(told.reading(nothing)) == told.NOTHING == str(told.numbers(nothing))


def test_invalid_and_simulated_cells_count_for_nothing():
    cells = both()
    assert weights.compare(synthetic.make_invalid(cells, cells["engine_options"] == FILE)).empty
    assert weights.compare(cells.assign(evidence="simulated")).empty
