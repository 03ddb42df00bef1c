"""The claims: as data, and their verdicts, which follow the records."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import synthetic
from batchlab import claims, paths
from batchlab.claims import batching, budget, data, engines, judging, latency, printed, service, setups
from batchlab.claims.body import Body
from batchlab.claims.outcome import Missing, sentence
from batchlab.errors import UsageError
from batchlab.plots.captions import texts
from batchlab.study import Study, open_study

CLAIMS = claims.load()


@pytest.fixture(scope="module")
def measured() -> list[Body]:
    """What is committed: the H200's records."""
    return measured_of(open_study("h200"))


def measured_of(opened: Study) -> list[Body]:
    """Without what may be simulated of it in build/."""
    return [b for b in claims.bodies([opened]) if b.evidence == "measured"]


@pytest.fixture(scope="module")
def found(measured: list[Body]) -> dict[int, claims.Verdict]:
    return {v.number: v for v in claims.verdicts(measured)}


def body(frame: pd.DataFrame, scenario: str = "test", evidence: str = "measured") -> Body:
    defaults = dict(synthetic.DEFAULTS)
    frame = frame.assign(token_rule=None, engine_options="{}", evidence=evidence)
    return Body(scenario, evidence, frame, defaults)


def study(evidence: str = "measured", engine: str = "vllm", **changes: object) -> Body:
    """Both sweeps of invented cells along both limits, with changed columns."""
    frame = pd.concat([synthetic.cells(s, engine, evidence) for s in ("throughput", "latency")], ignore_index=True)
    return body(frame.assign(**changes), evidence=evidence)


# The data ------------------------------------------------------------------------------------------------------------


def test_fifty_claims_each_complete() -> None:
    assert [c.number for c in CLAIMS.claims] == list(range(1, 51))
    assert Counter(c.source for c in CLAIMS.claims) == {"S0": 29, "S1": 14, "S2": 7}
    assert all(c.printed or c.cells for c in CLAIMS.claims if c.number != 42)
    assert {c.kind for c in CLAIMS.claims} == {"value", "ordering", "trend", "saturation point", "ratio", "mechanism"}
    assert all(s.hardware and s.model and s.engines for s in CLAIMS.sources.values())


def test_verdicts_are_not_written_in_the_data() -> None:
    text = (paths.PUBLISHED / "claims.yml").read_text()
    assert not any(word in text for word in claims.VERDICTS)


