"""What if: setups in words, cards on equal terms, and what is left of a difference with equal step times."""

import pandas as pd
import pytest

from batchlab import paths, simulated, study, what_if
from batchlab.errors import UsageError
from batchlab.plots.setups import setups as draw
from batchlab.report import what_if as told
from batchlab.sim import simulate
from test_simulated import opened

pytest.importorskip("aiconfigurator_core")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(what_if, "BATCHES", (2, 8))
    return tmp_path


def test_a_setup_in_words():
    assert what_if.parse("llama-3-8b on l40s") == what_if.Setup("llama-3-8b on l40s", "llama-3-8b", "l40s", 1, None)
    two = what_if.parse(" llama-3-70b  on 2 h200_sxm, fp8 ")
    assert (two.model, two.hardware, two.cards, two.quantization) == ("llama-3-70b", "h200_sxm", 2, "fp8")
    with pytest.raises(UsageError, match=r"setup `h200`: write MODEL on \[NUMBER\] CARD"):
        what_if.parse("h200")


def test_cards_are_compared_on_equal_terms(here):
    """The H200's own constants, which were fitted on it, are left out."""
    mine = opened(here)
    frame = what_if.frame(mine, ["llama-3-8b on h200_sxm", "llama-3-70b on 4 h100_sxm"], "vllm-v1")
    assert list(frame["setup"].unique()) == ["llama-3-8b on h200_sxm", "llama-3-70b on 4 h100_sxm"]
    first, large = frame.iloc[0], frame[frame["cards"] == 4].iloc[0]
    bare = simulate(
        "vllm-v1", "h200_sxm", "llama-3-8b", [(0.0, 64, 20)] * 32, max_batch_size=2, max_num_tokens=64
    ).figures()
    assert first["output_throughput_tok_s"] == pytest.approx(bare["output_throughput_tok_s"], rel=1e-5)
    assert large["throughput_per_card_tok_s"] == pytest.approx(large["output_throughput_tok_s"] / 4)
    assert simulated.store("h100_sxm").ids() and len(draw(frame, "tpot_mean_ms")) == 1
    reading = told.setup_reading(frame).sentences
    assert reading[0].startswith("llama-3-8b, short, vLLM (V1): the most output tokens a card come from")
    assert len(told.setup_table(frame).rows) == 2


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("llama-3-8b on h20", "unknown hardware 'h20'"),
        ("llama-9 on l40s", "unknown model 'llama-9'"),
        ("llama-3-70b on l40s", "no room for a KV cache"),
        ("llama-3-8b on 3 l40s", "tensor_parallel_size 3: there is 1, 2, 4"),
    ],
)
def test_an_impossible_setup_is_one_line(here, setup, expected):
    with pytest.raises(UsageError, match=expected):
        what_if.frame(opened(here), [setup], "vllm-v1")


def test_what_equal_step_times_leave(here):
    def change(raw):
        raw["engines"] |= {
            "tensorrt-llm": {"version": "0.14.0"},
            "tensorrt-llm-equal": {"engine": "tensorrt-llm", "version": "0.14.0", "args": {"kernels": "vllm"}},
        }
        both = {"transport": "simulated", "max_batch_size": [2, 4]}
        raw["sweeps"] = [
            {"name": "throughput", **both, "engines": ["vllm-v0", "tensorrt-llm"]},
            {"name": "equal-step-times", **both, "engines": ["vllm-v0", "tensorrt-llm-equal"]},
        ]

    mine = opened(here, change)
    found = what_if.equal_step_times(mine)
    assert set(found["figure"]) == {"output_throughput_tok_s", "tpot_mean_ms", "running_batch_mean"}
    running = found[found["figure"] == "running_batch_mean"]
    assert (running["own"] == running["equal"]).all(), "who runs does not depend on how long it takes"
    speed = found[found["figure"] == "output_throughput_tok_s"].set_index("max_batch_size")
    by = mine.frame().drop_duplicates("cell").set_index(["engine", "max_batch_size"])["output_throughput_tok_s"]
    assert speed.at[4, "own"] == pytest.approx(by["tensorrt-llm", 4] / by["vllm-v0", 4] - 1)
    assert speed.at[4, "equal"] == pytest.approx(by["tensorrt-llm-equal", 4] / by["vllm-v0", 4] - 1)
    assert speed.at[4, "own"] != speed.at[4, "equal"]
    table = told.equal_table(mine)
    assert [row[1] for row in table.rows] == ["2", "4"] and table.headings[2:4] == ("output throughput", "mean TPOT")
    assert table.rows[1][2] == f"{speed.at[4, 'own']:+.1%} / {speed.at[4, 'equal']:+.1%}"
    assert "scheduling" in repr(told.equal_reading(mine))


def test_a_scenario_without_the_experiment_says_so(here):
    mine = opened(here)
    assert what_if.equal_step_times(mine).empty
    assert told.equal_reading(mine).sentences == (told.NO_EXPERIMENT,)
    real = study.open_study("cpu")
    assert told.frame(real, ["llama-3-8b on l40s"], "vllm-v1").empty
    assert "simulated throughout" in repr(told.setup_table(pd.DataFrame()))
