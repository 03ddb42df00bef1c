"""An engine that already runs: asked for what it takes, never trusted with limits it was not said to have."""

import http.server
import json
import threading

import pytest

from batchlab import models, plan, scenario
from batchlab.client import Target, negotiate
from batchlab.engines.attach import AttachedEngine
from batchlab.errors import EngineError, UsageError
from batchlab.scenario import EngineSpec, Limits
from batchlab.store import Store
from batchlab.study import Study
from batchlab.workload import build
from test_scenario import write

LIMITS = Limits(max_batch_size=8, max_num_tokens=64)


class Strict(http.server.BaseHTTPRequestHandler):
    """Answers completions with four tokens; refuses the keys in `refused`."""

    refused: tuple[str, ...] = ()
    asked: list[dict]

    def do_GET(self):
        body = b'{"data": [{"id": "served-name"}]}' if self.path == "/v1/models" else b""
        self.send_response(200 if self.path in ("/v1/models", "/health") else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        keys = {*body, *(body.get("stream_options") or ())}
        if bad := keys & set(self.refused):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": f"unknown {min(bad)}"}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(4):
            choice = {"index": 0, "text": " a", "finish_reason": "length" if n == 3 else None}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 8, "completion_tokens": 4}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def server(request):
    """Its address and what it was asked; the test's parameter lists what it refuses."""
    handler = type("Handler", (Strict,), {"refused": getattr(request, "param", ()), "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", handler.asked
        listening.shutdown()
        thread.join()


def engine(tmp_path, url, **more):
    spec = EngineSpec(version="1.0", base_url=url, limits=LIMITS, **more)
    return AttachedEngine(spec, spec.options(), models.materialize("tiny-llama"), "http", log=tmp_path / "log")


def workload(count=3):
    return build(
        {"kind": "fixed", "input_len": 8, "output_len": 4},
        num_requests=count,
        request_rate=None,
        seed=0,
        nonce="n",
        vocab_size=4096,
    )


def test_a_whole_replay_against_a_server_that_takes_everything(server, tmp_path):
    url, asked = server
    one = engine(tmp_path, f"{url}/v1")
    one.start(LIMITS)
    result = one.replay(workload(), timeout_s=20, keep_chunks=False)
    assert [row["error"] for row in result.rows] == [None] * 3 and {row["tokens"] for row in result.rows} == {4}
    assert asked[-1]["model"] == "served-name" and asked[-1]["ignore_eos"] is True
    traced = one.take_trace(result.t0_ns, 3)
    assert traced.source == "none" and any("word" in line for line in traced.unchecked)
    assert one.describe()["stated_limits"] == LIMITS.model_dump()


@pytest.mark.parametrize(
    ("server", "usage", "ignore"),
    [(("continuous_usage_stats",), False, True), (("ignore_eos", "min_tokens"), False, False)],
    indirect=["server"],
)
def test_what_it_refuses_is_left_out(server, tmp_path, usage, ignore):
    url, asked = server
    one = engine(tmp_path, url)
    one.start(LIMITS)
    one.replay(workload(1), timeout_s=20, keep_chunks=False)
    assert ("continuous_usage_stats" in asked[-1]["stream_options"], "ignore_eos" in asked[-1]) == (usage, ignore)


@pytest.mark.parametrize("server", [("stream_options",)], indirect=True)
def test_the_barest_form_goes_without_usage(server):
    url, asked = server
    target = Target(base_url=url, api="openai-completions", model="m", prompt_format="ids", continuous_usage=True)
    taken = negotiate.accepted(target, lambda form: workload(1), timeout_s=20)
    assert taken.extra == {"stream_options": None} and not taken.ignore_eos and len(asked) == 4


@pytest.mark.parametrize("server", [("prompt",)], indirect=True)
def test_a_server_that_refuses_every_form_is_asked_in_full(server):
    url, _ = server
    target = Target(base_url=url, api="openai-completions", model="m", prompt_format="ids")
    assert negotiate.accepted(target, lambda form: workload(1), timeout_s=20) == target


def test_other_limits_than_those_stated_are_not_measured(server, tmp_path):
    with pytest.raises(EngineError, match=r"runs with 8/64 by the scenario's word; for 4/64 start it anew"):
        engine(tmp_path, server[0]).start(Limits(max_batch_size=4, max_num_tokens=64))


def test_nobody_there(tmp_path):
    one = engine(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"nobody answers at http://127\.0\.0\.1:9; start the engine there"):
        one.start(LIMITS)
    assert not one.alive()


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ({"attach": {"version": "1"}}, "engines.attach.base_url: missing"),
        ({"attach": {"version": "1", "base_url": "http://x"}}, "engines.attach.limits: missing"),
        ({"vllm": {"version": "1", "base_url": "http://x"}}, "engines.vllm.base_url: belongs to the engine `attach`"),
        ({"vllm": {"version": "1", "runtime": "container"}}, "engines.vllm.runtime: vllm runs in a Python of its own"),
        ({"tgi": {"version": "1", "image": "x"}}, "engines.tgi.image: belongs to runtime `container`"),
        ({"tgi": {"version": "1", "runtime": "vm"}}, "engines.tgi.runtime: Input should be 'local' or 'container'"),
    ],
)
def test_what_does_not_fit_an_engine_is_one_line(tmp_path, engines, said):
    with pytest.raises(UsageError) as error:
        scenario.load(write(tmp_path, lambda raw: raw.update(engines=engines)))
    assert said in str(error.value)


def test_only_vllm_runs_in_process(tmp_path):
    def change(raw):
        raw["engines"]["sglang"] = {"version": "0.5.13"}
        raw["sweeps"] = [{"name": "x", "transport": "inprocess", "engines": ["sglang"]}]

    with pytest.raises(UsageError, match="engine `sglang` has no transport `inprocess`; these have it: vllm"):
        scenario.load(write(tmp_path, change))


def test_cells_of_other_limits_are_left_out_and_the_rest_measured(server, tmp_path):
    def change(raw):
        attach = {"version": "1", "base_url": server[0], "limits": LIMITS.model_dump(), "max_model_len": 32}
        sweep = {"name": "x", "max_batch_size": [4, 8], "max_num_tokens": 64}
        raw.update(engines={"attach": attach}, datasets={"d": {"input_len": 8, "output_len": 4}}, sweeps=[sweep])
        raw.update(num_requests=2, repeats=1)

    loaded = scenario.load(write(tmp_path, change))
    mine, told = Study(loaded, plan.expand(loaded), Store(tmp_path / "results")), []
    outcome = mine.measure(tell=told.append)
    assert (outcome.measured, outcome.failures) == (1, []) and "1 cells have other limits" in told[-1]
    assert mine.frame()["recorded"].tolist() == [False, True] and len(mine.ensure()) == 2
