"""Two measured engines over one transport: which points are compared, their ratios and what is said."""

import math
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest

import synthetic
from batchlab import rivals, scenario
from batchlab.report import rivals as told
from batchlab.store import Recorded

TWO = """\
title: Two engines
hardware: test_machine
model: tiny-llama
engines:
  vllm: {version: "0.32.0"}
  sglang: {version: "0.5.13"}
datasets:
  prefill-heavy: {input_len: 96, output_len: 16}
  decode-heavy: {input_len: 16, output_len: 96}
defaults: {max_batch_size: 16, max_num_tokens: 512}
num_requests: 24
sweeps:
  - {name: inside, transport: inprocess, max_batch_size: [1, 2, 4]}
  - {name: throughput, transport: http, max_batch_size: [1, 2, 4], max_num_tokens: [128, 512]}
"""


@pytest.fixture
def study(tmp_path):
    file = tmp_path / "two.yml"
    file.write_text(TWO)
    return SimpleNamespace(scenario=scenario.load(file), planned=[], figures_dir=tmp_path / "figures")


def both(factor: float = 1.2) -> pd.DataFrame:
    """vLLM and SGLang over HTTP, SGLang `factor` times as fast; vLLM in process too, ten times as fast."""
    vllm = synthetic.cells().assign(engine_options="{}", token_rule=None)
    sglang = synthetic.cells("throughput", "sglang").assign(engine_options='{"args": {"x": 1}}', token_rule=None)
    sglang["output_throughput_tok_s"] *= factor
    inside = vllm.assign(transport="inprocess", sweep="inside", cell=vllm["cell"] + "-in")
    inside["output_throughput_tok_s"] *= 10
    return pd.concat([inside, vllm, sglang], ignore_index=True)


def compared(study, cells=None, **options):
    return rivals.compared(study.scenario, both() if cells is None else cells, at_once=True, **options)


def test_only_engines_of_one_sweep_and_transport_are_compared(study):
    assert rivals.sweep_of(study.scenario, at_once=True).name == "throughput"
    assert rivals.sweep_of(study.scenario, at_once=False) is None
    found = compared(study)
    assert set(found["transport"]) == {"http"} and set(found["engine"]) == {"vllm", "sglang"}
    assert rivals.recorded_engines(found) == ["vllm", "sglang"]


def test_ratios_are_over_the_first_engine_with_the_interval_of_a_quotient(study):
    found = compared(study)
    rows = rivals.ratios(found, "max_batch_size", "output_throughput_tok_s", synthetic.DEFAULTS)
    assert rows["ratio"].tolist() == pytest.approx([1.2] * 2 * len(synthetic.BATCHES))
    assert set(rows["base"]) == {"vllm"} and set(rows["other"]) == {512} and rows["apart"].all()
    one = found[(found["dataset"] == "decode-heavy") & (found["max_batch_size"] == 4)].set_index("engine")
    rel = {e: one.loc[e, "output_throughput_tok_s_hi"] / one.loc[e, "output_throughput_tok_s"] - 1 for e in one.index}
    row = rows[(rows["dataset"] == "decode-heavy") & (rows["at"] == 4)].iloc[0]
    assert row["ratio_hi"] == pytest.approx(1.2 * math.exp(math.hypot(rel["vllm"], rel["sglang"])))
    assert row["ratio_lo"] * row["ratio_hi"] == pytest.approx(1.2**2)
    equal = rivals.ratios(compared(study, both(1.0)), "max_batch_size", "output_throughput_tok_s", synthetic.DEFAULTS)
    assert not equal["apart"].any()


def test_simulated_points_stand_beside_those_of_their_engine_only(study):
    spec = study.scenario.engines
    spec |= {name: spec["vllm"].model_copy(update={"engine": name}) for name in ("vllm-v1", "vllm-v0")}
    extra = [
        synthetic.cells("throughput", name, "simulated").assign(engine_options="{}", token_rule=None, sweep="simulated")
        for name in ("vllm-v1", "vllm-v0")
    ]
    found = compared(study, pd.concat([both(), *extra], ignore_index=True))
    assert set(found.loc[found["evidence"] == "simulated", "engine"]) == {"vllm-v1"}
    assert rivals.recorded_engines(found) == ["vllm", "sglang"]


