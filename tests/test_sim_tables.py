"""Step times: what is put together here against the package's own answers, and the stand-in."""

from itertools import pairwise

import numpy as np
import pytest

from batchlab.errors import UsageError
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import QUANTIZATIONS
from batchlab.sim.models import load_model
from batchlab.sim.power import PowerLimit, PowerLimited
from batchlab.sim.roofline import RooflineTimes
from batchlab.sim.tables import BATCH_GRID, CONTEXT_GRID, table_times
from sim_driver import HandTimes

pytest.importorskip("aiconfigurator_core")

NONE = QUANTIZATIONS["none"]
LLAMA = load_model("llama-3-8b")


@pytest.fixture(scope="module", params=[("a100_sxm", "vllm"), ("h200_sxm", "trtllm")], ids="-".join)
def times(request):
    card, backend = request.param
    return table_times(LLAMA, load_card(card), backend, NONE, 1)


def test_a_decode_step_is_the_packages(times):
    """At points of the grid, to rounding: the same operators, put together in the same way."""
    for batch, context in ((1, 64), (8, 256), (64, 1024), (256, 512)):
        ours = times.step_s([], batch, batch * (context - 1)) * 1e3
        assert ours == pytest.approx(times._engine.decode_step_latency(batch, context - 2, 2), rel=2e-3)


def test_interpolation_error_of_decode_steps(times):
    """Between the points of the grid: 0.02% on average and 0.5% at worst over 300 steps on each of five tables."""
    rng = np.random.default_rng(1)
    batches = rng.integers(1, 600, 60)
    contexts = np.exp(rng.uniform(np.log(32), np.log(6000), 60)).astype(int)
    ours = np.array([times.step_s([], int(b), int(b) * int(c)) for b, c in zip(batches, contexts, strict=True)])
    own = np.array(
        [
            times.shared_ms(int(b)) + times.logits_ms(int(b)) + attention(times, int(b), int(c) + 1)
            for b, c in zip(batches, contexts, strict=True)
        ]
    )
    error = np.abs(ours * 1e3 / own - 1)
    assert error.mean() < 0.001
    assert error.max() < 0.01


def attention(times, batch, context):
    return times._engine.evaluate_generation_ops(times._generation_op, batch_size=batch, s=context)[0][1]


def test_a_run_of_decode_steps_is_the_steps_one_by_one(times):
    run = times.decode_run_s(37, 37 * 100 + 11, 300)
    one_by_one = [times.step_s([], 37, 37 * 100 + 11 + 37 * i) for i in range(300)]
    np.testing.assert_allclose(run, one_by_one, rtol=1e-9)


def test_unequal_contexts_take_half_of_the_way_to_the_longest(times):
    """13 requests of 8 KV heads are 104 parts, fewer than the card's 108 or 132 multiprocessors: they end together."""
    uneven = times.step_s([], 13, 13 * 500, longest=900)
    assert uneven == pytest.approx(times.step_s([], 13, 13 * 700))
    assert times.decode_run_s(13, 13 * 500, 20, 900)[0] == pytest.approx(uneven)
    assert times.step_s([], 13, 13 * 500, longest=500) == times.step_s([], 13, 13 * 500)
    assert 501 < times._context_of(208, 208 * 500, 900) < 501 + 0.05 * 400, "many requests even out"


def test_padding_is_computed_but_attends_to_nothing(times):
    padded, full = times.step_s([], 13, 13 * 500, padding=3), times.step_s([], 16, 16 * 500)
    attention_ms = times.generation_ms(16, 501) - times.generation_ms(13, 501)
    logits_ms = times.logits_ms(16) - times.logits_ms(13)
    assert (full - padded) * 1e3 == pytest.approx(attention_ms + logits_ms)


def test_equal_prompts_are_one_batch_of_the_package(times):
    whole = times._engine.evaluate_context_ops(times._attention_op, batch_size=3, s=512)[0][1]
    assert times.prompts_ms([(512, 0)] * 3) == pytest.approx(whole, rel=1e-9)


def test_unequal_prompts_lie_between_equal_ones(times):
    """Same tokens, and more work the more unequal they are; one call costs its fixed part once."""
    even, uneven, one = (times.prompts_ms(p) for p in ([(512, 0)] * 2, [(256, 0), (768, 0)], [(1024, 0)]))
    assert even < uneven < one * 1.05
    assert times.prompts_ms([(512, 0), (64, 448)]) < times.prompts_ms([(512, 0)]) + times.prompts_ms([(64, 448)])


