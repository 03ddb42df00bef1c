"""The replay client against a server whose token times are known."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchlab.client import Target, replay
from batchlab.client import replay as package_replay
from batchlab.client.limits import SPARE, check_open_files
from batchlab.client.replay import choose_processes
from batchlab.errors import EngineError, UsageError
from batchlab.records import REQUESTS, table
from batchlab.workload import Request, Workload
from support.ground_truth import running
from support.tls import tls_in_front

LATE_S = 1e-5  # two clocks are read a few nanoseconds apart


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def load(count, output_len=4, *, at=lambda index: 0.0, concurrency=None, words=6):
    requests = [
        Request(n, at(n), list(range(10, 10 + words)), " ".join(f"w{n}x{k}" for k in range(words)), output_len)
        for n in range(count)
    ]
    return Workload(requests, None, concurrency)


def ask(server, count=2, *, api="openai-completions", output_len=4, workload=None, target=None, options=None, **more):
    url = server.url(**{"first_ms": 20, "gap_ms": 5} | (options or {}))
    settings = {"base_url": url, "api": api, "model": "m"} | (target or {})
    return replay(Target(**settings), workload or load(count, output_len), lead_s=0.05, **more)


# --- what it measures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "options", "source"),
    [
        ("openai-completions", {}, "usage"),
        ("openai-completions", {"usage": "continuous", "merge": 2}, "usage"),
        ("openai-completions", {"ids": 1, "text": 0, "merge": 2}, "token_ids"),
        ("openai-completions", {"usage": "last"}, "usage"),
        ("openai-completions", {"usage": "none"}, "chunks"),
        ("openai-completions", {"new_ids": 1, "empty": 2}, "usage"),
        ("openai-completions", {"split": 11, "crlf": 1, "comments": 1, "nospace": 1}, "usage"),
        ("openai-completions", {"framing": "close"}, "usage"),
        ("openai-completions", {"done": 0}, "usage"),
        ("openai-chat", {"role": 1, "empty": 1}, "usage"),
        ("tgi", {"comments": 1}, "token_ids"),
        ("tgi", {"nospace": 1, "crlf": 1}, "token_ids"),
    ],
)
def test_every_form_of_stream_is_counted_and_timed(server, api, options, source):
    """vllm 15106 (role chunks), 27485 and 37666 (merged chunks): tokens and times as the server knows them."""
    server.forget()
    replayed = ask(server, 3, api=api, output_len=8, options=options)
    log = {entry["id"]: entry for entry in server.log()}
    for got in replayed.rows:
        assert got["error"] is None
        assert (got["tokens"], got["count_source"], got["finish_reason"]) == (8, source, "length")
        assert got["first_tokens"] == options.get("merge", 1)
        assert got["chunks"] == len(got["chunk_us"]) == 8 // options.get("merge", 1)
        assert got["prompt_tokens"] == (6 if options.get("usage") != "none" else None)
        received_s = (log[f"b{got['index']}"]["received_ns"] - replayed.t0_ns) / 1e9
        assert 0 <= got["scheduled_s"] <= got["sent_s"] <= received_s + LATE_S
        # role and empty chunks come before 20 ms, so an earlier time would be one of theirs
        assert got["first_s"] >= received_s + 0.020 - LATE_S
        assert got["last_s"] - got["first_s"] > 0
        assert got["end_s"] >= got["last_s"]
    assert table(replayed.rows, REQUESTS).num_rows == 3


def test_a_chunk_is_never_seen_before_the_server_wrote_it(server):
    """guidellm 216: negative times to first token."""
    server.forget()
    replayed = ask(server, 40, output_len=20, target={"continuous_usage": True}, options={"usage": "continuous"})
    log = {entry["id"]: entry["written_ns"] for entry in server.log()}
    for got in replayed.rows:
        seen = [got["first_s"] + us / 1e6 for us in got["chunk_us"]]
        written = [(ns - replayed.t0_ns) / 1e9 for ns in log[f"b{got['index']}"]][: len(seen)]
        assert len(seen) == len(written) == 20
        assert all(s >= w - LATE_S for s, w in zip(seen, written, strict=True))


def test_requests_go_at_their_times_and_none_before(server):
    """vllm 21104: the achieved rate was below the asked one."""
    server.forget()
    workload = load(30, 2, at=lambda n: n / 100)
    replayed = ask(server, workload=workload)
    for got in replayed.rows:
        assert got["scheduled_s"] == got["index"] / 100
        assert got["sent_s"] >= got["scheduled_s"]
    received = [(e["received_ns"] - replayed.t0_ns) / 1e9 for e in sorted(server.log(), key=lambda e: int(e["id"][1:]))]
    assert all(at >= n / 100 for n, at in enumerate(received))
    assert replayed.check["send_lag_max_ms"] == pytest.approx(
        max(r["sent_s"] - r["scheduled_s"] for r in replayed.rows) * 1e3
    )


def test_waiting_for_a_slot_is_not_hidden_in_an_open_loop(server):
    """vllm 54101: with a limit on concurrency the client's own queue was left out of the times."""
    server.forget()
    workload = load(3, 2, at=lambda n: n * 0.001)
    rows = ask(server, workload=workload, max_concurrency=1, options={"first_ms": 60}).rows
    assert [r["scheduled_s"] for r in rows] == [0, 0.001, 0.002]
    assert rows[2]["sent_s"] - rows[2]["scheduled_s"] > 0.115
    assert rows[2]["first_s"] - rows[2]["scheduled_s"] > 0.175


