"""Known failures of benchmark programs, each with the tests that keep it out of here; and the tests that have no better
place: the warm-up, the estimate before a long sweep, and the sweep that one crash must not end."""

import ast
import math
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from batchlab import cli, estimate, measure, metrics, models, plan
from batchlab.client import Replay
from batchlab.errors import EngineError
from batchlab.progress import Progress
from batchlab.store import Store
from batchlab.study import Study
from test_search import SCENARIO, Toy, load

# what went wrong elsewhere (project and issue): the tests here, as file::function
KNOWN = {
    "vllm 15106, a chunk with the role alone counted as the first token": (
        "test_client_parsing::test_role_empty_and_usage_chunks_are_no_token",
        "test_client_replay::test_every_form_of_stream_is_counted_and_timed",
    ),
    "vllm 27485 and 37666, chunks counted as tokens": (
        "test_client_parsing::test_a_chunk_of_several_tokens_is_counted_by_its_ids",
        "test_client_parsing::test_a_chunk_of_several_tokens_is_counted_by_continuous_usage",
        "test_metrics::test_tpot_leaves_out_the_first_chunk_and_counts_tokens_not_chunks",
    ),
    "vllm 54101, waiting in the client left out of the times": (
        "test_client_replay::test_waiting_for_a_slot_is_not_hidden_in_an_open_loop",
        "test_metrics::test_ttft_is_counted_from_the_schedule_not_from_the_send",
    ),
    "vllm 54227 and 52884, aiperf 449, one seed in every cell, so that the prefix cache was measured": (
        "test_workload::test_prompts_differ_from_their_first_ids_on",
        "test_client_parsing::test_cached_tokens_come_from_usage",
        "test_validity::test_every_fault_of_a_request",
    ),
    "vllm 10847, prompts of another length once they were encoded again": (
        "test_workload::test_text_has_exactly_the_asked_tokens_after_encoding_again",
        "test_validity::test_every_fault_of_a_request",
    ),
    "vllm 24591, an input length of 1 gave an empty prompt": ("test_workload::test_a_prompt_of_one_token",),
    "vllm 21104, arrivals slower than asked for": (
        "test_workload::test_every_process_meets_the_asked_rate_exactly",
        "test_client_replay::test_requests_go_at_their_times_and_none_before",
        "test_validity::test_achieved_rate_below_the_asked_one",
    ),
    "vllm 16858, the first requests of a shape pay for what is compiled on first use": (
        "test_known_failures::test_a_shape_is_warmed_up_before_it_is_measured",
    ),
    "guidellm 216, negative times to first token": (
        "test_client_replay::test_a_chunk_is_never_seen_before_the_server_wrote_it",
        "test_client_replay::test_a_request_that_fails_has_one_line_and_null_times",
        "test_metrics::test_properties_of_any_requests",
    ),
    "guidellm 487, concurrency capped without a word": (
        "test_client_replay::test_concurrency_is_not_capped_by_the_limit_of_open_files",
        "test_client_replay::test_a_concurrency_that_the_system_cannot_hold_is_refused",
    ),
    "guidellm 93, a ramp at the start biases the rate": (
        "test_workload::test_a_ramp_has_the_mean_rate_of_its_ends",
        "test_validity::test_achieved_rate_below_the_asked_one",
    ),
    "guidellm 588, seven hours of sweep and no estimate of them": (
        "test_known_failures::test_a_long_sweep_says_so_before_it_begins",
        "test_known_failures::test_the_time_left_follows_what_cells_took",
    ),
    "aiperf 339, programs that disagree on the number of tokens": (
        "test_client_parsing::test_final_usage_that_differs_from_the_chunks_is_the_count_but_marked_as_unsure",
        "test_validity::test_every_fault_of_a_request",
        "test_definitions::test_each_definition_by_hand",
    ),
    "TensorRT-LLM 10824 and TGI 1944, an engine that stops early and nobody notices": (
        "test_client_parsing::test_the_engine_that_stopped_early_is_visible",
        "test_validity::test_every_fault_of_a_request",
    ),
    "vllm's sweep and llama.cpp 22815, one crash or lack of memory that ends the whole sweep": (
        "test_client_replay::test_an_engine_that_dies_in_the_run_makes_failed_rows_not_an_exception",
        "test_known_failures::test_a_crash_costs_its_cell_and_the_sweep_goes_on",
        "test_known_failures::test_an_engine_that_dies_again_and_again_costs_its_own_cells_only",
    ),
}


@pytest.mark.parametrize("failure", KNOWN)
def test_each_known_failure_has_its_tests(failure):
    for named in KNOWN[failure]:
        file, _, function = named.partition("::")
        tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, named


# the sweep --------------------------------------------------------------------------------------------------------


class Cold(Toy):
    """An engine whose first replay of a shape after its start takes a second longer; remembers what it was asked."""

    asked: ClassVar[list] = []

    def start(self, limits, tick=None):
        super().start(limits, tick)
        self.known = set()
        Cold.asked.append("start")

    def replay(self, workload, *, timeout_s, keep_chunks, progress=None):
        shape = (len(workload.requests[0].prompt_ids), workload.requests[0].output_len)
        Cold.asked.append((shape, len(workload.requests), tuple(workload.requests[0].prompt_ids[:8])))
        late = 0.0 if shape in self.known else 1.0
        self.known.add(shape)
        done = super().replay(workload, timeout_s=timeout_s, keep_chunks=keep_chunks, progress=progress)
        moved = [row | {k: row[k] + late for k in ("first_s", "last_s", "end_s")} for row in done.rows]
        return Replay(0, moved, {})


