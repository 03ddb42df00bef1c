"""TensorRT-LLM's YAML and flags never share a key, and its iterations are read from every form it tells them in."""

from calendar import timegm
from pathlib import Path
from time import strptime

import pytest
import yaml

from batchlab import models
from batchlab.client.clock import offset_ns
from batchlab.engines import tensorrt_llm, tools
from batchlab.engines import tensorrt_llm_log as log
from batchlab.engines.tensorrt_llm import TensorRtLlmEngine
from batchlab.errors import UsageError
from batchlab.scenario import EngineSpec, Limits

LIMITS = Limits(max_batch_size=256, max_num_tokens=4096)


def old(number, host_ms, stamp, scheduled=32, context=1, device="6.9ms"):
    """A line of releases up to 1.2; times and counts are invented."""
    return (
        f"[07/07/2026-00:00:00] [TRT-LLM] [I] iter = {number}, global_rank = 0, rank = 0, "
        "currank_total_requests = 0/0, "
        f"host_step_time = {host_ms}ms, prev_device_step_time = {device}, timestamp = {stamp}, num_scheduled_requests: "
        f"{scheduled}, states = {{'num_ctx_requests': {context}, 'num_ctx_tokens': {128 * context}, "
        f"'num_generation_tokens': {scheduled - context}}}"
    )


def new(number, host_ms, stamp):
    return (
        f"[08/19/2026-14:11:49] [TRT-LLM] [I] [_torch][RANK 0] iter = {number}, global_rank = 0, rank = 0, "
        "num_scheduled_requests = 3, kv_cache_util = 0.112, currank_total_requests = 0/1, "
        f"host_step_time = {host_ms}ms, prev_device_step_time = 243.13ms, timestamp = {stamp}, states = "
        "{'num_ctx_requests': 1, 'num_ctx_tokens': 4, 'num_generation_tokens': 7, 'cached_kv_tokens': 0}"
    )


def stat(number, stamp="08-19-2026 14:11:49.250000", **more):
    """An object of GET /metrics, as far as it is read."""
    return {
        "timestamp": stamp,
        "iter": number,
        "iterLatencyMS": 7.0,
        "numActiveRequests": 33,
        "numQueuedRequests": 4,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 25},
        "inflightBatchingStats": {
            "numScheduledRequests": 32,
            "numContextRequests": 1,
            "numGenRequests": 31,
            "numPausedRequests": 2,
            "numCtxTokens": 128,
        },
    } | more


def engine(tmp_path, monkeypatch, options=None, **spec):
    monkeypatch.setattr(TensorRtLlmEngine, "find", classmethod(lambda cls, spec: ["trtllm-serve"]))
    files = models.materialize("tiny-llama")
    one = TensorRtLlmEngine(EngineSpec(version="1.2.1", **spec), options or {}, files, "http", log=tmp_path / "log")
    one._work = tmp_path
    return one


def seconds(text):
    return timegm(strptime(text, "%Y-%m-%d %H:%M:%S"))


def test_no_key_is_both_a_flag_and_in_the_yaml(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch, {"max_model_len": 256, "tensor_parallel_size": 2, "dtype": "bfloat16"})
    model, *words = one.arguments(LIMITS, "127.0.0.1", 8001)
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert model == str(one.model.path)
    assert told["--max_batch_size"] == "256" and told["--max_num_tokens"] == "4096" and told["--max_seq_len"] == "256"
    file = yaml.safe_load(Path(told["--extra_llm_api_options"]).read_text())
    assert not {flag.strip("-") for flag in told} & set(file)
    assert "free_gpu_memory_fraction" in file["kv_cache_config"] and not any("fraction" in flag for flag in told)


def test_what_a_fair_sweep_needs_is_in_the_yaml(tmp_path, monkeypatch):
    shape = models.shape("tiny-llama")
    options = {"kv_cache_gib": 640 * shape.kv_bytes_per_token / 2**30, "gpu_memory_utilization": 0.8}
    keys = engine(tmp_path, monkeypatch, options).yaml(LIMITS)
    assert keys["kv_cache_config"] == {
        "enable_block_reuse": False,
        "free_gpu_memory_fraction": 0.8,
        "max_tokens": 640,
    }
    assert keys["cuda_graph_config"]["max_batch_size"] == 256 and keys["print_iter_log"] is True
    assert keys["load_format"] == "dummy"


def test_args_nest_at_dots_and_leave_the_limits_alone(tmp_path, monkeypatch):
    options = {
        "args": {"scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION", "enable-chunked-prefill": True}
    }
    keys = engine(tmp_path, monkeypatch, options).yaml(LIMITS)
    assert keys["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert keys["enable_chunked_prefill"] is True
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"args\.max_batch_size: set by the sweep's limits"):
        TensorRtLlmEngine.find(EngineSpec(version="1.2.1", args={"max_batch_size": 4}))


