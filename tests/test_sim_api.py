"""`simulate` from names to records: errors that list what there is, memory, several cells, equal kernels."""

import json

import pytest

from batchlab.errors import UsageError
from batchlab.models import Shape
from batchlab.sim import POLICIES, HostOverheads, simulate
from batchlab.sim.grid import simulate_many
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import GIB, kv_blocks, load_quantization
from batchlab.sim.models import load_model
from batchlab.sim.policies import Limits
from sim_driver import HandTimes

pytest.importorskip("aiconfigurator_core")

REQUESTS = [(0.0, 128, 64)] * 40
CALL = {
    "engine": "vllm-v1",
    "hardware": "h200_sxm",
    "model": "llama-3-8b",
    "requests": REQUESTS,
    "max_batch_size": 16,
    "max_num_tokens": 2048,
}


@pytest.mark.parametrize("engine", POLICIES)
@pytest.mark.parametrize("hardware", ["h200_sxm", "a100_sxm", "a10g"])
def test_every_engine_runs_on_cards_with_and_without_tables(engine, hardware):
    result = simulate(**CALL | {"engine": engine, "hardware": hardware})
    assert [row["tokens"] for row in result.rows] == [64] * 40
    # no step can be shorter than reading the weights once
    roof = 16 * load_card(hardware).bandwidth / load_model("llama-3-8b").weight_bytes_at(2)
    assert 0.25 * roof < result.output_throughput_tok_s < roof
    assert json.loads(json.dumps(result.provenance)) == result.provenance
    measured = result.provenance["step_times"]["kind"]
    assert measured == (
        "roofline stand-in, not measured" if hardware == "a10g" else "operator times measured on silicon"
    )


def test_a_faster_card_is_faster():
    a100, h200 = (simulate(**CALL | {"hardware": h}).output_throughput_tok_s for h in ("a100_sxm", "h200_sxm"))
    assert h200 > 1.5 * a100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "vlm"}, "unknown engine 'vlm'; simulated are: vllm-v1, vllm-v0, tensorrt-llm, tgi, sglang, static"),
        ({"hardware": "h20"}, "unknown hardware 'h20'; with measured operator times: a100_sxm, .*h200_sxm.*a10g"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'; data/models holds: .*llama-3-8b"),
        ({"quantization": "int4"}, "unknown quantization 'int4'; there is: none, fp8"),
        ({"quantization": "fp8", "hardware": "a100_sxm"}, "a100_sxm has no fp8 arithmetic"),
        ({"policy_options": {"x": 1}}, "unknown policy option 'x'; there is: async_scheduling"),
        ({"kernels": "tgi"}, "unknown kernels 'tgi'; there is: vllm, trtllm, sglang"),
        ({"step_times": "guess"}, "unknown step_times 'guess'; there is: auto, tables, roofline"),
        ({"tp": 3}, "tp 3: simulated are 1, 2, 4 cards"),
        ({"concurrency": 0}, "concurrency 0 must be 1 or more"),
        ({"max_batch_size": 0}, "max_batch_size 0"),
        ({"requests": [(0.0, 0, 5)]}, r"request 0: .*\(0.0, 0, 5\)"),
        ({"requests": [(float("inf"), 4, 5)]}, "request 0: "),
        ({"memory": {"gpu": 1}}, "memory: unknown key 'gpu'; there is: memory_fraction"),
        ({"memory": {"kv_blocks": 4, "kv_tokens": 64}}, "give one of kv_blocks and kv_tokens, not both"),
        ({"memory": {"memory_fraction": 1.5}}, r"memory_fraction 1.5 is not in \(0, 1\]"),
        ({"model": "llama-3-70b", "hardware": "a100_sxm"}, "no room for a KV cache: llama-3-70b"),
    ],
)
def test_bad_input_is_one_line_that_lists_what_there_is(change, message):
    with pytest.raises(UsageError, match=message) as raised:
        simulate(**CALL | change)
    assert "\n" not in str(raised.value)


