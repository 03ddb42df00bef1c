"""Engines start under a supervisor, are watched by process and health, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from batchlab.engines import process
from batchlab.errors import EngineError, UsageError

PYTHON = sys.executable
# an "engine" with a child of its own, both of which ignore SIGTERM
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path, code, *args):
    return process.launch([PYTHON, "-c", textwrap.dedent(code), *args], env={}, log=tmp_path / "engine.log")


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def pids_of(engine):
    until(lambda: b"pids" in engine.log.read_bytes())
    return [int(p) for p in engine.log.read_text().split("pids")[1].split()[:2]]


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_stop_ends_the_whole_tree_even_when_it_ignores_sigterm(tmp_path, monkeypatch):
    engine = start(tmp_path, STUBBORN)
    pids = pids_of(engine)
    started = time.monotonic()
    engine.stop()
    assert all(gone(pid) for pid in pids) and not engine.alive()
    assert time.monotonic() - started >= process.supervise.GRACE_S  # it had its grace


def test_an_engine_does_not_outlive_a_killed_starter(tmp_path):
    code = textwrap.dedent("""
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from batchlab.engines import process
        process.launch([sys.executable, "-c", sys.argv[3]], env={}, log=Path(sys.argv[2]))
        time.sleep(60)
    """)
    lib = os.path.join(os.path.dirname(__file__), "..", "lib")
    quiet = "import os, time; print('pids', os.getpid(), os.getpid(), flush=True); time.sleep(60)"
    starter = subprocess.Popen([PYTHON, "-c", code, lib, str(tmp_path / "engine.log"), quiet])
    until((tmp_path / "engine.log").exists)
    pids = pids_of(process.EngineProcess(starter, tmp_path / "engine.log"))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_death_while_starting_is_told_with_reason_and_last_lines(tmp_path):
    engine = start(tmp_path, "print('loading'); print('boom: 17 GiB short'); raise SystemExit(3)")
    with pytest.raises(EngineError) as error:
        process.wait_ready(
            engine, lambda: False, timeout_s=20, known={r"boom: (\d+) GiB": "{0} GiB are missing"}, name="X"
        )
    assert error.value.reason == "X cannot start: 17 GiB are missing" and "loading" in error.value.tail


def test_an_unknown_death_gives_its_status(tmp_path):
    engine = start(tmp_path, "raise SystemExit(3)")
    with pytest.raises(EngineError, match="exited with status 3 while starting"):
        process.wait_ready(engine, lambda: False, timeout_s=20, known={}, name="X")


def test_an_engine_that_hangs_is_given_up(tmp_path):
    engine = start(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(EngineError, match="not ready after 1 s"):
        process.wait_ready(engine, lambda: False, timeout_s=1, known={}, name="X")
    engine.stop()


def test_a_command_that_does_not_exist(tmp_path):
    engine = process.launch(["/no/such/engine"], env={}, log=tmp_path / "engine.log")
    with pytest.raises(EngineError, match="X cannot start"):
        process.wait_ready(engine, lambda: False, timeout_s=20, known={}, name="X")


def test_our_own_server_and_a_strangers(tmp_path):
    port, other = process.free_port(), process.free_port()
    engine = start(tmp_path, SERVER, str(port))
    stranger = subprocess.Popen([PYTHON, "-c", SERVER, str(other)])
    try:
        until(
            lambda: process.healthy(f"http://127.0.0.1:{port}/health") and process.healthy(f"http://127.0.0.1:{other}/")
        )
        assert process.owns_port(engine, port)
        assert not process.owns_port(engine, other)
    finally:
        engine.stop()
        stranger.kill()
        stranger.wait()
    assert not process.healthy(f"http://127.0.0.1:{port}/health")


def test_a_taken_port_names_who_has_it():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is taken by process {os.getpid()} .*drop `port`"):
            process.free_port(port)
    assert process.free_port(port) == port


def test_a_port_as_low_as_the_engine_needs():
    free = {process.free_port() for _ in range(40)}
    highest = sorted(free)[len(free) // 2]
    assert all(process.free_port(highest=highest) <= highest for _ in range(40)) and max(free) > highest
    with pytest.raises(UsageError, match=r"port 60000: this engine takes ports up to 55535"):
        process.free_port(60000, highest=55535)
    with pytest.raises(UsageError, match=r"no free port up to 1;"):
        process.free_port(highest=1)
