"""SGLang's flags as its 0.5.13 knows them, and its log's lines as rows."""

import time

import pytest

from batchlab import models
from batchlab.client.clock import offset_ns
from batchlab.engines import sglang, tools
from batchlab.engines.sglang import SglangEngine, iterations
from batchlab.errors import EngineError, UsageError
from batchlab.scenario import EngineSpec, Limits

# as 0.5.13 writes them (srt/managers/scheduler_components/metrics_reporter.py), with invented numbers
LOG = """\
[2026-11-30 01:00:00.250] max_total_num_tokens=800000, chunked_prefill_size=8192, max_prefill_tokens=8192, \
max_running_requests=4, context_len=8192, available_gpu_mem=12.30 GB
[2026-11-30 01:00:10.500] Prefill batch, #new-seq: 3, #new-token: 384, #cached-token: 0, token usage: 0.00, \
#running-req: 0, #queue-req: 2, #pending-token: 256, cuda graph: False, input throughput (token/s): 10.00
[2026-11-30 01:00:10.520] Decode batch, #running-req: 3, #token: 387, token usage: 0.00, cuda graph: True, \
gen throughput (token/s): 1234.56, #queue-req: 2
[2026-11-30 01:00:10.530] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 128
[2026-11-30 01:00:10.541 TP0] Decode batch [17], #running-req: 2, #token: 400000, token usage: 0.50, cuda graph: True, \
gen throughput (token/s): 99.00, #queue-req: 3
[2026-11-30 01:00:10.600] INFO: something else
"""


def engine(tmp_path, monkeypatch, options=None, **spec):
    monkeypatch.setattr(SglangEngine, "find", classmethod(lambda cls, spec: ["python", "-m", "sglang.launch_server"]))
    files = models.materialize("tiny-llama")
    return SglangEngine(EngineSpec(version="0.5.13", **spec), options or {}, files, "http", log=tmp_path / "log")


def values(words):
    """Flags with their values; True for one that stands alone."""
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            following = words[i + 1] if i + 1 < len(words) else "--"
            found[word] = True if following.startswith("--") else following
    return found


def test_limits_graphs_and_what_is_switched_off(tmp_path, monkeypatch):
    words = engine(tmp_path, monkeypatch).arguments(Limits(max_batch_size=512, max_num_tokens=4096), "127.0.0.1", 3)
    told = values(words)
    assert told["--max-running-requests"] == told["--cuda-graph-max-bs"] == "512"
    assert told["--chunked-prefill-size"] == told["--max-prefill-tokens"] == "4096"
    assert told["--disable-radix-cache"] is True and told["--load-format"] == "dummy"
    assert told["--context-length"] == str(models.shape("tiny-llama").max_len)
    assert told["--decode-log-interval"] == "1" and "--skip-tokenizer-init" not in told


def test_the_scenarios_options_become_flags(tmp_path, monkeypatch):
    shape = models.shape("tiny-llama")
    options = {
        "max_model_len": 256,
        "gpu_memory_utilization": 0.8,
        "dtype": "bfloat16",
        "kv_cache_gib": 1000 * shape.kv_bytes_per_token / 2**30,
        "args": {"enable-mixed-chunk": True, "stream_interval": 4},
    }
    told = values(engine(tmp_path, monkeypatch, options).arguments(Limits(max_batch_size=1, max_num_tokens=1), "h", 3))
    assert told["--context-length"] == "256" and told["--mem-fraction-static"] == "0.8"
    assert told["--max-total-tokens"] == "1000" and told["--enable-mixed-chunk"] is True
    assert told["--stream-interval"] == "4"  # the scenario's word stands against ours


def test_its_log_becomes_iterations():
    wall = 1_796_000_410  # 2026-11-30 01:00:10 UTC
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall)) == "2026-11-30 01:00:10"
    t0 = wall * 10**9 + offset_ns()
    rows = iterations(LOG.splitlines(), t0, limits=(4, 8192), kv_tokens=800_000)
    assert [r["running"] for r in rows] == [3, 3, 2] and [r["waiting"] for r in rows] == [2, 2, 3]
    assert [r["prefill_tokens"] for r in rows] == [384, 0, 0] and [r["decode_tokens"] for r in rows] == [0, 3, 2]
    assert [r["preemptions"] for r in rows] == [0, 0, 1]
    assert [r["output_s"] for r in rows] == pytest.approx([0.500, 0.520, 0.541], abs=1e-4)
    assert [r["scheduled_s"] for r in rows] == pytest.approx([0.500, 0.500, 0.520], abs=1e-4)
    assert rows[2]["kv_use"] == pytest.approx(0.5) and rows[0]["kv_use"] == 0.0
    assert {(r["max_batch_size"], r["max_num_tokens"]) for r in rows} == {(4, 8192)}