def test_a_step_grows_with_its_work(times):
    steps = [times.step_s([(n, 0)], 16, 16 * 500) for n in (64, 256, 1024, 4096)]
    assert steps == sorted(steps)
    assert times.step_s([], 64, 64 * 2000) > times.step_s([], 64, 64 * 200)


def test_grids_are_sorted_and_reach_far_enough():
    assert all(a < b for a, b in pairwise(BATCH_GRID)) and BATCH_GRID[-1] >= 4096
    assert (np.diff(CONTEXT_GRID) > 0).all() and CONTEXT_GRID[-1] == 131072


def test_beyond_the_grid_is_a_usage_error(times):
    with pytest.raises(UsageError, match="a context of 200001 tokens is over 131072"):
        times.step_s([], 1, 200_000)
    with pytest.raises(UsageError, match="a batch of 5000 is over 4096"):
        times.step_s([], 5000, 5000 * 10)


def test_provenance_names_package_versions_and_tables():
    provenance = table_times(LLAMA, load_card("a100_sxm"), "vllm", NONE, 1).provenance
    assert (provenance["package"], provenance["package_version"]) == ("aiconfigurator-core", "0.12.0")
    assert provenance["backend_version"] == ["0.14.0"]
    assert "data/a100_sxm/gemm/vllm/0.14.0/gemm_perf.parquet" in provenance["tables"]


def test_fp8_is_faster_where_there_is_such_arithmetic():
    h200 = load_card("h200_sxm")
    for backend in ("vllm", "trtllm", "sglang"):
        plain, fp8 = (table_times(LLAMA, h200, backend, QUANTIZATIONS[q], 1) for q in ("none", "fp8"))
        assert fp8.step_s([(2048, 0)], 64, 64 * 1000) < plain.step_s([(2048, 0)], 64, 64 * 1000)
    assert table_times(LLAMA, h200, "trtllm", QUANTIZATIONS["fp8"], 1).attention == "fp8"
    assert table_times(LLAMA, h200, "vllm", QUANTIZATIONS["fp8"], 1).attention == "bfloat16"  # no fp8 table of its own


def test_more_cards_are_faster_and_less_than_in_proportion():
    one, two, four = (table_times(LLAMA, load_card("h100_sxm"), "vllm", NONE, tp) for tp in (1, 2, 4))
    step = [t.step_s([(1024, 0)], 32, 32 * 500) for t in (one, two, four)]
    assert step[0] > step[1] > step[2] and step[0] < 4 * step[2]


def test_a_shape_without_tables_is_a_usage_error():
    with pytest.raises(UsageError, match=r"no measured operator times for tiny-llama.*roofline"):
        table_times(load_model("tiny-llama"), load_card("a100_sxm"), "vllm", NONE, 1)


def test_the_stand_in_says_that_it_is_one_and_is_near_the_tables():
    """The errors that roofline.py states; its own card has no tables, so this is the nearest check there is."""
    card = load_card("a100_sxm")
    roofline, tables = RooflineTimes(LLAMA, card, NONE, 1), table_times(LLAMA, card, "vllm", NONE, 1)
    assert roofline.provenance["kind"] == "roofline stand-in, not measured"
    steps = [([], n, n * 1000) for n in (1, 16, 64, 256)] + [([(n, 0)], 32, 32 * 1000) for n in (512, 2048)]
    errors = [abs(roofline.step_s(*s) / tables.step_s(*s) - 1) for s in steps]
    assert np.mean(errors) < 0.12 and max(errors) < 0.25


def test_the_stand_ins_runs_are_its_steps():
    roofline = RooflineTimes(LLAMA, load_card("a10g"), NONE, 1)
    run = roofline.decode_run_s(20, 20 * 100, 50)
    np.testing.assert_allclose(run, [roofline.step_s([], 20, 20 * (100 + i)) for i in range(50)], rtol=1e-12)
    two = RooflineTimes(LLAMA, load_card("a10g"), NONE, 2)
    assert two.step_s([(512, 0)], 4, 400) < roofline.step_s([(512, 0)], 4, 400)


