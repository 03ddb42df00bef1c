"""Fitting the host's time: known constants are found again, and the cells not fitted on are told apart."""

from dataclasses import replace

import numpy as np
import pytest

from batchlab import paths
from batchlab.errors import UsageError
from batchlab.sim import HostOverheads, PowerLimit, simulate
from batchlab.sim.fitted import fitted, fitted_constants
from batchlab.sim.fitting import MeasuredCell, compare_cells, error_table, fit_constants
from batchlab.sim.host import LaunchTrace, launch_times
from batchlab.sim.measured import measured_cell, simulated_engine
from batchlab.store import Store
from batchlab.validation import GOALS
from sim_driver import HandTimes

TRUE = HostOverheads(
    step_us=900,
    token_us=40,
    request_us=400,
    message_us=1500,
    prompt_us=2500,
    launch_us=1000,
    pieces_us=300,
    eager_us=250,
)


def cell(name, batch, rate, host=TRUE, output=40, power=None, prompt=64):
    call = {
        "engine": "vllm-v1",
        "hardware": "h200_sxm",
        "model": "llama-3-8b",
        "requests": [(i / rate if rate else 0.0, prompt, output) for i in range(60)],
        "max_batch_size": batch,
        "max_num_tokens": 2048,
        "step_times": HandTimes(base=0.004, token=1e-5, context=1e-8),
    }
    result = simulate(**call, host=host, power=power)
    if rate is None:
        return MeasuredCell(name, call, result.figures(), host.request_us)
    launch = launch_times(result.iterations, 32, 512)
    return MeasuredCell(name, call, result.figures(), None, host.message_us, launch)


@pytest.fixture(scope="module")
def cells():
    made = [cell("a", 4, None), cell("b", 32, None), cell("c", 32, 40.0), cell("d", 16, None), cell("e", 8, 10.0)]
    # over 512 tokens, so that nothing is recorded for their prompts
    return [*made, cell("f", 8, None, prompt=600), cell("g", 32, 20.0, prompt=600)]