def test_decoding_requests_wait_while_others_prefill_unless_mixed():
    line = LOG.splitlines()[1].replace("#running-req: 0", "#running-req: 7")
    (alone,) = iterations([line], 0, limits=(9, 9), kv_tokens=None)
    (mixed,) = iterations([line], 0, limits=(9, 9), kv_tokens=None, mixed=True)
    assert (alone["running"], alone["admitted"], alone["decode_tokens"]) == (3, 10, 0)
    assert (mixed["running"], mixed["admitted"], mixed["decode_tokens"]) == (10, 10, 7)


def test_the_limits_that_it_says_are_those_in_force(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch)
    one.log.write_text(LOG)
    one.limits = one.started_with = Limits(max_batch_size=5, max_num_tokens=8192)
    one.told = one.learned()
    traced = one.read(0)
    assert traced.source == "log" and traced.limits == [(4, 8192)]  # not the 5 that were asked for
    assert traced.unchecked and one.told["kv_tokens"] == 800_000


def test_a_token_limit_takes_a_new_start(tmp_path, monkeypatch):
    one = engine(tmp_path, monkeypatch)
    one.limits = one.started_with = Limits(max_batch_size=8, max_num_tokens=64)
    with pytest.raises(ValueError, match="cannot go on"):
        one.reconfigure(Limits(max_batch_size=8, max_num_tokens=32))
    with pytest.raises(ValueError, match="cannot go on"):
        one.reconfigure(Limits(max_batch_size=9, max_num_tokens=64))


def test_a_lower_batch_limit_is_set_while_it_runs_and_read_back(tmp_path, monkeypatch):
    asked, state = [], {}

    def ask(url, body=None, timeout_s=10.0):
        asked.append((url.rpartition("/")[2], body))
        if body:
            state.update(body["server_args"])
            return [True]
        return {"internal_states": [state], "version": "0.5.13"}

    monkeypatch.setattr(sglang, "ask", ask)
    one = engine(tmp_path, monkeypatch)
    one.limits = one.started_with = Limits(max_batch_size=8, max_num_tokens=64)
    one.reconfigure(Limits(max_batch_size=2, max_num_tokens=64))
    assert asked == [("set_internal_state", {"server_args": {"pp_max_micro_batch_size": 2}}), ("server_info", None)]
    assert one.limits.max_batch_size == 2 and one.started_with.max_batch_size == 8


def test_a_release_that_cannot_is_started_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang, "ask", lambda *args, **more: None)
    one, started = engine(tmp_path, monkeypatch), []
    monkeypatch.setattr(one, "start", started.append)
    one.limits = one.started_with = Limits(max_batch_size=8, max_num_tokens=64)
    one.reconfigure(Limits(max_batch_size=2, max_num_tokens=64))
    one.reconfigure(Limits(max_batch_size=8, max_num_tokens=64))  # and back up
    assert [limits.max_batch_size for limits in started] == [2, 8]


def test_a_missing_python_and_another_release_are_told(monkeypatch):
    monkeypatch.delenv("BATCHLAB_SGLANG_PYTHON", raising=False)
    with pytest.raises(UsageError, match=r"BATCHLAB_SGLANG_PYTHON is not set.*pip install sglang"):
        SglangEngine.find(EngineSpec(version="0.5.13"))
    monkeypatch.setenv("BATCHLAB_SGLANG_PYTHON", "/some/python")
    monkeypatch.setattr(tools, "installed", lambda python, package: "0.5.20")
    with pytest.raises(UsageError, match=r"holds SGLang 0\.5\.20, the scenario asks for 0\.5\.13"):
        SglangEngine.find(EngineSpec(version="0.5.13"))


def test_what_is_asked_for_is_exact_and_costs_nothing(tmp_path, monkeypatch):
    target = engine(tmp_path, monkeypatch).target()
    assert target.ignore_eos and target.continuous_usage and target.prompt_format == "ids"
    assert target.extra == {"min_tokens": None}


def test_a_port_that_leaves_none_for_grpc_is_refused_before_the_start(tmp_path, monkeypatch):
    """It keeps port + 10000 for gRPC and dies where that is none: of the ports that Linux chooses, one in five."""
    with pytest.raises(EngineError, match="port 58000: this engine takes ports up to 55535"):
        engine(tmp_path, monkeypatch, port=58000).start(Limits(max_batch_size=4, max_num_tokens=64))
