"""Runs a command and follows the CPU time of everything that it started, orphans included."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PR_SET_CHILD_SUBREAPER = 36
SAMPLE_S = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ran:
    """code: None when it ran out of time. cpu_s: user and system time of the whole tree until each of times_ns
    (CLOCK_MONOTONIC); the last is the exact sum after its end."""

    code: int | None
    times_ns: np.ndarray
    cpu_s: np.ndarray
    output: str

    def cpu_from(self, begin_ns: int, end_ns: int | None = None) -> float:
        """CPU seconds from one moment to another, or to the end."""
        until = self.cpu_s[-1] if end_ns is None else np.interp(end_ns, self.times_ns, self.cpu_s)
        return float(until - np.interp(begin_ns, self.times_ns, self.cpu_s))


def adopt_orphans() -> None:
    """Processes that their parents leave behind become this one's children, so that their CPU time is counted too."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run(
    command: list[str], *, core: int, environment: dict[str, str], folder: Path, timeout_s: float, others: set[int]
) -> Ran:
    """Runs `command` pinned on `core` and waits for all that it started. adopt_orphans() comes first. others: children
    of this process that are not to be touched, and that do not end meanwhile."""
    before = _reaped_cpu()
    log = folder / "output.txt"
    samples: list[tuple[int, float]] = [(time.monotonic_ns(), 0.0)]
    ended = threading.Event()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        sampler = threading.Thread(target=_sample, args=(others, before, samples, ended))
        sampler.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        _reap(others)
        ended.set()
        sampler.join()
    samples.append((time.monotonic_ns(), _reaped_cpu() - before))
    times, cpu = zip(*samples, strict=True)
    # a sample between a child's end and its collection misses it; time never runs backwards
    return Ran(code, np.array(times), np.maximum.accumulate(cpu), log.read_text(errors="replace"))


def _sample(others: set[int], before: float, samples: list[tuple[int, float]], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        begin = time.monotonic_ns()
        cpu = _reaped_cpu() - before + sum(map(_tree_cpu, _children(os.getpid()) - others))
        samples.append(((begin + time.monotonic_ns()) // 2, cpu))


def _tree_cpu(pid: int) -> float:
    """Of a process, its descendants and what it has collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) * _TICK_S + sum(map(_tree_cpu, _children(pid)))


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children.update(map(int, (task / "children").read_text().split()))
    return children


def _reap(others: set[int], patience_s: float = 20) -> None:
    """Waits for what the command left behind, and ends what does not end by itself."""
    deadline = time.monotonic() + patience_s
    while left := _children(os.getpid()) - others:
        for pid in left:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def _reaped_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