def test_both_formats_of_the_log_are_read():
    (first,) = log.steps([old(154, 7.1, "2026-07-07 00:00:00")])
    assert (first.number, first.scheduled, first.prefill_tokens, first.decode_tokens) == (154, 32, 128, 31)
    assert (first.host_ms, first.kv_use) == (7.1, None)
    (second,) = log.steps(["noise", new(2, 4.08, "2026-08-19 14:11:49"), "iter = 3, but no iteration"])
    assert (second.scheduled, second.prefill_tokens, second.decode_tokens, second.kv_use) == (3, 4, 7, 0.112)


def test_a_first_iteration_has_no_device_time():
    (first,) = log.steps([old(0, 7.1, "2026-07-07 00:00:00", device="N/A")])
    assert first.device_ms is None and first.took_s == pytest.approx(0.0071)


def test_whole_seconds_and_step_times_give_exact_times_back():
    """300 steps of 20 ms from 10:00:00.730 on, each stamped with its second only."""
    begin = seconds("2026-11-30 10:00:00") + 0.730
    truth = [begin + 0.020 * n for n in range(300)]
    lines = [
        old(n, 20.0, f"2026-11-30 10:00:{int(t - seconds('2026-11-30 10:00:00')):02d}", device="19.0ms")
        for n, t in enumerate(truth)
    ]
    found = log.ends(log.steps(lines))
    assert max(abs(a - b) for a, b in zip(found, truth, strict=True)) <= 0.011  # half a step


def test_a_gap_that_no_step_accounts_for_begins_a_new_stretch():
    lines = [
        *(old(n, 20.0, "2026-11-30 10:00:00") for n in range(3)),
        *(old(n, 20.0, "2026-11-30 10:00:30") for n in range(3, 6)),
    ]
    found = log.ends(log.steps(lines))
    assert found[2] < seconds("2026-11-30 10:00:01") and found[3] >= seconds("2026-11-30 10:00:30")


def test_the_wait_of_an_idle_engine_is_no_iteration_time():
    lines = [
        old(1, 20.0, "2026-11-30 10:00:00"),
        old(2, 5000.0, "2026-11-30 10:00:05"),
        old(3, 21.0, "2026-11-30 10:00:05"),
    ]
    waited = log.steps(lines)[1]
    assert waited.took_s == pytest.approx(0.0069)  # its device step, which the next line tells


def test_metrics_fill_in_what_the_log_does_not_tell():
    steps = log.steps([new(2, 4.08, "2026-08-19 14:11:49"), new(3, 4.08, "2026-08-19 14:11:49")])
    t0 = round((seconds("2026-08-19 14:11:49")) * 1e9) + offset_ns()
    first, second = log.rows(steps, [stat(2), stat(9)], t0, (256, 4096), since=0.0)
    assert (first["waiting"], first["admitted"], first["preemptions"], first["kv_use"]) == (4, 33, 2, 0.25)
    assert first["output_s"] == pytest.approx(0.25, abs=1e-4) and first["running"] == 3
    assert (second["waiting"], second["admitted"], second["preemptions"], second["kv_use"]) == (None, None, None, 0.112)


def test_metrics_alone_and_without_what_is_older_than_the_cell():
    at = seconds("2026-08-19 14:11:49")
    (row,) = log.rows([], [stat(1, "08-19-2026 14:11:40.000000"), stat(2)], 0, (256, 4096), since=at)
    assert (row["running"], row["prefill_tokens"], row["decode_tokens"]) == (32, 128, 31)
    assert (row["max_batch_size"], row["max_num_tokens"]) == (256, 4096)


@pytest.mark.parametrize("answer", [[], None, "not JSON", [{"other": 1}]])
def test_the_log_serves_alone_when_metrics_give_nothing(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(tensorrt_llm, "ask", lambda url, timeout_s=0: answer)
    one = engine(tmp_path, monkeypatch)
    one.limits = LIMITS
    one.log.write_text(new(2, 4.08, "2026-08-19 14:11:49") + "\n")
    traced = one.read(0)
    assert traced.source == "log" and len(traced.iterations) == 1
    assert any("/metrics gave nothing" in line for line in traced.unchecked)


def test_nothing_at_all_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorrt_llm, "ask", lambda url, timeout_s=0: [])
    one = engine(tmp_path, monkeypatch)
    one.limits = LIMITS
    one.log.write_text("")
    assert one.read(0).source == "none"


def test_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("BATCHLAB_TENSORRT_LLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no trtllm-serve on the PATH; runtime: container"):
        TensorRtLlmEngine.find(EngineSpec(version="1.2.1"))
    (tmp_path / "trtllm-serve").write_text("#!/bin/sh\n")
    (tmp_path / "trtllm-serve").chmod(0o755)
    assert TensorRtLlmEngine.find(EngineSpec(version="1.2.1")) == [str(tmp_path / "trtllm-serve")]
    monkeypatch.setenv("BATCHLAB_TENSORRT_LLM_PYTHON", str(tmp_path / "python"))
    monkeypatch.setattr(tools, "installed", lambda python, package: "1.2.1+cu130")
    assert TensorRtLlmEngine.find(EngineSpec(version="1.2.1")) == [str(tmp_path / "trtllm-serve")]
