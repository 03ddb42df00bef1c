"""Run a command that must not outlive whoever started it.

`python supervise.py LOG COMMAND ...` starts the command in a process group of its own, its output appended to
LOG. When this process's standard input ends (because the starter closed it, or was killed) or SIGTERM comes,
the whole group gets SIGTERM and, after ten seconds, SIGKILL. Then BATCHLAB_CLEANUP is run, a command as a JSON list:
what removes a container, which is no child of ours. Last come processes that had left the group (on Linux, where they
become our children when their parents are gone): SIGKILL. Exits with the command's status. Standard library only: it
may run under an engine's Python.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
CLEANUP_S = 30.0
SET_CHILD_SUBREAPER = 36  # of prctl(2)


def group_alive(group: int) -> bool:
    """Whether any process of the group still runs; zombies count until they are reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def stop_group(child: subprocess.Popen, grace_s: float = GRACE_S) -> None:
    """SIGTERM to the group, then SIGKILL to whatever is left of it after the grace."""
    for sign, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            child.poll()
            if child.returncode is not None:
                reap()
                if not group_alive(child.pid):
                    return
            time.sleep(0.05)


def adopt_orphans() -> None:
    """Processes below us whose parents end become our children, not init's. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Take note of the ends of adopted processes, which would stay zombies. The command's own must be known by now."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def stop_orphans() -> None:
    """SIGKILL to whatever is still below us, five seconds at most. The command itself has ended."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                left = [int(word) for word in file.read().split()]
        except OSError:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(0.05)


def clean_up(command: list[str]) -> None:
    """Run it, in silence: nothing to remove is no failure."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CLEANUP_S
        )


def main(log_path: str, *command: str) -> int:
    after = json.loads(os.environ.pop("BATCHLAB_CLEANUP", "[]"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    with open(log_path, "ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        while child.poll() is None:
            readable, _, _ = select.select([0], [], [], 0.2)
            if readable and not os.read(0, 4096):
                break
    finally:
        stop_group(child)
        if after:
            clean_up(after)
        if child.returncode is not None:
            stop_orphans()  # after the cleanup: podman's monitor of a container is one of them, and is asked by it
    return child.returncode if child.returncode is not None else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
