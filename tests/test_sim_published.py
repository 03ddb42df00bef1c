"""The simulated TensorRT-LLM against NVIDIA's published throughput, with nothing fitted to it."""

import pytest

from batchlab.sim.published import compare_published, error_summary, published_throughput, trtllm_bench_limits

pytest.importorskip("aiconfigurator_core")

NAMED = {(128, 128), (128, 2048), (500, 2000), (1000, 1000), (2048, 128), (2048, 2048), (5000, 500)}


@pytest.fixture(scope="module")
def compared():
    return compare_published()


def test_llama_8b_on_h200_and_h100_as_named_in_the_issue(compared):
    rows = [r for r in compared if r["model"] == "llama-3-8b" and (r["input_len"], r["output_len"]) in NAMED]
    summary = error_summary(rows)
    assert summary["rows"] == 14
    assert summary["mean_abs"] <= 0.06
    assert summary["max_abs"] <= 0.12


@pytest.mark.parametrize(
    ("model", "hardware"),
    [("llama-3-8b", "h200_sxm"), ("llama-3-8b", "h100_sxm"), ("llama-3-70b", "h200_sxm"), ("llama-3-70b", "h100_sxm")],
)
def test_every_published_row_of_each_model_and_card(compared, model, hardware):
    summary = error_summary([r for r in compared if (r["model"], r["hardware"]) == (model, hardware)])
    assert summary["rows"] == 10
    assert summary["mean_abs"] <= 0.06
    assert summary["max_abs"] <= 0.12


def test_the_other_memory_fraction_that_nvidia_used_changes_little():
    rows = [r for r in published_throughput() if r["model"] == "llama-3-8b" and r["num_requests"] < 30000]
    summary = error_summary(compare_published(rows, memory_fraction=0.95))
    assert summary["mean_abs"] <= 0.06 and summary["max_abs"] <= 0.12


def test_limits_that_trtllm_bench_chooses():
    """By hand: H200 with 130.5 GB beside 8.03 GB of weights, 64 KiB a token."""
    h200 = ("llama-3-8b", "h200_sxm", 1)
    few = trtllm_bench_limits(*h200, 2048, 2048, "fp8")  # 0.9 x 141.9e9 / 64 KiB / 4096 = 476 requests, up to 512
    assert (few.max_batch_size, few.max_num_tokens) == (512, 2048 + 512)
    many = trtllm_bench_limits(*h200, 128, 128, "fp8")  # 7,600 fit: capped at 4,096, with two tokens each
    assert (many.max_batch_size, many.max_num_tokens) == (4096, 8192)
    prompts = trtllm_bench_limits(*h200, 2048, 128, "fp8")  # 895 requests, 17 tokens each: 15,224
    assert (prompts.max_batch_size, prompts.max_num_tokens) == (896, 15360)


def test_the_table_has_its_rows():
    rows = published_throughput()
    assert len(rows) == 40
    first = rows[0]
    assert first == {
        "model": "llama-3-8b",
        "hardware": "h200_sxm",
        "tp": 1,
        "input_len": 128,
        "output_len": 128,
        "num_requests": 30000,
        "output_throughput_tok_s": 27911,
    }