def test_the_figure_has_both_engines_in_every_panel_and_says_the_ratios(study):
    found = compared(study)
    shown = told.figure(study, found, "output_throughput_tok_s")
    assert "SGLang's output throughput over vLLM's is 1.20 (1." in shown.alt and "at max_batch_size 1 and" in shown.alt
    assert "SGLang 0.32.0" in shown.caption and "vLLM 0.32.0" in shown.caption and "in process" not in shown.caption
    assert (study.figures_dir / "engines-throughput.png").exists()
    assert "points differ by more than their intervals" in str(told.reading(study, found, "output_throughput_tok_s"))
    table = str(told.numbers(study, found, found.iloc[0:0]))
    assert "SGLang / vLLM" in table and "1.20 (1." in table


def test_points_that_are_invalid_for_one_engine_are_counted_as_left_out(study):
    cells = both()
    bad = (cells["engine"] == "vllm") & (cells["max_batch_size"] == 32)
    found = compared(study, synthetic.make_invalid(cells, bad))
    reading = str(told.reading(study, found, "tpot_mean_ms"))
    assert "1 of 10 points are left out: not recorded and valid for both" in reading and " and 1.00" in reading


def test_fewer_than_two_engines_are_one_line(study):
    cells = both()
    alone = compared(study, synthetic.make_missing(cells, cells["engine"] == "sglang"))
    line = str(told.figure(study, alone, "tpot_mean_ms"))
    assert line == str(told.reading(study, alone, "tpot_mean_ms"))
    assert line.startswith("Sweep `throughput` asks for vLLM and SGLang; only vLLM is recorded so far")
    arriving = rivals.compared(study.scenario, cells, at_once=False)
    assert "at a finite rate" in str(told.figure(study, arriving, "ttft_mean_ms", at_once=False))
    assert "nothing to compare" in str(told.design(arriving)) and "nothing to compare" in str(
        told.numbers(study, arriving, arriving)
    )


def test_the_line_on_design_names_what_the_budget_bounds_and_the_options(study):
    line = str(told.design(compared(study)))
    assert "during which decoding pauses" in line and "SGLang 0.32.0: x 1." in line and "its defaults" in line


def test_a_front_end_that_limits_its_engine_is_told_with_both_speeds(study):
    cells = both().query("transport == 'http' and dataset == 'decode-heavy' and max_batch_size == 4")
    cells = cells.drop_duplicates("engine").reset_index(drop=True)
    late = {cell: 1.0 + 3.0 * (engine == "sglang") for cell, engine in zip(cells["cell"], cells["engine"], strict=True)}
    meta = {"provenance": {"machine": {"cores": 16}}}
    study.record = lambda cell: Recorded(
        cell,
        meta,
        pa.table({"last_s": [0.9, 10.0 + late[cell] - 1], "tokens": [20, 40]}),
        pa.table({"output_s": [5.0, 10.0]}),
    )
    behind = rivals.front_ends(study, cells)
    assert dict(zip(behind["engine"], behind["limits"], strict=True)) == {"vllm": False, "sglang": True}
    assert behind["inside_tok_s"].tolist() == [6.0, 6.0]
    none = behind.iloc[:0]
    words = str(told.front_ends(behind, none))
    assert "vLLM's front end is nowhere behind" in words and "SGLang's front end is behind its engine" in words
    assert "after 10.0 s (6 tok/s), the client had the last token after 13.0 s (5 tok/s)" in words
    assert "nothing to compare" in str(told.front_ends(behind.iloc[:1], none))
    assert "hosts of different sizes" not in words
    more = str(told.front_ends(pd.concat([behind, behind.assign(cores=32, limits=False)], ignore_index=True), none))
    assert "Behind by so much are, SGLang, decode-heavy: 1 of 1 with 16 cores and 0 of 1 with 32 cores." in more
    changed = '{"args": {"stream-interval": 8, "x": 1}}'
    apart = cells[cells["engine"] == "sglang"].assign(cell="eased", engine_options=changed, sweep="eased")
    every = pd.concat([cells, apart, apart.assign(max_batch_size=64), apart.assign(transport="inprocess")])
    chosen = rivals.other_options(study.scenario, every)
    assert chosen["cell"].tolist() == ["eased"] and chosen["max_batch_size"].tolist() == [4]
    late["eased"] = 1.5
    line = str(told.front_ends(behind, rivals.front_ends(study, chosen)))
    assert "SGLang with stream-interval 8, decode-heavy at batch 4 and 512 tokens: 6 tok/s inside, 6 at the" in line
    assert "0.5 s behind on 16 cores; without it 6, 5 and 3.0 s on 16." in line
