"""The stand-ins themselves: arguments checked as strictly as the engines do, shapes and habits by version."""

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from batchlab.client import Target, replay
from batchlab.engines.process import free_port, healthy
from batchlab.models import materialize
from batchlab.workload import build
from standins import install


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """All executables."""
    home = tmp_path_factory.mktemp("standins")
    for version in ("1.0.0", "1.1.0", "1.2.0", "1.4.0"):
        install.tensorrt_llm(home, version)
    for version in ("2.4.1", "3.3.5"):
        install.tgi(home, version)
    install.sglang(home)
    for tool in ("docker", "podman"):
        install.container_tool(home, tool)
    return home


@pytest.fixture(scope="module")
def model():
    return materialize("tiny-llama")


@pytest.fixture(scope="module")
def weights(tmp_path_factory, model):
    """The model's folder with a file where weights would be."""
    folder = tmp_path_factory.mktemp("weights")
    for file in model.path.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").touch()
    return folder


def trtllm(home, version="1.2.0"):
    return home / f"tensorrt-llm-{version}/bin/trtllm-serve"


def refused(*command, env=None):
    """Exit status and all output of a command that must end by itself."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=30, env=env)
    return done.returncode, done.stdout + done.stderr


def yaml(folder, text):
    file = folder / "options.yml"
    file.write_text(text)
    return file


@contextlib.contextmanager
def running(*command, port):
    """A server that answers /health, ended afterwards."""
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            deadline = time.monotonic() + 20
            while not healthy(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None and time.monotonic() < deadline, server.stdout.read()
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)


def ask(url, body=None):
    """(status, value) of an answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def load(model, count=6):
    return build(
        {"kind": "fixed", "input_len": 10, "output_len": 6},
        num_requests=count,
        request_rate=None,
        seed=0,
        nonce="contracts",
        vocab_size=model.vocab_size,
        tokenizer=model.tokenizer,
    )


# TensorRT-LLM ---------------------------------------------------------------------------------------------------------
def test_trtllm_serve_refuses_what_it_does_not_know(home, model, tmp_path):
    path = model.path
    status, told = refused(trtllm(home), path, "--max-batch-size", 4)
    assert status == 2 and "Error: No such option: --max-batch-size" in told
    status, told = refused(trtllm(home), path, "--max_batch_size", "four")
    assert status == 2 and "'four' is not a valid integer" in told
    status, told = refused(trtllm(home, "1.0.0"), path, "--config", "x.yml")
    assert status == 2 and "No such option: --config" in told  # 1.2 and later have it
    file = yaml(tmp_path, "kv_cache_config: {enable_blok_reuse: false}\nprint_iter_lg: true\n")
    status, told = refused(trtllm(home), path, "--config", file)
    assert status == 1 and "2 validation errors for TorchLlmArgs\nkv_cache_config.enable_blok_reuse\n" in told
    assert "Extra inputs are not permitted [type=extra_forbidden, input_value=False, input_type=bool]" in told


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--max_batch_size", "4"], "max_batch_size: 4"),
        (["--kv_cache_free_gpu_memory_fraction", "0.8"], "kv_cache_config: {enable_block_reuse: false}"),
        ([], "load_format: dummy\nload_format: auto"),
    ],
)
def test_a_key_in_two_places_is_refused(home, model, tmp_path, flags, text):
    status, told = refused(trtllm(home), model.path, *flags, "--config", yaml(tmp_path, text))
    assert status == 1 and re.search("given (as a flag and in|twice)", told)


def test_trtllm_serve_needs_weights_or_dummy_ones_and_a_free_port(home, model, tmp_path):
    status, told = refused(trtllm(home), model.path, "--port", free_port())
    assert status == 1 and "RuntimeError: Executor worker returned error" in told
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, told = refused(trtllm(home), model.path, "--host", "127.0.0.1", "--port", port)
    assert status == 1 and f"RuntimeError: Failed to bind socket to 127.0.0.1:{port}" in told


