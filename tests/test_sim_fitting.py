"""Fitting the host's time: known constants are found again, and the cells not fitted on are told apart."""

import pytest

from batchlab.errors import UsageError
from batchlab.sim import HostOverheads, simulate
from batchlab.sim.fitting import MeasuredCell, compare_cells, error_table, fit_host
from sim_driver import HandTimes

TRUE = HostOverheads(step_us=900, token_us=15, request_us=400)


def cell(name, batch, rate, host=TRUE, output=40):
    call = {
        "engine": "vllm-v1",
        "hardware": "h200_sxm",
        "model": "llama-3-8b",
        "requests": [(i / rate if rate else 0.0, 64, output) for i in range(60)],
        "max_batch_size": batch,
        "max_num_tokens": 512,
        "step_times": HandTimes(base=0.004, token=1e-5, context=1e-8),
    }
    return MeasuredCell(name, call, simulate(**call, host=host).figures())


@pytest.fixture(scope="module")
def cells():
    return [cell("a", 4, None), cell("b", 32, None), cell("c", 32, 40.0), cell("d", 16, None), cell("e", 8, 10.0)]


def test_known_constants_are_found_again(cells):
    fit = fit_host(cells, ["a", "b", "c"])
    assert fit.host.step_us == pytest.approx(TRUE.step_us, rel=0.05)
    assert fit.host.token_us == pytest.approx(TRUE.token_us, rel=0.2)
    assert fit.host.request_us == pytest.approx(TRUE.request_us, rel=0.25)
    assert (fit.fit_cells, fit.test_cells) == (["a", "b", "c"], ["d", "e"])
    assert {e["cell"] for e in fit.errors if e["fitted"]} == {"a", "b", "c"}
    for row in error_table(fit.errors):
        assert row["max_abs"] < 0.01, row


def test_fitted_on_nothing_means_no_overhead(cells):
    fit = fit_host(cells, [])
    assert fit.host == HostOverheads() and not fit.host.fitted
    throughput = next(row for row in error_table(fit.errors) if row["figure"] == "output_throughput_tok_s")
    assert throughput["mean"] > 0.1  # too fast by the missing host time
    assert throughput["cells"] == 5 and throughput["worst"] in "abcde"


def test_constants_do_not_go_below_zero():
    faster = [cell(n, b, None, HostOverheads()) for n, b in (("a", 4), ("b", 32))]
    for c in faster:
        c.measured["output_throughput_tok_s"] *= 1.2
        c.measured["tpot_mean_ms"] /= 1.2
    host = fit_host(faster, ["a", "b"]).host
    assert min(host.step_us, host.token_us, host.request_us) >= 0
    assert host.step_us < 1


def test_ttft_is_compared_at_finite_rates_only(cells):
    compared = compare_cells(cells, TRUE)
    assert {row["cell"] for row in compared if row["figure"] == "ttft_mean_ms"} == {"c", "e"}
    assert all(abs(row["error"]) < 1e-12 for row in compared)


def test_a_figure_that_was_not_measured_is_left_out():
    bare = MeasuredCell("x", cell("x", 4, None).call, {"tpot_mean_ms": 5.0, "output_throughput_tok_s": None})
    assert [row["figure"] for row in compare_cells([bare], TRUE)] == ["tpot_mean_ms"]


def test_a_fit_cell_that_is_not_there(cells):
    with pytest.raises(UsageError, match="fit cell 'z' is not among the 5 cells"):
        fit_host(cells, ["a", "z"])