@pytest.mark.parametrize("processes", [1, 3])
def test_a_closed_loop_keeps_its_concurrency_and_counts_from_the_free_slot(server, processes):
    server.forget()
    replayed = ask(server, workload=load(20, 3, concurrency=4), processes=processes)
    rows = replayed.rows
    assert sum(r["scheduled_s"] == 0 for r in rows) == 4
    later = [r for r in rows if r["scheduled_s"] > 0]
    ends = sorted(r["end_s"] for r in rows)
    for got in later:
        # its slot is that of an answer that had ended
        assert got["scheduled_s"] >= ends[0] and got["sent_s"] >= got["scheduled_s"]
    edges = sorted([(r["sent_s"], 1) for r in rows] + [(r["end_s"], -1) for r in rows])
    running = peak = 0
    for _, step in edges:
        running += step
        peak = max(peak, running)
    assert peak == 4
    assert replayed.check["processes"] == processes and {r["error"] for r in rows} == {None}


def test_several_processes_have_one_clock_and_lose_nothing(server):
    server.forget()
    seen = []
    replayed = ask(server, 30, processes=3, keep_chunks=False, progress=lambda done, total: seen.append((done, total)))
    assert [r["index"] for r in replayed.rows] == list(range(30))
    assert {r["error"] for r in replayed.rows} == {None}
    received = {int(e["id"][1:]): (e["received_ns"] - replayed.t0_ns) / 1e9 for e in server.log()}
    assert all(r["sent_s"] <= received[r["index"]] + LATE_S for r in replayed.rows)
    assert all(r["chunk_us"] is None and r["itl_p99_ms"] is not None for r in replayed.rows)
    assert seen[-1] == (30, 30) and all(0 <= done <= 30 for done, _ in seen)
    check = replayed.check
    assert check["processes"] == 3 and check["chunks"] == 120 and check["connections_peak"] == 30
    assert check["bytes"] > 30 * 4 * 100 and check["cpu_s"] > 0 and 0 < check["cpu_share_max"] <= 1
    assert check["loop_lag_p99_ms"] >= 0


def test_chunks_whose_own_times_are_lost_are_counted(server):
    """A server that writes all tokens at once leaves no times between them to be measured."""
    check = ask(server, 2, output_len=10, options={"gap_ms": 0}).check
    assert 0 < check["merged_share"] <= 0.9
    assert ask(server, 2, output_len=2, options={"gap_ms": 1000}).check["merged_share"] == 0