@pytest.mark.parametrize(
    "version, ids, waits_s, collected", [("1.0.0", 6, 2, 1), ("1.2.0", 1, 0, 0), ("1.4.0", 1, 0, 1)]
)
def test_versions_differ_in_ids_and_metrics(home, model, tmp_path, version, ids, waits_s, collected):
    """1.0: a new id a chunk, and /metrics ends after two seconds without news. 1.2 with return_perf_metrics: the
    collector has had them. 1.4: at once. Each read takes what it gives."""
    perf = "return_perf_metrics: true\n" if version == "1.2.0" else ""
    file = yaml(tmp_path, f"load_format: dummy\nprint_iter_log: true\nenable_iter_perf_stats: true\n{perf}")
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", port, "--max_batch_size", 2, "--max_num_tokens", 16]
    with running(trtllm(home, version), model.path, *flags, "--extra_llm_api_options", file, port=port) as url:
        events = stream(url, {"model": "m", "prompt": [5] * 10, "max_tokens": 6, "stream": True})
        assert events[-1] == "[DONE]" and len({json.loads(e)["id"] for e in events[:-1]}) == ids
        target = Target(url, "openai-completions", "m", prompt_format="ids", continuous_usage=True)
        result = replay(target, load(model), timeout_s=30)
        assert {(row["error"], row["tokens"], row["prompt_tokens"]) for row in result.rows} == {(None, 6, 10)}
        before = time.monotonic()
        _, stats = ask(f"{url}/metrics")
        assert time.monotonic() - before >= waits_s
        assert bool(stats) == bool(collected)
        running_batch = [s["inflightBatchingStats"]["numScheduledRequests"] for s in stats]
        assert max(running_batch, default=2) == 2
        assert ask(f"{url}/metrics")[1] == []


