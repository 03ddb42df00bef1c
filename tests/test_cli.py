"""The command line: what people type, and what they get when they mistype it."""

import http.server
import json
import math
import threading
from typing import ClassVar

import pyarrow.parquet as pq
import pytest

from batchlab import metrics
from batchlab.cli import main
from support.ground_truth import running

FLAGS = ["--model", "m", "--input-len", "6", "--output-len", "5", "--num-requests", "4", "--request-rate", "inf"]


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def replay(capsys, *arguments):
    status = main(["replay", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize("api", ["openai-completions", "openai-chat", "tgi"])
def test_replay_prints_one_object_with_every_key(server, capsys, api):
    url = server.url(first_ms=20, gap_ms=2)
    status, out, _ = replay(capsys, "--base-url", url, "--api", api, *FLAGS, "--json")
    summary = json.loads(out)
    assert status == 0 and set(metrics.SUMMARY_KEYS) <= set(summary)
    assert (summary["completed"], summary["failed"], summary["valid"]) == (4, 0, True), summary["invalid_reasons"]
    assert summary["running_batch_mean"] is None and summary["kv_use_peak"] is None  # a stranger's inside is unknown
    assert summary["ttft_p50_ms"] >= 20 and summary["tpot_mean_ms"] > 1.5


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_in_v1(server, capsys, ending):
    url = server.url(first_ms=5, gap_ms=1) + ending
    status, out, _ = replay(capsys, "--base-url", url, "--api", "openai-completions", *FLAGS, "--json")
    assert status == 0 and json.loads(out)["completed"] == 4


def test_records_are_written_and_recompute_to_the_summary(server, capsys, tmp_path):
    file = tmp_path / "rows.parquet"
    url = server.url(first_ms=5, gap_ms=1)
    _, out, _ = replay(
        capsys, "--base-url", url, "--api", "openai-completions", *FLAGS, "--json", "--records", str(file)
    )
    rows = pq.read_table(file).to_pandas()
    assert len(rows) == 4 and metrics.ttft_ms(rows).mean() == pytest.approx(json.loads(out)["ttft_mean_ms"], abs=1e-3)


def test_an_engine_that_stops_early_makes_the_run_invalid(server, capsys):
    url = server.url(first_ms=5, gap_ms=1, stop=3)
    status, out, _ = replay(capsys, "--base-url", url, "--api", "openai-completions", *FLAGS, "--json")
    summary = json.loads(out)
    assert status == 0 and not summary["valid"] and any("output length" in r for r in summary["invalid_reasons"])


class Picky(http.server.BaseHTTPRequestHandler):
    """Answers completions, but refuses every key that OpenAI's own API does not have."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        known = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
        if set(body) - known or set(body.get("stream_options") or ()) - {"include_usage"}:
            text = json.dumps({"error": {"message": "unknown field", "type": "invalid_request_error"}}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for n in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices":[{"index":0,"text":" a%d","finish_reason":null}]}\n\n' % n)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def log_message(self, *_):
        pass


def test_optional_keys_are_left_out_where_the_server_refuses_them(capsys):
    Picky.bodies = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Picky) as picky:
        threading.Thread(target=picky.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{picky.server_port}"
        status, out, err = replay(capsys, "--base-url", url, "--api", "openai-completions", *FLAGS, "--json")
        picky.shutdown()
    summary = json.loads(out)
    assert status == 0 and summary["completed"] == 4 and summary["valid"], summary["invalid_reasons"]
    assert "refuses some optional keys" in err and "ignore_eos" not in Picky.bodies[-1]


@pytest.mark.parametrize(("flag", "value", "expected"), [
    ("--input-len", "0", "0 is not a whole number above 0"),
    ("--output-len", "-3", "-3 is not a whole number above 0"),
    ("--num-requests", "many", "many is not a whole number above 0"),
    ("--request-rate", "-1", "-1 is neither a number above 0 nor inf"),
    ("--request-rate", "fast", "fast is neither a number above 0 nor inf"),
    ("--api", "grpc", "invalid choice: 'grpc'"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(capsys, flag, value, expected):
    arguments = ["--base-url", "http://127.0.0.1:9", "--api", "openai-completions", *FLAGS]
    arguments += [flag, value]
    with pytest.raises(SystemExit) as ended:
        replay(capsys, *arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and expected in err and flag in err and err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "expected"), [
    (["replay", "--base-url", "http://127.0.0.1:9", "--api", "openai-completions", *FLAGS], "no server answers at"),
    (["replay", "--base-url", "ftp://x", "--api", "openai-completions", *FLAGS], "must look like http://host:port"),
    (["replay", "--base-url", "http://127.0.0.1:9", "--api", "tgi", *FLAGS, "--records", "/no/such/x"], "--records"),
    (["summary", "no-such-scenario"], "unknown name `no-such-scenario`"),
    (["plan", "cpu", "--sweep", "nothing"], "no sweep `nothing`; there are: throughput, latency"),
    (["run", "cpu", "--engine", "vlm"], "--engine vlm"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(capsys, arguments, expected):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.out == ""
    assert printed.err.strip().count("\n") == 0


def test_a_model_folder_that_is_missing(capsys, tmp_path):
    from batchlab import paths

    scenario = tmp_path / "mine.yml"
    text = (paths.SCENARIOS / "cpu.yml").read_text()
    scenario.write_text(text.replace("model: tiny-llama", "model: no/such/folder/here"))
    assert main(["run", str(scenario)]) == 2
    err = capsys.readouterr().err
    assert "no/such/folder/here" in err and err.strip().count("\n") == 0


def test_plan_tells_cells_and_time(capsys):
    assert main(["plan", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "138 cells" in out and "in/20 out" in out


def test_summary_of_recorded_cells_is_json(capsys):
    assert main(["summary", "h200", "--sweep", "throughput", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 24 and {r["hardware"] for r in rows} == {"h200_sxm"}
    assert all(r["request_rate"] == "inf" and math.isfinite(r["output_throughput_tok_s"]) for r in rows)


SIMULATE = ["simulate", "--engine", "vllm-v1", "--hardware", "h200_sxm", "--model", "llama-3-8b", "--input-len", "128",
            "--output-len", "64", "--num-requests", "16", "--request-rate", "inf", "--max-batch-size", "8",
            "--max-num-tokens", "2048"]  # fmt: skip


def test_simulate_prints_one_object_with_every_key(capsys):
    assert main([*SIMULATE, "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert set(metrics.SUMMARY_KEYS) <= set(summary) and summary["completed"] == 16
    assert summary["running_batch_mean"] <= 8 and "simulated, not measured" in printed.err


def test_simulate_lists_the_cards_that_there_are(capsys):
    assert main([word if word != "h200_sxm" else "h300" for word in SIMULATE]) == 2
    err = capsys.readouterr().err
    assert "h300" in err and "h200_sxm" in err and err.strip().count("\n") == 0