def sweep(tmp_path, monkeypatch, engine, **changes):
    """A study whose engine is this class, its cells and what measuring them did."""
    monkeypatch.setitem(measure.ENGINES, "vllm", engine)
    models.materialize("tiny-llama")
    Toy.starts = Toy.cells = 0
    Toy.dies_at = None
    Cold.asked = []
    loaded = load(**changes)
    return Study(loaded, plan.expand(loaded), Store(tmp_path))


TWO_SHAPES = {
    "datasets": {"short": {"input_len": 32, "output_len": 16}, "long": {"input_len": 64, "output_len": 8}},
    "sweeps": [{"name": "throughput", "max_batch_size": [2, 4], "repeats": 1}],
}


def test_a_shape_is_warmed_up_before_it_is_measured(tmp_path, monkeypatch):
    study = sweep(tmp_path, monkeypatch, Cold, **TWO_SHAPES)
    study.measure()
    frame = study.frame()
    assert frame["valid"].all() and frame["ttft_mean_ms"].max() < 1000  # the cold second is in no record
    replays = [a for a in Cold.asked if a != "start"]
    warm_ups = [a for a in replays if a[1] == measure.WARM_UP_REQUESTS]
    assert [shape for shape, _, _ in warm_ups] == [(32, 16), (64, 8)]  # the real lengths, once for each
    prompts = [first for _, _, first in replays]
    assert len(set(prompts)) == len(prompts)  # never a prompt that is measured, which would warm a prefix cache


def test_a_new_start_is_warmed_up_again(tmp_path, monkeypatch):
    study = sweep(tmp_path, monkeypatch, Cold, **TWO_SHAPES)
    Toy.dies_at = 2
    study.measure()
    frame = study.frame()
    assert Cold.asked.count("start") == 2 and int((~frame["valid"].astype(bool)).sum()) == 1
    assert frame.loc[frame["valid"].astype(bool), "ttft_mean_ms"].max() < 1000


def test_a_crash_costs_its_cell_and_the_sweep_goes_on(tmp_path, monkeypatch):
    study = sweep(tmp_path, monkeypatch, Toy)
    Toy.dies_at = 3
    outcome = study.measure()
    frame = study.frame().drop_duplicates("cell")
    assert (outcome.measured, outcome.invalid, outcome.failures) == (len(frame), 1, [])
    dead = frame[~frame["valid"].astype(bool)]
    assert dead["invalid_reasons"].tolist() == [["out of memory"]] and frame["recorded"].all() and Toy.starts == 2


def test_an_engine_that_dies_again_and_again_costs_its_own_cells_only(tmp_path, monkeypatch):
    class Hopeless(Toy):
        def replay(self, workload, **more):
            if self.transport == "http":
                raise EngineError("CUDA out of memory", "its last line")
            return super().replay(workload, **more)

        def __init__(self, spec, options, model, transport, *, log):
            super().__init__(spec, options, model, transport, log=log)
            self.transport = transport

    sweeps = [
        {"name": "served", "max_batch_size": [1, 2, 4, 8, 16], "repeats": 1},
        {"name": "inside", "transport": "inprocess", "max_batch_size": [1, 2, 4], "repeats": 1},
    ]
    study = sweep(tmp_path, monkeypatch, Hopeless, sweeps=sweeps)
    outcome = study.measure()
    assert study.frame("inside")["valid"].all()
    served = study.frame("served")
    assert int(served["recorded"].sum()) == measure.RESTARTS + 1 and not served["valid"].any()
    ((engine, reason, tail),) = outcome.failures
    assert engine == "vllm" and "CUDA out of memory (death 3" in reason and tail == "its last line"


# the time it takes ------------------------------------------------------------------------------------------------


def test_a_long_sweep_says_so_before_it_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("batchlab.paths.RESULTS", tmp_path)
    long = SCENARIO | {
        "sweeps": [{"name": "latency", "request_rate": 0.04, "max_batch_size": [1, 2, 4, 8, 16], "repeats": 4}],
        "num_requests": 50,
    }
    (tmp_path / "long.yml").write_text(yaml.safe_dump(long))
    assert cli.main(["plan", str(tmp_path / "long.yml")]) == 0
    told = capsys.readouterr().out
    # 20 cells of 50 requests at 0.04 a second: 20 x 1250 s of arrivals alone
    assert "20 missing: about 6 h 58 min" in told or "20 missing: about 7 h" in told, told.splitlines()[-3:]
    assert "1 engine start included" in told


def test_the_time_left_follows_what_cells_took(monkeypatch, capsys):
    cells = plan.unique(plan.expand(load()))[:4]
    clock = [0.0]
    monkeypatch.setattr("batchlab.progress.time.monotonic", lambda: clock[0])
    estimator = estimate.Estimator((0.0, 0.0, 10.0), 0.0, 0)  # starts, which count too, take no time here
    progress = Progress(total=4, estimator=estimator, left=list(cells))
    assert math.isclose(progress.remaining_s(), sum(estimator.seconds(c) for c in cells))
    before = progress.remaining_s()
    progress.begin(cells[0])
    clock[0] += 2 * estimator.seconds(cells[0])  # twice as long as expected
    progress.end(cells[0], [])
    assert progress.remaining_s() == pytest.approx(2 * (before - estimator.seconds(cells[0])))
    assert "left" in capsys.readouterr().err


def test_the_figures_of_a_crashed_cell_are_null(tmp_path, monkeypatch):
    study = sweep(tmp_path, monkeypatch, Toy)
    Toy.dies_at = 1
    study.measure()
    dead = study.frame().drop_duplicates("cell").query("valid == False").iloc[0]
    figures = [k for k in metrics.SUMMARY_KEYS if k.startswith(("ttft", "tpot", "e2e", "output_", "request_"))]
    assert all(dead[k] is None or math.isnan(dead[k]) for k in figures)