def test_the_recorded_times_are_free_of_a_stalled_client(server):
    """The client's process is stopped while the first tokens arrive; their times are still those of their arrival."""
    server.forget()
    thawed_ns = []

    def freeze():
        while len(server.log()) < 3:
            time.sleep(0.005)
        (worker,) = [int(p) for p in _children(os.getpid()) if b"batchlab.client.worker" in _cmdline(p)]
        os.kill(worker, signal.SIGSTOP)
        while not all(entry["written_ns"] for entry in server.log()):
            time.sleep(0.005)
        time.sleep(0.1)
        thawed_ns.append(time.monotonic_ns())
        os.kill(worker, signal.SIGCONT)

    thread = threading.Thread(target=freeze)
    thread.start()
    replayed = ask(server, 3, output_len=2, options={"first_ms": 500, "gap_ms": 1000})
    thread.join()
    if replayed.check["receive_lag_p99_ms"] is None:
        pytest.skip("this kernel stamps no received packets")
    assert replayed.check["receive_lag_p99_ms"] > 50
    thawed_s = (thawed_ns[0] - replayed.t0_ns) / 1e9
    for got, entry in zip(replayed.rows, sorted(server.log(), key=lambda e: e["id"]), strict=True):
        assert got["tokens"] == 2 and got["error"] is None
        written_s = (entry["written_ns"][0] - replayed.t0_ns) / 1e9
        assert written_s - LATE_S <= got["first_s"] < thawed_s - 0.05 < got["last_s"]


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# --- what it sends ---------------------------------------------------------------------------------------------------


def test_the_request_on_the_wire(server):
    server.forget()
    ask(
        server,
        1,
        target={
            "prompt_format": "ids",
            "continuous_usage": True,
            "api_key": "secret",
            "extra": {"top_k": 1, "temperature": None},
        },
    )
    (entry,) = server.log()
    assert entry["path"] == "/v1/completions"
    assert entry["body"] == {
        "model": "m",
        "prompt": [10, 11, 12, 13, 14, 15],
        "max_tokens": 4,
        "stream": True,
        "ignore_eos": True,
        "min_tokens": 4,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "top_k": 1,
    }
    headers = entry["headers"]
    assert headers["x-request-id"] == "b0" and headers["connection"] == "close"
    assert headers["authorization"] == "Bearer secret" and headers["accept-encoding"] == "identity"


def test_targets_that_take_no_vllm_fields_get_none(server):
    """TensorRT-LLM answers unknown fields with 400."""
    server.forget()
    ask(server, 1, api="openai-chat", target={"ignore_eos": False})
    (entry,) = server.log()
    assert entry["body"] == {
        "model": "m",
        "messages": [{"role": "user", "content": "w0x0 w0x1 w0x2 w0x3 w0x4 w0x5"}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_tgi_request(server):
    server.forget()
    ask(server, 1, api="tgi", target={"extra": {"truncate": 9}})
    (entry,) = server.log()
    assert entry["path"] == "/generate_stream"
    assert entry["body"] == {
        "inputs": "w0x0 w0x1 w0x2 w0x3 w0x4 w0x5",
        "parameters": {"max_new_tokens": 4, "details": True, "do_sample": False, "truncate": 9},
    }


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_hold_a_path_and_a_last_v1(server, suffix):
    server.forget()
    target = Target(server.url(first_ms=5) + suffix, "openai-completions", "m")
    assert replay(target, load(1), lead_s=0.05).rows[0]["error"] is None
    assert server.log()[0]["path"] == "/v1/completions"


def test_a_prompt_larger_than_the_socket_takes_at_once(server):
    server.forget()
    rows = ask(server, workload=load(4, 2, words=600_000), target={"prompt_format": "ids"}).rows
    assert {r["error"] for r in rows} == {None} and {r["prompt_tokens"] for r in rows} == {600_000}


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "options", "words"),
    [
        ("openai-completions", {"status": 400}, "HTTP 400: the prompt is too long (BadRequestError)"),
        ("openai-completions", {"status": 400, "shape": "flat"}, "HTTP 400: the prompt is too long (BadRequestError)"),
        ("openai-completions", {"status": 400, "shape": "pydantic"}, "HTTP 400: 1 validation error"),
        ("tgi", {"status": 429, "shape": "tgi"}, "HTTP 429: Model is overloaded (overloaded)"),
        ("openai-chat", {"status": 503, "shape": "text"}, "HTTP 503: come back later"),
        ("openai-completions", {"status": 400, "keep": 1}, "HTTP 400: the prompt is too long (BadRequestError)"),
        ("openai-completions", {"cut": 2}, "broke after 2 tokens"),
        ("openai-completions", {"cut": 2, "reset": 1}, "reset the connection"),
        ("openai-completions", {"done": 0, "finish": 0}, "neither a finish reason nor [DONE]"),
        ("openai-completions", {"error": 2, "error_form": "openai"}, "error in the stream: EngineCore died"),
        ("openai-completions", {"error": 2, "error_form": "tgi-openai"}, "Request failed during generation (424)"),
        ("tgi", {"error": -1}, "error in the stream: Model is overloaded (overloaded)"),
        ("tgi", {"cut": 1}, "broke after 1 tokens"),
    ],
)
def test_a_request_that_fails_has_one_line_and_null_times(server, api, options, words):
    """guidellm 216 and others: failed requests had times of 0, or ended the run."""
    rows = ask(server, 3, api=api, options=options).rows
    assert len(rows) == 3
    for got in rows:
        assert words in got["error"] and "\n" not in got["error"]
        assert got["first_s"] is got["last_s"] is got["end_s"] is got["itl_max_ms"] is got["chunk_us"] is None
        assert got["sent_s"] is not None
    assert table(rows, REQUESTS).num_rows == 3


