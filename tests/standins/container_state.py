"""Containers of the stand-in for docker and podman: their records, and the keeper process that each of them has."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans inside the container stay its own


def folder() -> Path:
    return Path(os.environ["STANDIN_CONTAINERS"])


def containers() -> list[dict[str, Any]]:
    """The records of all containers, the stopped ones too."""
    found = []
    for file in sorted(folder().glob("*/container.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(file.read_text()))
    return found


def find(name: str) -> dict[str, Any] | None:
    return next((c for c in containers() if name in (c["name"], c["id"]) or c["id"].startswith(name)), None)


def record(container: dict[str, Any]) -> None:
    target = folder() / container["id"] / "container.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(container))
    temporary.rename(target)


def detached(container: dict[str, Any], command: list[str], environment: dict[str, str]) -> int:
    """Start the container's keeper, which is nobody's child. Returns where its exit status comes to be read."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.wait()
        return reading
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(reading)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # or the client's output would stay open as long as the container lives
        os.dup2(nothing, stream)
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, signal.SIG_IGN)
    keep(container, command, environment, writing)
    os._exit(0)


def keep(container: dict[str, Any], command: list[str], environment: dict[str, str], writing: int) -> None:
    """The container's life, in a process of its own."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    place = folder() / container["id"]
    with open(place / "output", "ab") as output:
        first = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: [signal.signal(sign, signal.SIG_DFL) for sign in (signal.SIGTERM, signal.SIGINT)],
        )
    container["pid"] = first.pid
    record(container)
    status = first.wait()
    for _ in range(200):
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        if not left:
            break
    with contextlib.suppress(BrokenPipeError):  # the client was killed
        os.write(writing, str(status if status >= 0 else 128 - status).encode())
    if container["remove"]:
        shutil.rmtree(place, ignore_errors=True)
    else:
        record(container | {"pid": None})


def attached(container: dict[str, Any], status: int) -> int:
    """The client's part: output and signals are passed on, and it ends with the container's status."""
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda number, _: send(container, number))
    os.set_blocking(status, False)
    code, file = b"", folder() / container["id"] / "output"
    with open(file, "rb") as output:  # stays readable when the container is removed
        while not code:
            time.sleep(0.02)
            with contextlib.suppress(BlockingIOError):
                code = os.read(status, 16) or b"137"
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
    return int(code)


def send(container: dict[str, Any], sign: int) -> None:
    """A signal to the container's first process."""
    current = find(container["id"])
    if current and current["pid"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(current["pid"], sign)


def end(container: dict[str, Any], patience_s: float) -> None:
    """SIGTERM, then SIGKILL; back when it has ended."""
    deadline = time.monotonic() + patience_s
    sign = signal.SIGTERM if patience_s else signal.SIGKILL
    send(container, sign)
    while (current := find(container["id"])) and current["pid"] and Path(f"/proc/{current['pid']}").exists():
        if time.monotonic() > deadline:
            send(container, signal.SIGKILL)
        time.sleep(0.02)