def test_a_config_that_is_not_a_dense_decoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(UsageError, match="lacks hidden_size"):
        load_model(str(tmp_path))
    mixture = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(mixture | {"num_local_experts": 8}))
    with pytest.raises(UsageError, match="mixture of experts"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    assert load_model(str(tmp_path)).head_dim == 16


def test_sizes_of_llama_3_8b():
    shape = load_model("llama-3-8b")
    assert shape.layer_params + shape.embedding_params == pytest.approx(8.03e9, rel=1e-3)
    assert shape.kv_bytes_at(2) == 128 * 1024
    assert shape.kv_bytes_at(1, tp=4) == 16 * 1024
    assert shape.kv_bytes_at(2, tp=8) == 16 * 1024


def test_kv_memory_by_hand():
    """vLLM on an A100: 0.9 of the card, less weights, activations and the runtime's GiB."""
    card, shape = load_card("a100_sxm"), load_model("llama-3-8b")
    limits, none = Limits(256, 2048), load_quantization("none", card)
    blocks, how = kv_blocks(POLICIES["vllm-v0"], shape, card, none, 1, limits)
    activations = max(2048 * (2 * 4096 + 3 * 14336) * 2, 256 * 128256 * 6)
    expected = 0.9 * 0.99 * 80 * GIB - shape.weight_bytes_at(2) - activations - GIB
    assert blocks.total == int(expected // (16 * 128 * 1024))
    assert how["from"] == "estimated" and how["tokens"] == blocks.total * 16
    free, _ = kv_blocks(POLICIES["tensorrt-llm"], shape, card, none, 1, limits)
    rest = 0.99 * 80 * GIB - shape.weight_bytes_at(2) - activations - GIB
    assert free.total == int(0.9 * rest // (64 * 128 * 1024))


@pytest.mark.parametrize(
    ("override", "tokens"), [({"kv_blocks": 100}, 1600), ({"kv_tokens": 3210}, 3200), ({"kv_memory_gib": 0.5}, 4096)]
)
def test_kv_memory_as_given(override, tokens):
    result = simulate(**CALL | {"memory": override, "requests": REQUESTS[:4]})
    assert result.provenance["kv"]["tokens"] == tokens
    assert "as given" in result.provenance["kv"]["from"]


def test_fp8_halves_the_weights_and_doubles_the_tokens():
    plain, fp8 = (simulate(**CALL | {"quantization": q}).provenance["kv"]["tokens"] for q in ("none", "fp8"))
    assert fp8 > 2 * plain


def test_two_cards_hold_more():
    one, two = (simulate(**CALL | {"tp": tp}).provenance["kv"]["tokens"] for tp in (1, 2))
    assert two > 2 * one


def test_equal_kernels_leave_the_scheduling_apart():
    own = simulate(**CALL | {"engine": "tensorrt-llm"})
    equal = simulate(**CALL | {"engine": "tensorrt-llm", "kernels": "vllm"})
    assert equal.provenance["step_times"]["backend"] == "vllm" and own.provenance["step_times"]["backend"] == "trtllm"
    assert equal.iterations["running"].to_pylist() == own.iterations["running"].to_pylist()
    assert equal.output_throughput_tok_s != own.output_throughput_tok_s


def test_figures_are_the_definitions():
    result = simulate(**CALL | {"requests": [(0.0, 10, 3), (0.0, 10, 1)], "step_times": HandTimes()})
    assert result.figures() == {
        "output_throughput_tok_s": pytest.approx(4 / 3),
        "ttft_mean_ms": pytest.approx(1000),
        "tpot_mean_ms": pytest.approx(1000),
        "running_batch_mean": pytest.approx(4 / 3),
        "preemptions": 0,
    }
    assert "rows" not in vars(result) and "iterations" not in vars(result)  # made when they are asked for
    assert result.duration_s == max(r["last_s"] for r in result.rows) - min(r["scheduled_s"] for r in result.rows)


def test_nothing_to_do_and_nothing_done():
    assert simulate(**CALL | {"requests": []}).rows == []
    refused = simulate(**CALL | {"memory": {"kv_blocks": 4}, "requests": [(0.0, 500, 10)]})
    assert refused.figures()["output_throughput_tok_s"] is None and refused.iterations.num_rows == 0


def position_and_throughput(position, result):
    return position, result.output_throughput_tok_s


@pytest.mark.parametrize("processes", [1, 2])
def test_many_calls_come_back_in_order(processes):
    calls = [CALL | {"max_batch_size": b} for b in (2, 4, 8, 16)]
    results = simulate_many(calls, position_and_throughput, processes=processes)
    assert [position for position, _ in results] == [0, 1, 2, 3]
    assert [speed for _, speed in results] == [simulate(**call).output_throughput_tok_s for call in calls]


def test_an_error_of_one_of_many_is_raised():
    with pytest.raises(UsageError, match="unknown engine"):
        simulate_many([CALL, CALL | {"engine": "none"}], position_and_throughput, processes=2)


def test_host_overheads_slow_it_down():
    slower = simulate(**CALL, host=HostOverheads(step_us=1000))
    assert slower.figures()["tpot_mean_ms"] == pytest.approx(simulate(**CALL).figures()["tpot_mean_ms"] + 1, rel=0.05)


def test_a_shape_of_ones_own_runs_by_roofline_only():
    shape = Shape(8, 1024, 8, 8, 128, 4096, 32000, 2048, True, "bfloat16", name="mine")
    assert simulate(**CALL | {"model": shape, "step_times": "roofline"}).output_throughput_tok_s > 0
    with pytest.raises(UsageError, match=r"a folder with its config\.json is needed"):
        simulate(**CALL | {"model": shape})
