"""Simulated engines are engines: cells, records, frames and errors like any other's."""

import copy
import os

import pytest
import yaml

from batchlab import cli, metrics, paths, records, scenario, simulated, study
from batchlab.errors import UsageError
from batchlab.sim import POLICIES
from batchlab.store import Store

pytest.importorskip("aiconfigurator_core")

SMALL = {
    "title": "t",
    "hardware": "a100_sxm",
    "model": "llama-3-8b",
    "engines": {
        "vllm-v0": {"version": "0.6.2"},
        "stepwise": {"engine": "vllm-v0", "version": "0.6.2", "args": {"num-scheduler-steps": 8}},
        "vllm": {"version": "0.32.0"},
    },
    "datasets": {"short": {"input_len": 64, "output_len": 20}},
    "defaults": {"max_batch_size": 4, "max_num_tokens": 64},
    "num_requests": 12,
    "repeats": 1,
    "sweeps": [{"name": "throughput", "transport": "simulated", "max_batch_size": [2, 4], "max_num_tokens": 256}],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return tmp_path


def opened(folder, change=lambda raw: None):
    raw = copy.deepcopy(SMALL)
    change(raw)
    file = folder / "mine.yml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return study.open_study(file)


def test_the_names_of_the_policies_are_those_that_there_are():
    assert tuple(POLICIES) == scenario.POLICIES


def test_a_sweep_asks_the_engines_that_its_transport_can_run(here):
    planned = opened(here).planned
    assert [(p.engine, p.cell.engine, p.cell.evidence) for p in planned[::2]] == [
        ("vllm-v0", "vllm-v0", "simulated"),
        ("stepwise", "vllm-v0", "simulated"),
    ]
    real = opened(here, lambda s: s["sweeps"][0].update(transport="http")).planned
    assert {(p.engine, p.cell.evidence) for p in real} == {("vllm", "measured")}


def test_a_frame_of_simulated_cells(here):
    mine = opened(here)
    assert mine.can_measure() is None and len(mine.missing()) == 4
    frame = mine.ensure()
    assert frame["recorded"].all() and frame["valid"].all() and set(frame["evidence"]) == {"simulated"}
    assert list(frame["engine"]) == ["vllm-v0"] * 2 + ["stepwise"] * 2
    assert mine.missing() == [] and not (here / "results").exists()
    # a group of 8 decode iterations ends at the 24th, so the 19 after the first token cost more
    one, many = frame["output_throughput_tok_s"].to_numpy().reshape(2, 2)
    assert (many < one).all()
    assert mine.ensure().equals(frame)


def test_the_records_are_of_the_common_schema_and_recompute_to_the_frame(here):
    mine = opened(here)
    row = mine.ensure().iloc[0]
    recorded = simulated.store("a100_sxm").load(row["cell"])
    assert recorded.requests.schema == records.REQUESTS and recorded.iterations.schema == records.ITERATIONS
    requests, iterations = mine.requests(row["cell"]), mine.iterations(row["cell"])
    assert len(requests) == 12 and set(requests["tokens"]) == {20} and iterations["running"].max() == 2
    again = metrics.summary(requests, iterations, max_batch_size=2)
    for key in ("output_throughput_tok_s", "ttft_mean_ms", "tpot_mean_ms", "running_batch_mean", "kv_use_peak"):
        assert again[key] == pytest.approx(row[key], rel=1e-5)
    source = mine.provenance(row["cell"])
    assert source["engine"]["step_times"]["package"] == "aiconfigurator-core" and source["commit"]
    assert source["engine"]["step_times"]["tables"] and source["engine"]["host_overheads"]["fitted"] is False


def test_another_simulator_simulates_anew(here, monkeypatch):
    mine = opened(here)
    mine.ensure()
    monkeypatch.setattr(simulated, "digest", lambda: "another")
    assert len(mine.missing()) == 4 and not mine.frame()["recorded"].any()


def test_the_load_is_the_one_that_a_real_engine_gets(here):
    cell = opened(here, lambda s: s["sweeps"][0].update(request_rate=3)).planned[0].cell
    sent = simulated.arguments(cell)["requests"]
    assert sent[0] == (0.0, 64, 20) and sent[-1][0] == pytest.approx(11 / 3)
    from batchlab.workload import build

    load = build(cell.dataset, num_requests=12, request_rate=3.0, seed=0, nonce="n", vocab_size=1000)
    assert [r.scheduled_s for r in load.requests] == [at for at, *_ in sent]


def test_options_of_an_engine_reach_its_simulation(here):
    options = {"kv_cache_gib": 2, "tensor_parallel_size": 2, "args": {"kernels": "trtllm", "preemption_mode": "swap"}}
    cell = opened(here, lambda s: s["sweeps"][0].update(engine_options=options)).planned[0].cell
    call = simulated.arguments(cell)
    assert (call["tp"], call["memory"], call["kernels"]) == (2, {"kv_memory_gib": 2}, "trtllm")
    assert call["policy_options"]["preemption_mode"] == "swap"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda s: s.update(hardware="h20"),
            "mine.yml: unknown hardware 'h20'; with measured .*: a100_sxm",
        ),
        (lambda s: s.update(model="llama-9"), "mine.yml: unknown model 'llama-9'; data/models holds: .*llama-3-8b"),
        (
            lambda s: s["engines"]["stepwise"].update(engine="vllm-v2"),
            "mine.yml: engines.stepwise.engine: unknown name `vllm-v2`; did you mean `vllm-v[01]`",
        ),
        (
            lambda s: s["engines"]["stepwise"].update(args={"steps": 8}),
            "mine.yml: vllm-v0: unknown policy option 'steps'; there is: async_output_proc, num_scheduler_steps",
        ),
        (
            lambda s: s["engines"]["stepwise"].update(tensor_parallel_size=3),
            "mine.yml: vllm-v0, simulated: tensor_parallel_size 3: there is 1, 2, 4",
        ),
        (lambda s: s["engines"]["stepwise"].update(dtype="float32"), "dtype float32: there is bfloat16 and float16"),
        (
            lambda s: s["sweeps"][0].update(engines=["vllm"]),
            "sweeps.throughput: engine `vllm` has no transport `simulated`; these have it: vllm-v1, vllm-v0",
        ),
        (
            lambda s: s["sweeps"][0].update(engines=["stepwise"], transport="http"),
            "sweeps.throughput: engine `stepwise` has no transport `http`; these have it: vllm",
        ),
        (lambda s: s["engines"]["stepwise"].update(kv_cache_gib=1e-4), "mine.yml: no room for a KV cache"),
    ],
)
def test_a_mistake_is_one_line_that_lists_what_there_is(here, change, expected):
    with pytest.raises(UsageError, match=expected) as error:
        opened(here, change).ensure()
    assert "\n" not in str(error.value)


