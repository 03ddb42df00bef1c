"""An engine's process: started under a supervisor, watched by process and health, stopped surely."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchlab.engines import supervise
from batchlab.errors import EngineError, UsageError

TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine. `log` is a file; `child` is the supervisor, whose standard input keeps the engine alive."""

    child: subprocess.Popen
    log: Path

    def alive(self) -> bool:
        return self.child.poll() is None

    def tree(self) -> list[psutil.Process]:
        """The engine's processes, without the supervisor."""
        try:
            return psutil.Process(self.child.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Stop the engine and wait until none of its processes is left."""
        left = self.tree()
        if self.child.stdin:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
        try:
            self.child.wait(supervise.GRACE_S + supervise.CLEANUP_S + 10.0)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        _, stubborn = psutil.wait_procs(left, timeout=1.0)
        for process in stubborn:  # one that had left the group
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5.0)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the engine's log."""
        try:
            text = self.log.read_bytes()[-65536:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def search_log(self, known: Mapping[str, str]) -> str | None:
        """The meaning of the first known failure string (a regular expression) found in the log."""
        try:
            text = self.log.read_bytes().decode(errors="replace")
        except OSError:
            return None
        for pattern, meaning in known.items():
            found = re.search(pattern, text)
            if found:
                return meaning.format(*found.groups())
        return None


def _inherited() -> dict[str, str]:
    """This process's environment, less what a notebook's runner sets for itself: an engine picks its own threads."""
    return {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def launch(command: Sequence[str], *, env: Mapping[str, str], log: Path, cleanup: Sequence[str] = ()) -> EngineProcess:
    """Start a command under the supervisor; EngineError when it cannot be started at all.

    `cleanup` is a command that is run once this one has ended, however it ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    try:
        child = subprocess.Popen(
            [sys.executable, supervise.__file__, str(log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**_inherited(), **env, **({"BATCHLAB_CLEANUP": json.dumps(list(cleanup))} if cleanup else {})},
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"cannot start {command[0]}: {error.strerror}") from None
    return EngineProcess(child, log)


def free_port(wanted: int | None = None, *, highest: int = 65535) -> int:
    """A port on loopback that nobody listens on, at most `highest`.

    UsageError for a wanted one that is taken, naming who has it, or that is too high; and where none is free.
    """
    if wanted and wanted > highest:
        raise UsageError(f"port {wanted}: this engine takes ports up to {highest}; change `port` in the scenario")
    for _ in range(200):
        with socket.socket() as probe:
            if wanted:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted or 0))
            except OSError:
                raise UsageError(
                    f"port {wanted} is taken{_listener(wanted)}; stop that process, or change or drop `port` "
                    "in the scenario"
                ) from None
            if (port := probe.getsockname()[1]) <= highest:
                return port
    raise UsageError(f"the system offers no free port up to {highest}; name one as `port` in the scenario")


def _listener(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def owns_port(process: EngineProcess, port: int) -> bool:
    """Whether one of the engine's own processes listens on the port."""
    for member in process.tree():
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in member.net_connections("tcp")):
                return True
    return False


def healthy(url: str) -> bool:
    """Whether GET answers 200 within two seconds."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2.0) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def wait_ready(
    process: EngineProcess,
    ready: Callable[[], bool],
    *,
    timeout_s: float,
    known: Mapping[str, str],
    name: str,
    tick: Callable[[float], None] | None = None,
) -> float:
    """Wait until `ready()`; seconds waited. EngineError with the reason and the engine's last lines otherwise.

    `known` maps failure strings of this engine's log to what they mean.
    """
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        if not process.alive():
            reason = process.search_log(known) or f"exited with status {process.child.returncode} while starting"
            raise EngineError(f"{name} cannot start: {reason}", process.tail())
        if ready():
            return waited
        if waited > timeout_s:
            raise EngineError(f"{name} was not ready after {timeout_s:.0f} s (startup_timeout_s)", process.tail())
        if tick:
            tick(waited)
        time.sleep(0.2)