GOOD = """\
sources: {S0: {title: t, name: n, hardware: h, model: m, engines: {vllm: "1"}}}
claims:
  - {number: 13, source: S0, theme: t, kind: trend, text: t, how: h, needs: n,
     cells: {test: spread, dataset: d, at_least: 2}}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kind: trend", "kind: tend", "claim 13, kind: Input should be 'value', 'ordering'"),
        ("number: 13", "number: x", "claim x, number: Input should be a valid integer"),
        ("theme: t, ", "", "claim 13, theme: Field required"),
        ("theme: t, ", "theme: t, themes: u, ", "claim 13, themes: Extra inputs are not permitted"),
        ("source: S0", "source: S9", "claim 13: no source `S9`; there are: S0"),
        ("test: spread", "test: spred", "claim 13, cells.test: no test `spred`; there are: as_printed"),
        ("at_least: 2", "atleast: 2", "claim 13, cells: test `spread`: missing a required argument: 'at_least'"),
        (
            "dataset: d, at",
            "dataset: d, by: 3, at",
            "claim 13, cells: test `spread`: got an unexpected keyword argument 'by'",
        ),
        ("sources: {", "sources: {{", "not valid YAML"),
    ],
)
def test_mistakes_in_the_data_are_one_line(old: str, new: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "claims.yml"
    file.write_text(GOOD)
    assert claims.load(file).claim(13).text == "t"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        claims.load(file)
    assert expected in str(caught.value) and "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_two_claims_of_one_number_and_an_unknown_one(tmp_path: Path) -> None:
    file = tmp_path / "claims.yml"
    file.write_text(GOOD + GOOD.splitlines()[2] + "\n" + GOOD.splitlines()[3] + "\n")
    with pytest.raises(UsageError, match="number 13 is there twice"):
        claims.load(file)
    with pytest.raises(UsageError, match="no claim 51; they are numbered 1 to 50"):
        CLAIMS.claim(51)
    with pytest.raises(UsageError, match=r"none.yml: cannot be read"):
        claims.load(tmp_path / "none.yml")


# The verdicts over what is committed ---------------------------------------------------------------------------------


def test_every_claim_has_a_verdict_with_its_reasons(found: dict[int, claims.Verdict]) -> None:
    assert list(found) == list(range(1, 51))
    for v in found.values():
        assert v.verdict in claims.VERDICTS and len(v.detail) > 20 and v.detail.endswith(".")
        assert v.evidence == {"inconsistent as printed": "published", "untestable here": "none"}.get(
            v.verdict, "measured"
        )
        if v.evidence == "measured":
            assert v.cells and v.scenario == "h200" and "H200" in v.detail


@pytest.mark.parametrize("number", [3, 9, 31, 32, 33, 34, 36, 37, 41, 44, 45, 48, 49, 50])
def test_what_cannot_be_is_told_without_any_cell(number: int) -> None:
    verdict = claims.verdicts([], CLAIMS)[number - 1]
    assert verdict.verdict == "inconsistent as printed" and verdict.evidence == "published" and verdict.cells == ()


def test_arithmetic_is_in_the_details(found: dict[int, claims.Verdict]) -> None:
    for number, numbers in {
        3: ["8192, not 2048"],
        31: ["31.7 TFLOP", "1,258 tok/s", "167%"],
        32: ["36.5 requests", "14.57 ms"],
        33: ["91.8 to 2,709 s", "5,907 s"],
        34: ["66 tok/s at most", "7 of 10"],
        36: ["16 (18.9 ms), not 8"],
        37: ["5 of 10", "128 tok/s"],
        44: ["7 of 8", "4.62 req/s"],
        45: ["+31%", "21.6 of 24 GB"],
        48: ["ratios are right"],
        49: ["95% of 24 GB", "98% of 24 GB"],
    }.items():
        assert all(text in found[number].detail for text in numbers), found[number].detail


def test_without_any_cell_nothing_is_reproduced() -> None:
    words = {v.number: v.verdict for v in claims.verdicts([], CLAIMS)}
    assert set(words.values()) == {"inconsistent as printed", "untestable here"}
    assert words[13] == "untestable here"


def test_the_h200_settles_the_main_claims(found: dict[int, claims.Verdict]) -> None:
    """Of records that are committed; a change here is a change of what we say."""
    assert {n: found[n].verdict for n in (2, 7, 8, 13, 16, 17, 19, 22, 25, 26, 27)} == dict.fromkeys(
        (2, 7, 8, 13, 16, 17, 19, 22, 25, 26, 27), "reproduced"
    )
    assert found[29].verdict == "differs by setup" and "H200 instead of A100-SXM-80G" in found[29].detail
    assert found[10].verdict == "not reproduced" and "Claim 17 of the same study says the contrary" in found[10].detail


def test_a_changed_record_changes_the_verdict(measured: list[Body], found: dict[int, claims.Verdict]) -> None:
    assert found[13].verdict == "reproduced"
    frame = measured[0].frame.copy()
    at = (frame["dataset"] == "prefill-heavy") & (frame["max_batch_size"] == 512)
    frame.loc[at, "output_throughput_tok_s"] *= 2
    changed = Body("h200", "measured", frame, measured[0].defaults)
    verdict = judging.judge(CLAIMS, CLAIMS.claim(13), [changed])
    assert verdict.verdict == "not reproduced" and verdict.detail != found[13].detail


def test_a_lost_record_makes_it_untestable(
    measured: list[Body], found: dict[int, claims.Verdict], tmp_path: Path
) -> None:
    """On the files themselves: the verdict follows what is in the store, and says what is missing."""
    from batchlab.store import Store

    results = tmp_path / "h200_sxm"
    results.mkdir()
    for file in (paths.RESULTS / "h200_sxm").glob("*.zip"):
        (results / file.name).symlink_to(file)
    opened = open_study("h200")
    copy = type(opened)(opened.scenario, opened.planned, Store(results))
    assert judging.judge(CLAIMS, CLAIMS.claim(14), measured_of(copy)) == found[14]
    lost = next(c for c in found[14].cells)
    (results / f"{lost}.zip").unlink()
    verdict = judging.judge(CLAIMS, CLAIMS.claim(14), measured_of(copy))
    assert verdict.verdict == "untestable here"
    assert (
        "1 of 5 points of prefill-heavy along max_num_tokens, vLLM in scenario h200 are not recorded" in verdict.detail
    )


# How evidence is weighed ---------------------------------------------------------------------------------------------


def judged(number: int, *evidence: Body) -> claims.Verdict:
    return judging.judge(CLAIMS, CLAIMS.claim(number), list(evidence))


FLAT = {"tpot_mean_ms": 5.0}
OWN = {"hardware": "a100_sxm", "model": "llama-3-8b", "engine_version": "0.6.2"}


def test_measured_outranks_simulated() -> None:
    simulated = study("simulated", "vllm-v0", **OWN)
    assert judged(19, study()).verdict == "reproduced"
    both = judged(19, simulated, study(**FLAT))
    assert both.evidence == "measured" and both.verdict == "differs by setup"
    assert (
        "It also holds when simulated on A100-SXM-80G" in both.detail and "a CPU instead of A100-SXM-80G" in both.detail
    )


def test_simulated_alone_is_marked() -> None:
    verdict = judged(19, study("simulated", "vllm-v0", **OWN))
    assert verdict.verdict == "reproduced" and verdict.evidence == "simulated" and "Simulated on" in verdict.detail


def test_what_neither_shows_is_not_reproduced() -> None:
    simulated = study("simulated", "vllm-v0", **(OWN | FLAT))
    verdict = judged(19, study(**FLAT), simulated)
    assert verdict.verdict == "not reproduced" and verdict.evidence == "measured"
    assert judged(19, simulated).verdict == "not reproduced"
    assert judged(19, study(**FLAT)).verdict == "not reproduced"  # a trend, which belongs to no machine


def test_a_simulation_that_leaves_out_what_a_claim_rests_on_decides_nothing_against_it() -> None:
    claim = CLAIMS.claim(19)
    blind = claim.model_copy(update={"blind": "the host"})
    against, for_it = study("simulated", "vllm-v0", **(OWN | FLAT)), study("simulated", "vllm-v0", **OWN)
    assert judging.judge(CLAIMS, claim, [against]).verdict == "not reproduced"
    verdict = judging.judge(CLAIMS, blind, [against])
    assert verdict.verdict == "untestable here" and verdict.evidence == "none"
    assert "That decides nothing: the simulation leaves out the host." in verdict.detail
    assert judging.judge(CLAIMS, blind, [for_it]).verdict == "reproduced"
    bound = blind.model_copy(update={"setup_bound": True})
    assert judging.judge(CLAIMS, bound, [study(**FLAT), against]).verdict == "differs by setup"
    assert {c.number for c in CLAIMS.claims if c.blind} == {15, 18, 28, 35, 38, 39, 40}


def test_numbers_of_another_machine_differ_by_setup() -> None:
    frame = study().frame.copy()
    frame["max_batch_size"] = frame["max_batch_size"].replace({1: 4, 2: 8, 4: 16, 8: 32, 16: 256, 32: 512})
    ours = Body("x", "measured", frame, {"max_batch_size": 256, "max_num_tokens": 512})
    verdict = judged(28, ours)
    assert verdict.verdict == "differs by setup" and verdict.factor > 1.1
    same = Body(
        "x", "measured", frame.assign(hardware="a100_sxm", model="llama-3-8b", engine_version="0.6.2"), ours.defaults
    )
    assert judged(28, same).verdict == "not reproduced"


def test_the_closest_measured_scenario_decides() -> None:
    far, near = study(**FLAT), study(model="llama-3-8b")
    near.scenario = "near"
    assert judged(19, far, near).scenario == "near" and judged(19, near, far).scenario == "near"


def test_invalid_cells_do_not_count() -> None:
    frame = study().frame
    bad = frame["max_batch_size"] == 32
    ours = body(synthetic.make_invalid(frame, bad))
    whole, part = judged(19, study()), judged(19, ours)
    assert "at max_batch_size 1 and 7 ms at 32" in whole.detail or "at 32" in whole.detail
    assert "at 16" in part.detail and not set(part.cells) & set(frame.loc[bad, "cell"])


def test_missing_cells_are_told() -> None:
    frame = study().frame
    gone = (frame["max_batch_size"] == 32) & (frame["sweep"] == "throughput")
    verdict = judged(19, body(synthetic.make_missing(frame, gone)))
    assert verdict.verdict == "untestable here" and verdict.evidence == "none"
    assert (
        "1 of 6 points of prefill-heavy along max_batch_size, vLLM in scenario test are not recorded" in verdict.detail
    )


def test_single_runs_get_the_scatter_of_the_repeated_ones() -> None:
    frame = study().frame
    single = frame[(frame["repeat"] == 0) | (frame["max_batch_size"] == 4)]
    points = body(single).points(("throughput",))
    reach = (points["tpot_mean_ms_hi"] - points["tpot_mean_ms_lo"]) / 2 / points["tpot_mean_ms"]
    assert (points["n"] == 1).any() and reach.notna().all()
    alone = reach[points["n"] == 1]
    assert np.allclose(alone, alone.iloc[0]) and 0.02 < alone.iloc[0] < 0.06


# The tests themselves ------------------------------------------------------------------------------------------------


def scaled(frame: pd.DataFrame, engine: str, **factors: float) -> pd.DataFrame:
    """The same cells as of another engine, some columns multiplied."""
    other = frame.assign(engine=engine, cell=frame["cell"] + engine)
    for column, factor in factors.items():
        other[column] = other[column] * factor
    return other


def two_engines(**factors: float) -> Body:
    frame = study("simulated", "vllm-v0").frame
    return body(pd.concat([frame, scaled(frame, "tensorrt-llm", **factors)], ignore_index=True), evidence="simulated")


LOWER = {"dataset": "prefill-heavy", "axis": "max_num_tokens", "metric": "ttft_mean_ms", "sweeps": ["latency"]}


def test_engines_that_a_simulation_cannot_tell_apart_are_left_undecided() -> None:
    assert engines.lower_everywhere(two_engines(ttft_mean_ms=0.8), **LOWER, resolves=0.1).holds
    higher = engines.lower_everywhere(two_engines(ttft_mean_ms=1.2), **LOWER, resolves=0.1)
    assert not higher.holds and "+20% to +20% against vLLM's" in higher.detail and "not lower at 128" in higher.detail
    with pytest.raises(Missing, match=r"\+5\.0% to \+5\.0% against vLLM's, which the simulation cannot tell apart"):
        engines.lower_everywhere(two_engines(ttft_mean_ms=1.05), **LOWER, resolves=0.1)
    with pytest.raises(Missing, match="no TensorRT-LLM"):
        engines.lower_everywhere(study(), **LOWER, resolves=0.1)


def test_crossover_needs_both_ends() -> None:
    frame = two_engines().frame
    small = frame["max_batch_size"] <= 4
    trt = frame["engine"] == "tensorrt-llm"
    frame.loc[trt & small, "output_throughput_tok_s"] *= 0.8
    frame.loc[trt & ~small, "output_throughput_tok_s"] *= 1.2
    ours = Body("test", "simulated", frame, dict(synthetic.DEFAULTS))
    assert engines.crossover(ours, dataset="prefill-heavy", by=0.02, resolves=0.05).holds
    lead = two_engines(output_throughput_tok_s=1.2)
    assert not engines.crossover(lead, dataset="prefill-heavy", by=0.02, resolves=0.05).holds
    with pytest.raises(Missing, match="cannot tell apart"):
        engines.crossover(two_engines(), dataset="prefill-heavy", by=0.02, resolves=0.05)


def test_ttft_settles_where_it_stays_low() -> None:
    ours = study()
    # invented TTFT falls as 1 over the batch up to 8
    assert latency.settles_by(ours, dataset="prefill-heavy", most=16, within=0.3, queueing=3).holds
    assert not latency.settles_by(ours, dataset="prefill-heavy", most=4, within=0.3, queueing=3).holds
    assert latency.settles_at(ours, points={"prefill-heavy": 16}, within=0.3, steps=1).holds
    far = latency.settles_at(ours, points={"prefill-heavy": 64}, within=0.3, steps=1)
    assert not far.holds and far.factor == 8


def test_preemption_is_compared_with_the_same_limits() -> None:
    free = study().frame
    held = free[free["sweep"] == "throughput"].assign(
        sweep="kv",
        engine_options='{"kv": 1}',
        preemptions=3,
        cell=lambda f: f["cell"] + "kv",
        output_throughput_tok_s=lambda f: f["output_throughput_tok_s"] * 0.7,
    )
    ours = Body("test", "measured", pd.concat([free, held], ignore_index=True), dict(synthetic.DEFAULTS))
    costs = batching.preemption_costs(ours, sweeps=["kv"], by=0.02)
    assert costs.holds and "-30% to -30%" in costs.detail
    calm = Body("test", "measured", ours.frame.assign(preemptions=0), ours.defaults)
    with pytest.raises(Missing, match="saw a preemption"):
        batching.preemption_costs(calm, sweeps=["kv"], by=0.02)


RATES = (1.0, 3.0, 5.0, 6.0, 7.0)


def service_body(engine: str, limit_rate: float) -> pd.DataFrame:
    base = synthetic.row("prefill-heavy", 16, 512, 0, "latency", engine)
    rows = [
        base
        | {
            "sweep": "ttft-limit",
            "request_rate": r,
            "input_len": 2048,
            "output_len": 128,
            "cell": f"{engine}{r}",
            "output_throughput_tok_s": 128 * r,
            "ttft_mean_ms": 400.0 if r <= limit_rate else 1500.0,
        }
        for r in RATES
    ]
    return pd.DataFrame(rows)


def test_rates_under_a_limit_and_the_gpus_they_cost() -> None:
    ours = body(pd.concat([service_body("vllm-v0", 5), service_body("tensorrt-llm", 6)], ignore_index=True))
    where = {"dataset": [2048, 128], "sweeps": ["ttft-limit"], "limit_ms": 1000}
    same = service.highest_under_limit(ours, **where, stated={"vllm": 5, "tensorrt-llm": 6})
    assert same.holds and "carries 5 req/s (stated: 5)" in same.detail
    assert not service.highest_under_limit(ours, **where, stated={"vllm": 3, "tensorrt-llm": 6}).holds
    cost = service.gpus_needed(ours, **where, low=1.15, high=1.2)
    assert cost.holds and "+20% GPUs" in cost.detail
    only = body(service_body("vllm", 5))
    assert service.highest_under_limit(only, **where, stated={"vllm": 5, "tensorrt-llm": 6}).holds
    with pytest.raises(Missing, match="no TensorRT-LLM"):
        service.gpus_needed(only, **where, low=1.15, high=1.2)
    table = service.as_printed(
        only, table="s1-table-3", metric="output_throughput_tok_s", sweeps=["ttft-limit"], within=0.15
    )
    assert not table.holds and "in 5 rows" in table.detail and table.factor == pytest.approx(198 / 128)


def test_moving_and_fixed_budgets() -> None:
    base = synthetic.row("prefill-heavy", 16, 512, 0, "throughput")
    rows = [
        base
        | {
            "sweep": "token-budget",
            "dataset": "s2-short",
            "max_num_tokens": t,
            "cell": f"f{t}",
            "request_throughput_req_s": r,
        }
        for t, r in ((2048, 10.0), (4096, 12.0), (8192, 12.5), (16384, 12.4))
    ]
    moving = base | {
        "sweep": "moving",
        "dataset": "s2-short",
        "max_num_tokens": 2048,
        "cell": "m",
        "request_throughput_req_s": 11.7,
    }
    ours = body(pd.DataFrame([*rows, moving]))
    gain = budget.dynamic_gain(ours, sweeps=["token-budget"], dynamic=["moving"], low=0.15, high=0.2, within=0.01)
    assert (
        gain.holds
        and "+17% over the fixed 2048" in gain.detail
        and "-6.4% over the best fixed budget (8192)" in gain.detail
    )
    moving["request_throughput_req_s"] = 10.0
    gain = budget.dynamic_gain(
        body(pd.DataFrame([*rows, moving])),
        sweeps=["token-budget"],
        dynamic=["moving"],
        low=0.15,
        high=0.2,
        within=0.01,
    )
    assert not gain.holds


def test_a_budget_below_the_prompt() -> None:
    frame = study().frame
    assert frame["max_num_tokens"].min() > 96
    with pytest.raises(Missing, match="max_num_tokens below its input length"):
        setups.budget_above_prompt(body(frame))
    served = setups.budget_above_prompt(body(frame.assign(input_len=200)))
    assert not served.holds and "chunked prefill" in served.detail and served.differs
    refused = setups.budget_above_prompt(
        body(synthetic.make_invalid(frame.assign(input_len=200), frame["max_num_tokens"] < 200))
    )
    assert refused.holds


def test_printed_tests_pass_what_adds_up() -> None:
    claim = CLAIMS.claim(38)
    at = {"vllm": 5, "tensorrt-llm": 6}
    assert printed.printed_gain(CLAIMS, claim, table="s1-table-3", rates=at, stated=0.164, within=0.002).holds
    assert not printed.printed_gain(CLAIMS, claim, table="s1-table-3", rates=at, stated=0.2, within=0.002).holds
    assert printed.audited(CLAIMS, claim, tables=["s1-table-1"], checks=["ratio"]).holds
    assert printed.agrees_with(CLAIMS, CLAIMS.claim(17), other=19).holds
    assert printed.fixed_lengths(CLAIMS, claim, stated=[100], script=[100, 100], ignore_eos=True).holds


def test_sentences_keep_names_that_begin_small() -> None:
    assert [sentence(t) for t in ("vLLM is", "h200: x", "needs a", "1.", "")] == [
        "vLLM is.",
        "h200: x.",
        "Needs a.",
        "1.",
        "",
    ]


# The most surprising, and the command --------------------------------------------------------------------------------


def test_the_most_surprising_are_the_furthest_off_one_a_study(found: dict[int, claims.Verdict]) -> None:
    chosen = claims.surprising(list(found.values()))
    assert [v.source for v in chosen] == [v.source for v in sorted(chosen, key=lambda v: -v.factor)]
    assert sorted(v.source for v in chosen) == ["S0", "S1", "S2"]
    for v in chosen:
        rivals = [o for o in found.values() if o.source == v.source and o.theme != "set-up"]
        rivals = [o for o in rivals if o.verdict not in ("reproduced", "untestable here")]
        assert v.factor == max(o.factor for o in rivals)


def test_command_prints_the_design_s_keys(tmp_path: Path) -> None:
    """In a repository that holds one scenario, without its simulated sweeps."""
    for name in ("lib", "data/models", "data/published", "data/results/h200_sxm"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "data/scenarios").mkdir()
    scenario = yaml.safe_load((paths.SCENARIOS / "h200.yml").read_text())
    scenario["sweeps"] = [s for s in scenario["sweeps"] if s.get("transport") != "simulated"]
    (tmp_path / "data/scenarios/h200.yml").write_text(yaml.safe_dump(scenario))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batchlab", "claims", *arguments],
            cwd=tmp_path / "lib",
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "BATCHLAB_ROOT": str(tmp_path)},
            timeout=120,
        )

    done = run("--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 50
    assert all(list(r) == ["number", "source", "text", "verdict", "evidence", "detail", "cells"] for r in rows)
    one = run("13", "31")
    assert (
        "13 (S0) REPRODUCED, evidence: measured" in one.stdout
        and "2 claims: 1 reproduced, 1 inconsistent" in one.stderr
    )
    wrong = run("51")
    assert wrong.returncode == 2 and "no claim 51" in wrong.stderr and wrong.stdout == ""


def test_a_published_table_is_read_once() -> None:
    assert data.table("s1-table-1") is data.table("s1-table-1") and texts(data.table("s1-table-1"), "engine")


# A second engine, other transports and other sweeps of the same body --------------------------------------------------


def crowded() -> tuple[Body, Body]:
    """Cells of vLLM in process, and the same with SGLang and vLLM over HTTP and a sweep of another purpose beside them,
    all of them much faster, shorter in budget and in requests."""
    alone = study().frame.assign(transport="inprocess")
    odd = {"output_throughput_tok_s": 7.0, "tpot_mean_ms": 0.3, "num_requests": 9}
    peer = scaled(alone, "sglang", **odd).assign(transport="http", engine_version="0.5.13", input_len=96)
    own = scaled(alone, "vllm", **odd).assign(transport="http", cell=lambda f: f["cell"] + "http")
    other = scaled(alone, "vllm", **odd).assign(sweep="recommended-prefill", cell=lambda f: f["cell"] + "other")
    low = peer.assign(max_num_tokens=64, sweep="http", cell=lambda f: f["cell"] + "low")
    return body(alone), body(pd.concat([alone, own, peer, other, low], ignore_index=True))


@pytest.mark.parametrize("number", [n for n in range(1, 51) if CLAIMS.claim(n).cells])
def test_other_engines_transports_and_sweeps_decide_nothing(number: int) -> None:
    alone, beside = crowded()
    a, b = judged(number, alone), judged(number, beside)
    assert (a.verdict, a.evidence) == (b.verdict, b.evidence) and "SGLang" not in b.detail
    if number not in (1, 2, 4, 5):  # which count all that vLLM ran
        assert (a.detail, a.cells, a.factor) == (b.detail, b.cells, b.factor)


def test_a_point_borrows_the_scatter_of_its_own_engine_and_transport() -> None:
    frame = study().frame.assign(transport="inprocess")
    peer = scaled(frame[frame["repeat"] == 0], "sglang").assign(transport="http")
    made = body(pd.concat([frame, peer], ignore_index=True)).points(("throughput",))
    reach = made["tpot_mean_ms_hi"].astype(float) - made["tpot_mean_ms_lo"].astype(float)
    assert reach[made["engine"] == "vllm"].notna().all()
    single = body(pd.concat([frame[(frame["repeat"] == 0) | (frame["max_batch_size"] == 4)], peer], ignore_index=True))
    known = single.noise("tpot_mean_ms")
    assert set(known) == {("vllm", "inprocess", False)} and known["vllm", "inprocess", False][1] > 0