def test_a_server_that_keeps_the_connection_does_not_hold_the_run(server):
    rows = ask(server, 2, options={"keep": 1}, timeout_s=100).rows
    assert {r["error"] for r in rows} == {None}


def test_a_silent_connection_and_a_run_that_takes_too_long(server):
    rows = ask(server, 2, options={"silent": 2}, silence_s=0.5).rows
    assert {r["error"] for r in rows} == {"no byte for 0.5 s"} and rows[0]["tokens"] == 2
    late = Workload([*load(1).requests, Request(1, 3600.0, [1], "a", 1)])
    rows = ask(server, workload=late, options={"silent": 2}, timeout_s=0.5).rows
    assert [r["error"] for r in rows] == ["not finished within the run's 0.5 s", "not sent within the run's 0.5 s"]
    assert rows[1]["sent_s"] is None


def test_an_engine_that_dies_in_the_run_makes_failed_rows_not_an_exception():
    """One crash aborted the whole sweep (vllm's sweep; llama.cpp 22815)."""
    with running() as doomed:

        def kill():
            while not doomed.log():
                time.sleep(0.01)
            doomed.process.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        workload = load(6, 50, at=lambda n: n * 0.2)
        rows = ask(doomed, workload=workload, options={"gap_ms": 50}).rows
        thread.join()
    assert all(r["error"] and r["first_s"] is None for r in rows)
    assert any("connection refused" in r["error"] for r in rows)


def test_nobody_at_the_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:.*refused"):
            replay(Target(url, "tgi", "m"), load(1))


def test_a_worker_that_is_killed_is_an_error_with_its_exit_code(server):
    def kill():
        while not (workers := [p for p in _children(os.getpid()) if b"batchlab.client.worker" in _cmdline(p)]):
            time.sleep(0.01)
        while not server.log():
            time.sleep(0.01)
        os.kill(int(workers[0]), signal.SIGKILL)

    server.forget()
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineError, match=r"process of the client died \(exit -9\)"):
        ask(server, 2, output_len=100, options={"gap_ms": 50})
    thread.join()


def test_workers_end_when_the_parent_is_killed(server):
    """A notebook's kernel may be killed at any moment; nothing may go on sending."""
    server.forget()
    code = (
        "from batchlab.client import Target, replay\n"
        "from batchlab.workload import Request, Workload\n"
        f"replay(Target({server.url(gap_ms=100)!r}, 'tgi', 'm'), Workload([Request(0, 0, [1], 'a', 10000)]))"
    )
    library = str(Path(package_replay.__code__.co_filename).parents[2])
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": library}) as parent:
        while not server.log():
            time.sleep(0.02)
        workers = _children(parent.pid)
        parent.kill()
    assert len(workers) == 1
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{workers[0]}") and b"worker" in _cmdline(workers[0]):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


# --- limits and choices ----------------------------------------------------------------------------------------------


def test_concurrency_is_not_capped_by_the_limit_of_open_files(server):
    """guidellm 487: concurrency was silently capped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        replayed = ask(server, 150, output_len=2, processes=1, options={"first_ms": 300})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {r["error"] for r in replayed.rows} == {None}
    assert replayed.check["connections_peak"] == 150


def test_a_concurrency_that_the_system_cannot_hold_is_refused(monkeypatch):
    """guidellm 487."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    check_open_files(4096 - SPARE)
    with pytest.raises(UsageError, match=r"5000 connections .* \(4096\).*ulimit -Hn"):
        check_open_files(5000)


