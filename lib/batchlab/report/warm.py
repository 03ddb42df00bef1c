"""A Python that has a report's libraries loaded, for one `make report`: its commands and kernels are forks of it.

    python -m batchlab.report.warm COMMAND…

runs COMMAND (make) with the server's address in its environment, and ends with it. A report starts two Pythons a
notebook, its own process and its kernel, and each spends one to two seconds on the same imports. `ask` is the other
end: it hands over arguments, environment, directory and open files, passes signals on, and tells the exit status. What
is asked for runs in a fork of its own, in a session of its own, as it would in a Python of its own; nothing is loaded
before the first question. Where there is no server, or none can be (only Linux forks safely what is loaded here), `ask`
says so and the caller goes on by itself.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ADDRESS = "BATCHLAB_WARM"
# what a report's commands and kernels import
LOADED = (
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    "IPython.core.debugger",
    "IPython.core.completerlib",
    "IPython.core.history",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "matplotlib_inline.backend_inline",
    "matplotlib.backends.backend_svg",
    "batchlab.report.execute",
    "batchlab.report.render",
    "batchlab.report.index",
    "batchlab.recommend",
    "batchlab.report.ahead",
    "batchlab.report.budgets",
    "batchlab.report.limits",
    "batchlab.report.peers",
    "batchlab.report.rivals",
    "batchlab.report.serving",
    "batchlab.report.validation",
    "batchlab.report.weights",
    "batchlab.report.what_if",
    "pyarrow.pandas_compat",
    "sqlite3",
    "tornado.platform.asyncio",
)
LOADED_WITH = {
    # no threads of numpy's and of pyarrow's allocator, which a fork would lose
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # as a kernel sets it before it loads matplotlib
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no warning of a debugger that nobody asked for
}
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ACCEPTED = b"+"
POLL_S = 1.0


def ask(kind: str, argv: Sequence[str]) -> int | None:
    """The exit status of RUN[kind](argv) in a fork of the server; None where no server took it."""
    server = socket.socket(socket.AF_UNIX)
    heeded = {signum: handler for signum in PASSED_ON if (handler := signal.getsignal(signum)) != signal.SIG_IGN}
    try:
        server.connect(os.environ[ADDRESS])
        for signum in heeded:
            signal.signal(signum, lambda got, frame: server.send(bytes([got])))
        told = {"kind": kind, "argv": list(argv), "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(server, [b"!"], [0, 1, 2])
        server.sendall(json.dumps(told).encode() + b"\n")
        if server.recv(1) != ACCEPTED:
            raise ConnectionError
    except (KeyError, OSError):
        for signum, handler in heeded.items():
            signal.signal(signum, handler)
        return None
    parent = os.getppid()
    while not select.select([server], [], [], POLL_S)[0]:
        if os.getppid() != parent:  # whoever asked is gone; the server ends what it asked for
            return 1
    return int(server.recv(16) or b"1")


def run_report(argv: list[str]) -> int:
    from batchlab.report.__main__ import main

    return main(argv)


def run_kernel(argv: list[str]) -> int:
    """As `python -m ipykernel_launcher`."""
    from ipykernel import kernelapp

    os.environ.pop("JPY_PARENT_PID", None)  # the parent here is the server
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    sys.argv = ["ipykernel_launcher", *argv]
    kernelapp.launch_new_instance()
    return 0


RUN: dict[str, Callable[[list[str]], int]] = {"report": run_report, "kernel": run_kernel}


class Server:
    """Answers one `ask` after the other while a command runs; `status` is the command's once that has ended."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)
        self.address = str(folder / "socket")
        self.ready: bool | None = None  # whether everything is loaded, None before it was tried
        self.running: dict[int, tuple[int, socket.socket]] = {}  # pidfd → process, its caller

    def serve(self, command: Sequence[str]) -> int | dict[str, Any]:
        """The command's exit status; in a fork, what that is to run."""
        # handlers rather than SIG_IGN, which the command would inherit: it is the command that an interrupt ends
        made = subprocess.Popen(command, env=os.environ | {ADDRESS: self.address}, close_fds=False)
        signal.signal(signal.SIGINT, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda got, frame: made.send_signal(got))
        end = os.pidfd_open(made.pid)
        while True:
            callers = {caller: fd for fd, (_, caller) in self.running.items()}
            for found in select.select([end, self.listener, *self.running, *callers], [], [])[0]:
                if found is self.listener:
                    if told := self.accept():
                        return told
                elif found == end:
                    for process, _ in self.running.values():
                        _kill(process, signal.SIGKILL)
                    return made.wait()
                elif found in self.running:
                    process, caller = self.running.pop(found)
                    os.close(found)
                    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    _tell(caller, str(status if status >= 0 else 128 - status).encode())
                    caller.close()
                elif (fd := callers.get(found)) in self.running:
                    signals = _received(found)
                    for signum in signals or [signal.SIGKILL]:  # a caller that is gone was killed
                        _kill(self.running[fd][0], signum)

    def accept(self) -> dict[str, Any] | None:
        """Forks for one caller. None in this process, what to run in the fork."""
        caller, _ = self.listener.accept()
        try:
            _, fds, _, _ = socket.recv_fds(caller, 1, 3)
            with caller.makefile("rb") as lines:
                told = json.loads(lines.readline())
        except (OSError, ValueError):
            caller.close()
            return None
        if self.ready is None:
            self.ready = loaded()
        if not self.ready:
            caller.close()
        elif process := os.fork():
            self.running[os.pidfd_open(process)] = process, caller
            _tell(caller, ACCEPTED)
        else:
            return told | {"fds": fds}
        for fd in fds:
            os.close(fd)
        return None


def _tell(caller: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        caller.sendall(data)


def _received(caller: socket.socket) -> bytes:
    try:
        return caller.recv(16)
    except OSError:
        return b""


def _kill(process: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if signum == signal.SIGKILL else os.kill)(process, signum)


def loaded() -> bool:
    """Loads LOADED; False where something is missing or has started a thread, which a fork would lose."""
    before = {name: os.environ.get(name) for name in LOADED_WITH}
    os.environ.update(LOADED_WITH)
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # as report.__main__ does
    try:
        for name in LOADED:
            importlib.import_module(name)
    except ImportError:
        return False
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    gc.collect()
    gc.freeze()  # collecting in a fork would copy all that is loaded
    return threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1


def become(told: dict[str, Any]) -> int:
    """In a fork: the caller's session, signals, files, directory and environment, then what it asked for."""
    os.setsid()  # signals come from the caller alone, as bytes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    for fd, given in enumerate(told["fds"]):
        os.dup2(given, fd)
        os.close(given)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    random.seed()
    return RUN[told["kind"]](told["argv"])


def main(command: Sequence[str]) -> int:
    """The command's exit status."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        os.execvp(command[0], list(command))
    mine = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix="batchlab-warm-"))
    try:
        server = Server(folder)
        found = server.serve(command)
    finally:
        if os.getpid() == mine:
            (folder / "socket").unlink(missing_ok=True)
            folder.rmdir()
    if isinstance(found, int):
        return found if found >= 0 else 128 - found
    server.listener.close()
    return become(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