def test_commands_work_with_simulated_cells(here, capsys):
    opened(here)
    file = str(here / "mine.yml")
    assert cli.main(["plan", file]) == 0
    told = capsys.readouterr().out
    assert "4 cells, 0 recorded, 4 missing" in told and "0 engine starts" in told and "not here" not in told
    assert cli.main(["run", file, "--engine", "stepwise"]) == 0
    assert "2 cells simulated" in capsys.readouterr().err
    assert cli.main(["run", file]) == 0 and cli.main(["summary", file, "--json"]) == 0
    rows = yaml.safe_load(capsys.readouterr().out)
    assert [r["engine"] for r in rows] == ["vllm-v0"] * 2 + ["stepwise"] * 2
    assert all(r["evidence"] == r["transport"] == "simulated" for r in rows)


def test_a_record_is_read_once(here, monkeypatch):
    """Not once to see that it is there, and again for the frame."""
    mine = opened(here)
    mine.ensure()
    read, meta = [], Store.meta
    monkeypatch.setattr(Store, "meta", lambda self, cell_id: read.append(cell_id) or meta(self, cell_id))
    mine.ensure()
    assert sorted(read) == sorted(c.id for c in mine.cells())


def test_a_cell_that_is_asked_for_twice_is_simulated_once(here):
    mine = opened(here)
    cells = mine.cells()
    assert len(simulated.missing([*cells, *cells])) == len(cells) == mine.simulate([*cells, *cells])


def test_an_older_simulators_records_are_removed_but_the_last(here):
    folder = paths.BUILD / "simulated"
    for age, name in enumerate(("newest", "older", "oldest")):
        (folder / name / "h200_sxm").mkdir(parents=True)
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    opened(here).ensure()
    assert {p.name for p in folder.iterdir()} == {"newest", simulated.digest()}


def test_a_request_that_cannot_run_makes_an_invalid_cell(here):
    """vLLM V0 takes prompts whole: one longer than the budget is refused."""
    mine = opened(here, lambda s: s["datasets"].update(short={"input_len": 300, "output_len": 2}))
    (reasons,) = {tuple(r) for r in mine.ensure()["invalid_reasons"]}
    assert "12 of 12 requests failed: prompt of 300 tokens is over max_num_tokens 256" in reasons[0]


def test_the_article_is_simulated_in_full():
    mine = study.open_study("a100")
    main = [p for p in mine.planned if p.sweep in ("throughput", "latency")]
    assert len(main) == 640 and {p.cell.num_requests for p in main} == {1024}
    assert {p.engine for p in main} == {"vllm-v0", "vllm-v0-multi-step", "vllm-v1", "tensorrt-llm"}
    assert len({p.cell.id for p in main}) == 640