@pytest.mark.parametrize(
    ("count", "concurrency", "streams", "cores", "expected"),
    [
        (1, None, None, 8, 1),
        (256, None, None, 8, 1),
        (257, None, None, 8, 2),
        (1024, None, None, 8, 4),
        (5000, None, None, 8, 7),
        (5000, None, None, 2, 1),
        (5000, None, None, 1, 1),
        (5000, 300, None, 8, 2),
        (5000, None, 64, 8, 1),
    ],
)
def test_the_number_of_processes_follows_streams_and_cores(count, concurrency, streams, cores, expected):
    assert choose_processes(load(count), concurrency, streams, cores) == expected


def test_the_number_of_processes_follows_the_chunks_of_a_finite_rate():
    busy = load(2000, 300, at=lambda n: n / 200)  # 200/s x 300 tokens = 60k chunks/s
    assert choose_processes(busy, None, None, 16) == 4
    assert choose_processes(load(2000, 20, at=lambda n: n / 200), None, None, 16) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api": "grpc"}, "api 'grpc' is unknown"),
        ({"prompt_format": "tokens"}, "prompt format 'tokens' is unknown"),
        ({"api": "tgi", "prompt_format": "ids"}, "takes no token ids"),
        ({"base_url": "127.0.0.1:8000"}, "must look like http://"),
        ({"base_url": "http://:8000"}, "must look like http://"),
        ({"base_url": "http://a:99999"}, "out of range"),
        ({"base_url": "http://a/v1?key=1"}, "no user, query or fragment"),
        ({"base_url": "http://a/ b"}, "plain ASCII"),
        ({"api_key": "a\nb"}, "api key"),
    ],
)
def test_targets_that_cannot_work(settings, words):
    with pytest.raises(UsageError, match=words):
        Target(**{"base_url": "http://a", "api": "openai-completions", "model": "m"} | settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 0}, "processes 0"),
        ({"max_concurrency": 0}, "max_concurrency 0"),
        ({"timeout_s": 0}, "timeout_s 0"),
        ({"silence_s": -1}, "silence_s -1"),
        ({"workload": Workload([])}, "no request"),
    ],
)
def test_settings_that_cannot_work(server, settings, words):
    with pytest.raises(UsageError, match=words):
        ask(server, **settings)


def test_an_unknown_host_and_a_workload_without_text(server):
    with pytest.raises(UsageError, match=r"host nowhere\.invalid is unknown"):
        replay(Target("http://nowhere.invalid", "tgi", "m"), load(1))
    with pytest.raises(UsageError, match="request 0 has no text"):
        ask(server, workload=Workload([Request(0, 0.0, [1], None, 1)]))


# --- addresses and TLS -----------------------------------------------------------------------------------------------


def test_ipv6_and_a_name_that_stands_for_two_addresses():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with running("::1") as server:
        assert "[::1]" in server.root
        assert ask(server, 2).rows[1]["error"] is None


def test_a_name_whose_first_address_does_not_answer(server):
    port = server.root.rpartition(":")[2]
    rows = replay(Target(f"http://localhost:{port}", "tgi", "m"), load(2), lead_s=0.05).rows
    assert {r["error"] for r in rows} == {None}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    made = (
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-addext",
                "subjectAltName=DNS:localhost",
                "-keyout",
                folder / "key.pem",
                "-out",
                folder / "cert.pem",
            ],
            capture_output=True,
            check=False,
        )
        if _has_openssl()
        else None
    )
    if made is None or made.returncode:
        pytest.skip("openssl is needed to make a certificate")
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


def _has_openssl():
    from shutil import which

    return which("openssl") is not None


def test_https(server, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.parent / "cert.pem"))
    with tls_in_front(int(server.root.rpartition(":")[2]), certificate) as port:
        url = f"https://localhost:{port}/pad=20000,gap_ms=2"
        workload = load(6, 20, words=20_000, at=lambda n: n * 0.02)
        replayed = replay(Target(url, "openai-completions", "m"), workload, lead_s=0.05)
        assert {r["error"] for r in replayed.rows} == {None} and {r["tokens"] for r in replayed.rows} == {20}
        assert replayed.check["receive_lag_p99_ms"] is None


def test_https_with_a_certificate_that_nobody_vouches_for(server, certificate, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    plain = int(server.root.rpartition(":")[2])
    with tls_in_front(plain, certificate) as port, pytest.raises(EngineError, match="certificate"):
        replay(Target(f"https://localhost:{port}", "tgi", "m"), load(1))