def test_a_power_limit_slows_and_never_quickens(times):
    limit = PowerLimit(tflops=250, tbytes=2, reached_tflops=5000)
    limited = PowerLimited(times, limit, LLAMA, NONE, 1, window_s=0.0)
    for step in (([], 1, 100), ([], 256, 256 * 500), ([(4096, 0)], 0, 0), ([(512, 512)], 64, 64 * 900)):
        assert limited.step_s(*step) >= times.step_s(*step)
    np.testing.assert_allclose(
        limited.decode_run_s(200, 200 * 300, 40),
        [limited.step_s([], 200, 200 * (300 + i)) for i in range(40)],
        rtol=1e-9,
    )
    assert limited.provenance["power_limit"]["tflops"] == 250
    assert limited.provenance["package"] == "aiconfigurator-core"


# by hand, so many tokens through 6.98e9 parameters, one output layer, and half of n x n pairs of attention
PREFILL = 2 * LLAMA.layer_params * 4096 + 2 * 128256 * 4096 + 4 * 32 * 4096 * 4096**2 / 2
DECODES = 200 * (2 * LLAMA.layer_params + 2 * 128256 * 4096)


@pytest.mark.parametrize(
    ("step", "operations", "cached"),
    [(([(4096, 0)], 0, 0), PREFILL, 0), (([], 200, 200 * 500), DECODES, 200 * 500), (([], 1, 100), DECODES / 200, 100)],
    ids=["prompts", "decodes", "one token, held by its bytes"],
)
def test_the_clock_is_the_highest_whose_energy_fits_into_its_time(times, step, operations, cached):
    """Found here by trying clocks; the clock slows arithmetic and its energy, and neither memory nor its."""
    limit = PowerLimit(tflops=300, tbytes=3, reached_tflops=250)
    kv_bytes = 2 * 2 * 32 * 8 * 128
    moved_s = (LLAMA.weight_bytes_at(2) + kv_bytes * cached) / 3e12
    full_s = times.step_s(*step)
    arithmetic_s = times.step_s([], step[1], step[1]) if step[1] else full_s
    clocks = np.linspace(0.3, 1.0, 70_001)
    takes_s = full_s - arithmetic_s + np.maximum(arithmetic_s, operations / 250e12 / clocks)
    fits = clocks * operations / 300e12 + moved_s <= takes_s
    expected_s = takes_s[fits].min() if fits.any() else 0.3 * operations / 300e12 + moved_s
    limited = PowerLimited(times, limit, LLAMA, NONE, 1, window_s=0.0)
    assert limited.step_s(*step) == pytest.approx(expected_s, rel=1e-4)


def test_a_slower_card_meets_its_limit_as_much_later():
    limit = PowerLimit(tflops=300, tbytes=3, reached_tflops=500)
    assert limit.slower(1.25) == PowerLimit(240, 2.4, 400)


def test_power_is_saved_for_a_while():
    """Iterations of 1 s at full speed whose bytes' energy takes 1.4 s; 0.6 s may be saved, and are at the start."""
    limit = PowerLimit(tflops=1e6, tbytes=LLAMA.weight_bytes_at(2) / 1.4e12, reached_tflops=1e6)
    limited = PowerLimited(HandTimes(), limit, LLAMA, NONE, 1, window_s=0.6)
    np.testing.assert_allclose(limited.decode_run_s(1, 0, 4), [1.0, 1.2, 1.4, 1.4], atol=1e-3)
    limited.ran(1, 0.0)  # an arrival cut the run short: only what ran is taken
    assert limited.step_s([], 1, 0) == pytest.approx(1.2, abs=1e-3)
    limited.ran(1, 0.0)
    assert limited.step_s([], 1, 0) == pytest.approx(1.4, abs=1e-3)
    limited.ran(1, 0.3)  # it idled
    assert limited.step_s([], 1, 0) == pytest.approx(1.1, abs=1e-3)


def test_heads_that_vllm_was_not_measured_with_are_read_from_sglang():
    """Llama-2-7B has 32 KV heads and vLLM's tables at most 8. By hand: 32 layers of SGLang's 0.0825 ms (batch 32, 512
    tokens) and of what vLLM's call takes more at 8 KV heads, 0.0326 - 0.0280 ms.
    """
    llama2 = load_model("llama-2-7b")
    own = table_times(llama2, load_card("h200_sxm"), "vllm", NONE, 1)
    assert own.generation_ms(32, 512) == pytest.approx(32 * (0.0825 + 0.0326 - 0.0280), rel=0.01)
    assert "sglang" in own.provenance["generation_attention"]
    assert "generation_attention" not in table_times(LLAMA, load_card("h200_sxm"), "vllm", NONE, 1).provenance