def stream(url, body):
    """The data of an answer's events."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        return [line[6:] for line in answer.read().decode().splitlines() if line]


def test_bodies_of_400_have_two_shapes_and_max_tokens_is_cut_in_silence(home, model, tmp_path):
    file = yaml(tmp_path, "load_format: dummy\n")
    for version, flat in (("1.1.0", True), ("1.2.0", False)):
        port = free_port()
        flags = ["--host", "127.0.0.1", "--port", port, "--max_seq_len", 20, "--max_num_tokens", 16]
        with running(trtllm(home, version), model.path, *flags, "--extra_llm_api_options", file, port=port) as url:
            body = {"model": "m", "prompt": [5] * 10, "max_tokens": 30, "stream": True}
            status, error = ask(f"{url}/v1/completions", body | {"return_token_ids": True})
            assert status == 400 and (error.get("object") == "error") == flat and "return_token_ids" in str(error)
            status, error = ask(f"{url}/v1/completions", body | {"prompt": [5] * 17})
            assert (status, error["code"]) == (400, 400) and "should not exceed max_num_tokens (16)" in error["message"]
            assert len(stream(url, body)) == 10 + 1  # 20 - 10 tokens, and [DONE]


def test_the_newest_answers_503_while_it_loads(home, model, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "slow-start=1.5")
    port, seen = free_port(), None
    flags = ["--host", "127.0.0.1", "--port", port, "--config", yaml(tmp_path, "load_format: dummy\n")]
    command = list(map(str, (trtllm(home, "1.4.0"), model.path, *flags)))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 20
            while seen is None and time.monotonic() < deadline:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                except urllib.error.HTTPError as error:
                    seen = error.code, error.headers["x-trtllm-server-state"], json.load(error)["error"]["code"]
                except OSError:
                    time.sleep(0.02)  # it does not listen yet
        finally:
            server.terminate()
    assert seen == (503, "starting", "starting")


# TGI ------------------------------------------------------------------------------------------------------------------
def test_the_launcher_refuses_what_it_does_not_know(home, model, weights):
    launcher = home / "tgi-3.3.5/bin/text-generation-launcher"
    for flags, said in (
        (["--max-batchsize", "4"], "error: unexpected argument '--max-batchsize' found"),
        (["--port", "80", "--port", "81"], "error: the argument '--port <PORT>' cannot be used multiple times"),
        (["--dtype", "float32"], "error: invalid value 'float32' for '--dtype <DTYPE>'"),
        (["--max-batch-size"], "error: a value is required for '--max-batch-size <MAX_BATCH_SIZE>'"),
    ):
        status, told = refused(launcher, "--model-id", weights, *flags)
        assert status == 2 and said in told
    status, told = refused(launcher, "--model-id", weights, "--max-input-tokens", 64, "--max-total-tokens", 64)
    assert status == 1 and "ArgumentValidation(" in told
    status, told = refused(launcher, "--model-id", model.path)  # no weights: it makes none
    assert status == 1 and "No local weights found" in told and told.endswith("Error: DownloadError\n")
    status, told = refused(launcher, "--model-id", weights, "--cuda-memory-fraction", "0.01", "--max-total-tokens", 900,
                           "--max-input-tokens", 60, "--max-batch-prefill-tokens", 64)  # fmt: skip
    assert status == 1 and "Not enough memory to handle max_total_tokens=900" in told and "Webserver Crashed" in told
    old = home / "tgi-2.4.1/bin/text-generation-launcher"
    assert "unexpected argument '--payload-limit'" in refused(old, "--model-id", weights, "--payload-limit", 1)[1]


@pytest.mark.parametrize("version, chunking, reached", [("2.4.1", "1", 2), ("3.3.5", "0", 2), ("3.3.5", "1", 6)])
def test_tgis_batch_limit_holds_without_chunks(home, model, weights, monkeypatch, version, chunking, reached):
    """Version 3 prefills in chunks by default, and lets more requests join than --max-batch-size says."""
    monkeypatch.setenv("PREFILL_CHUNKING", chunking)
    launcher, port = home / f"tgi-{version}/bin/text-generation-launcher", free_port()
    flags = ["--hostname", "127.0.0.1", "--port", port, "--max-batch-size", 2, "--max-batch-prefill-tokens", 64,
             "--max-input-tokens", 32, "--max-total-tokens", 64, "--max-batch-total-tokens", 70]  # fmt: skip
    with running(launcher, "--model-id", weights, *flags, port=port) as url:
        workload = load(model)
        result = replay(Target(url, "tgi", "m"), workload, timeout_s=30)
        assert {(row["error"], row["tokens"], row["prompt_tokens"]) for row in result.rows} == {(None, 6, 10)}
        spans = [(row["first_s"], row["last_s"]) for row in result.rows]
        assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) == reached
        gauges = ask(f"{url}/metrics")[1]
        assert "tgi_batch_max_total_tokens 40000" in gauges  # --max-batch-total-tokens counts for nothing
        status, answer = ask(f"{url}/generate_stream", {"inputs": "w5 " * 60, "parameters": {"max_new_tokens": 8}})
        assert status == 200 and re.match(r'data: \{"error":"Input validation error', answer)
        status, answer = ask(f"{url}/generate", {"inputs": "w5 " * 60, "parameters": {"max_new_tokens": 8}})
        assert (status, answer["error_type"]) == (422, "validation")


# SGLang and the container tools ---------------------------------------------------------------------------------------
def test_sglang_refuses_unknown_flags_and_needs_weights(home, model):
    python = home / f"sglang-{install.VERSIONS['sglang']}/bin/python"
    status, told = refused(python, "-m", "sglang.launch_server", "--model-path", model.path, "--max-num-seqs", 4)
    assert status == 2 and "unrecognized arguments: --max-num-seqs 4" in told
    status, told = refused(python, "-m", "sglang.launch_server", "--model-path", model.path)
    assert status != 0 and "Received sigquit from a child process" in told


@pytest.mark.parametrize("tool", ["docker", "podman"])
def test_container_tools_refuse_as_they_do(home, model, tool):
    program, image = home / f"{tool}-bin" / tool, install.image("sglang")
    start = ["python3", "-m", "sglang.launch_server", "--model-path", "/model"]
    assert "unknown flag: --gpu" in refused(program, "run", "--gpu", "all", image)[1]
    assert "No such image" in refused(program, "image", "inspect", "lmsysorg/sglang:v9")[1]
    assert refused(program, "run", "--rm", image, "sglang", "serve")[0] == 127
    # nothing is mounted: what the host has is not there
    status, told = refused(program, "run", "--rm", image, *start[:-1], model.path)
    assert status == 1 and "Can't load the configuration" in told
    # no GPU was given
    status, told = refused(program, "run", "--rm", "-v", f"{model.path}:/model:ro", image, *start)
    assert status == 137 and "No CUDA GPUs are available" in told
    assert refused(program, "ps", "-a", "--format", "{{.Names}}") == (0, "")


def test_nothing_is_left_behind(home):
    assert install.processes(home) == []