def test_known_constants_are_found_again(cells):
    fit = fit_constants(cells, ["a", "b", "e", "f", "g"], power=False)
    assert fit.host.step_us == pytest.approx(TRUE.step_us, rel=0.05)
    assert fit.host.token_us == pytest.approx(TRUE.token_us, rel=0.25)
    assert fit.host.request_us == TRUE.request_us  # not fitted: the time between two requests sent
    assert fit.host.message_us == TRUE.message_us  # nor this: the way of a first token to the client
    assert fit.host.prompt_us == pytest.approx(TRUE.prompt_us, rel=0.15)
    assert fit.power is None
    for name in ("launch_us", "pieces_us", "eager_us"):  # nor these: iterations show them
        assert getattr(fit.host, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert (fit.fit_cells, fit.test_cells) == (["a", "b", "e", "f", "g"], ["c", "d"])
    assert {e["cell"] for e in fit.errors if e["fitted"]} == {"a", "b", "e", "f", "g"}
    for row in error_table(fit.errors):
        # launches are medians of what iterations show, and TTFT is made of little else
        assert row["max_abs"] < (0.03 if row["figure"] == "ttft_mean_ms" else 0.01), row


def test_fitted_on_nothing_means_no_overhead(cells):
    fit = fit_constants(cells, [])
    assert fit.host == HostOverheads() and not fit.host.fitted and fit.power is None
    throughput = next(row for row in error_table(fit.errors) if row["figure"] == "output_throughput_tok_s")
    assert throughput["mean"] > 0.1  # too fast by the missing host time
    assert throughput["cells"] == 7 and throughput["worst"] in "abcdefg"


def test_the_clients_messages_are_a_line_over_the_requests_that_run(cells):
    shown = [(10.0, 1300.0), (50.0, 2500.0), (90.0, 3700.0)]
    told = [replace(c, running=r, message_us=us) for c, (r, us) in zip(cells[:3], shown, strict=True)]
    host = fit_constants(told, ["a", "b", "c"], power=False).host
    assert (host.message_us, host.stream_us) == (pytest.approx(1000, abs=1), pytest.approx(30, abs=0.1))


def test_a_run_whose_launches_are_known_is_fitted_with_them():
    """Launches of 30 ms in the first half and 5 ms in the second: no constant stands for both, and none has to."""
    took = [[i / 10, 30_000 if i < 15 else 5_000] for i in range(30)]
    slow_then_quick = LaunchTrace(np.empty((0, 2)), np.array(took))
    host = replace(TRUE, launch_us=0, pieces_us=0, eager_us=0)
    made = []
    for name, batch, rate in (("a", 8, 20.0), ("b", 32, 20.0), ("c", 4, None), ("d", 32, None)):
        one = cell(name, batch, rate, host, prompt=600)
        result = simulate(**one.call, host=host, launches=slow_then_quick)
        made.append(replace(one, measured=result.figures(), launch=None, launches=slow_then_quick))
    fit = fit_constants(made, ["a", "b", "c", "d"], power=False)
    assert made[0].launches.launch_s(0.0, prompts=False, recorded=True) is None  # of decodes alone it says nothing
    without, known = compare_cells(made, fit.host), compare_cells(made, fit.host, replay=True)
    assert max(abs(r["error"]) for r in known) < 0.02 < max(abs(r["error"]) for r in without)


def test_constants_do_not_go_below_zero():
    faster = [cell(n, b, None, HostOverheads()) for n, b in (("a", 4), ("b", 32))]
    for c in faster:
        c.measured["output_throughput_tok_s"] *= 1.2
        c.measured["tpot_mean_ms"] /= 1.2
    host = fit_constants(faster, ["a", "b"], power=False).host
    assert min(host.step_us, host.token_us, host.request_us) >= 0
    assert host.step_us < 1


def test_ttft_is_compared_at_finite_rates_only(cells):
    compared = compare_cells(cells, TRUE)
    assert {row["cell"] for row in compared if row["figure"] == "ttft_mean_ms"} == {"c", "e", "g"}
    assert all(abs(row["error"]) < 1e-12 for row in compared)


def test_a_power_limit_is_found_again():
    limit = PowerLimit(tflops=150, tbytes=3, reached_tflops=200)
    quick = replace(TRUE, pieces_us=0)  # else prompts this short wait for the host, not for power
    limited = [
        cell(f"{b}-{r}", b, r, quick, output=30, power=limit)
        for b, r in ((2, None), (16, None), (64, None), (16, 20.0))
    ]
    fit = fit_constants(limited, [c.name for c in limited])
    assert fit.power.tflops == pytest.approx(limit.tflops, rel=0.15)
    assert fit.power.tbytes == pytest.approx(limit.tbytes, rel=0.15)
    assert all(row["max_abs"] < 0.04 for row in error_table(fit.errors, fitted=True))


def test_a_figure_that_was_not_measured_is_left_out():
    bare = MeasuredCell("x", cell("x", 4, None).call, {"tpot_mean_ms": 5.0, "output_throughput_tok_s": None})
    assert [row["figure"] for row in compare_cells([bare], TRUE)] == ["tpot_mean_ms"]


def test_a_fit_cell_that_is_not_there(cells):
    with pytest.raises(UsageError, match="fit cell 'z' is not among the 7 cells"):
        fit_constants(cells, ["a", "z"])


def test_the_h200_meets_its_goals_on_cells_that_nothing_was_fitted_on():
    """The recorded cells named in fitted.json, simulated with its constants and nothing known of their machines."""
    pytest.importorskip("aiconfigurator_core")
    entry, store = fitted("h200_sxm"), Store(paths.RESULTS / "h200_sxm")
    assert not set(entry["fit_cells"]) & set(entry["test_cells"]) and len(entry["fit_cells"]) == 28
    cells = [measured_cell(store.load(cell_id)) for cell_id in entry["test_cells"]]
    errors = compare_cells(cells, **fitted_constants("vllm-v1", "h200_sxm"))
    table = {row["figure"]: row for row in error_table(errors)}
    assert table["output_throughput_tok_s"]["cells"] >= 160
    for figure, mean in GOALS.items():
        assert table[figure]["mean_abs"] <= mean, table[figure]


def test_the_batch_runs_as_measured_without_any_fit():
    """The schedulers agree: with all requests at once, the running batch is right to 2% in every cell."""
    pytest.importorskip("aiconfigurator_core")
    entry, store = fitted("h200_sxm"), Store(paths.RESULTS / "h200_sxm")
    cells = [measured_cell(store.load(cell_id)) for cell_id in entry["test_cells"]]
    errors = compare_cells([c for c in cells if not c.finite_rate], HostOverheads())
    running = next(row for row in error_table(errors) if row["figure"] == "running_batch_mean")
    assert running["cells"] >= 70 and running["max_abs"] < 0.02 and running["mean_abs"] < 0.005


def test_fitted_constants_go_where_they_belong():
    own = fitted_constants("vllm-v1", "h200_sxm")
    assert own["host"].fitted and own["power"].tflops > 100
    assert set(fitted_constants("tensorrt-llm", "h200_sxm")) == {"power"}
    assert fitted_constants("vllm-v1", "h200_sxm", "fp8") == {} == fitted_constants("vllm-v1", "a100_sxm")


def test_an_engine_that_no_policy_stands_for():
    assert simulated_engine("vllm", "0.6.2") == "vllm-v0" and simulated_engine("vllm", "0.26.0") == "vllm-v1"
    with pytest.raises(UsageError, match="no policy stands for engine 'lmdeploy'; there is one for: vllm"):
        simulated_engine("lmdeploy", "1.0")
