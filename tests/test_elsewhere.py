"""Evidence of other scenarios in one figure: which of it is taken, on invented cells."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import synthetic
from batchlab import plots, service
from batchlab.errors import UsageError
from batchlab.report import elsewhere
from batchlab.report import limits as told
from batchlab.service import ServiceLimits

LIMITS = ServiceLimits()
SHAPE = {"dataset": "s1-2048-128", "model": "llama-3-8b", "input_len": 2048, "output_len": 128}


def cells(sweep="tpot-limit", faster=1.0, **more):
    """Three batch sizes all at once, or three rates at one setting, of S1's lengths."""
    rows = []
    for at in (1, 2, 4):
        batch, rate = (at, np.inf) if sweep == "tpot-limit" else (16, float(at))
        row = synthetic.row("prefill-heavy", batch, 512, 0, "throughput") | SHAPE
        row |= {"engine_options": "{}", "token_rule": None, "request_rate": rate, "sweep": sweep}
        row |= {"transport": "inprocess", "hardware": "h200_sxm", "ttft_mean_ms": 100.0 * at} | more
        row["output_throughput_tok_s"] *= faster
        rows.append(row | {"cell": f"{sweep}-{at}-{row['engine']}-{row['hardware']}"})
    return pd.DataFrame(rows)


def both(**more):
    return pd.concat([cells("tpot-limit", **more), cells("ttft-limit", **more)], ignore_index=True)


SIMULATED = {"engine": "vllm-v0", "evidence": "simulated", "transport": "simulated", "hardware": "a100_sxm"}


@pytest.fixture
def others(monkeypatch):
    """The scenarios that there are, by name; which of their sweeps were simulated or measured for the figure."""
    there, ensured = {}, []

    def opened(name):
        frame = there[name]
        if frame is None:
            raise UsageError(f"{name}.yml: half written")
        return SimpleNamespace(
            scenario=SimpleNamespace(name=name),
            has=lambda sweep: sweep in set(frame["sweep"]),
            frame=lambda sweep: frame[frame["sweep"] == sweep],
            ensure=lambda sweep: (ensured.append((name, sweep)), frame[frame["sweep"] == sweep])[1],
        )

    monkeypatch.setattr(elsewhere, "names", lambda: list(there))
    monkeypatch.setattr(elsewhere.study, "open_study", opened)
    return SimpleNamespace(there=there, ensured=ensured, open=opened)


def test_measured_simulated_and_published_stand_in_one_panel(others):
    mine = both()
    others.there |= {"mine": mine, "broken": None, "a100": both(**SIMULATED)}
    found = told.points(others.open("mine"), mine)
    assert others.ensured == [("a100", "tpot-limit"), ("a100", "ttft-limit")]
    assert set(zip(found["evidence"], found["hardware"], strict=True)) == {
        ("measured", "h200_sxm"),
        ("simulated", "a100_sxm"),
        ("published", "a100_sxm"),
    }
    note = elsewhere.cards(found, told.APART)
    assert note == f"H200 and A100-SXM-80G are different cards: {told.APART}"
    best = service.under_tpot(found, LIMITS)
    (ax,) = plots.tradeoff(service.at_once(found), LIMITS.tpot, 20, best, note)
    assert note in ax.figure.get_label() and ax.get_yscale() == "log"
    assert {line.get_marker() for line in ax.lines} >= {"D", "s", "x"}
    (ax,) = plots.rates(service.rate_lines(found), LIMITS.ttft, 1000, note)
    lengths = sorted(len(line.get_xdata()) for line in ax.lines if line.get_marker() in ("D", "s", "x"))
    assert note in ax.figure.get_label() and lengths == [3, 3, 5, 5]
    words = str(told.ttft_reading(service.under_ttft(found, LIMITS), LIMITS))
    assert "vLLM (V0) 0.32.0, simulated: 4 req/s" in words and "vLLM 0.6.1, published: 5 req/s" in words


def test_nothing_is_measured_and_another_card_s_like_series_is_left_out(others):
    mine, theirs = both(), both(hardware="h100_sxm")
    others.there |= {"mine": mine, "h100": theirs}
    assert elsewhere.cells(others.open("mine"), mine, *told.ASKS).empty and others.ensured == []
    others.there["h100"] = theirs.assign(engine="sglang")
    assert len(elsewhere.cells(others.open("mine"), mine, *told.ASKS)) == 6 and others.ensured == []
    others.there["h100"] = theirs.assign(engine="sglang", recorded=False)
    assert elsewhere.cells(others.open("mine"), mine, *told.ASKS).empty


def test_two_other_cards_of_one_series_do_not_make_one_line(others):
    mine = both()
    others.there |= {"mine": mine, "a100": both(**SIMULATED), "l40s": both(**SIMULATED | {"hardware": "l40s"})}
    assert set(elsewhere.cells(others.open("mine"), mine, *told.ASKS)["hardware"]) == {"a100_sxm"}


def test_a_scenario_that_does_not_ask_gets_nothing(others):
    mine = both().assign(sweep="throughput", dataset="prefill-heavy", input_len=96, output_len=16)
    others.there |= {"mine": mine, "a100": both(**SIMULATED)}
    found = told.points(others.open("mine"), mine)
    assert set(found["evidence"]) == {"measured"} and others.ensured == []
    assert elsewhere.cards(found, "x") == ""


def test_too_few_batch_sizes_are_a_line_in_place_of_the_figure(others):
    mine = cells("ttft-limit").assign(request_rate=np.inf)
    assert "no figure" in str(told.tpot_figure(service.usable(mine), pd.DataFrame(), LIMITS, None))


def test_engines_are_held_against_those_of_their_own_transport():
    rows = pd.concat([cells(), cells(faster=2, engine="sglang", transport="http", cell="s")], ignore_index=True)
    assert service.under_tpot(service.usable(rows), LIMITS)["gpus_relative"].isna().all()
    rows["transport"] = "http"
    assert sorted(service.under_tpot(service.usable(rows), LIMITS)["gpus_relative"]) == pytest.approx([1, 2])
