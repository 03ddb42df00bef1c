"""Where a cell was measured, with what, and what the GPU did meanwhile."""

import importlib.metadata
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import batchlab
from batchlab import paths

GIB = 2**30
LIBRARIES = ("aiohttp", "h11", "httptools", "numpy", "orjson", "pandas", "psutil", "pyarrow", "pydantic",
             "tokenizers")
# What does not change a measurement: figures, reports and records are written by it.
_NOT_CODE = (":!figures", ":!data/results", ":!*.md")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gib: float


def cell(
    engine: dict[str, Any], started: float, load: float | None, *, commit: str | None = None
) -> dict[str, Any]:
    """The provenance of one cell.

    `engine` is the engine's own description, `started` a time.time(), `load` the load average before it; `commit`
    where it is known already (git is asked otherwise).
    """
    begun = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    return {"machine": machine(), "commit": commit or git_commit(paths.ROOT), "engine": engine, "load_average": load,
            "started": begun, "libraries": libraries()}


@cache
def machine() -> dict[str, Any]:
    """This machine: name (for captions), cpu, cores, memory_gib, os, python, gpus, driver. No host name."""
    gpus, driver = _gpus()
    cpu, cores = _cpu_model(), os.cpu_count() or 1
    name = f"{cpu}, {cores} cores"
    if gpus:
        name = gpus[0].name if len(gpus) == 1 else f"{len(gpus)}× {gpus[0].name}"
    return {"name": name, "cpu": cpu, "cores": cores,
            "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
            "os": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "gpus": [{"name": g.name, "memory_gib": g.memory_gib} for g in gpus], "driver": driver}


def hardware() -> str:
    """This machine's name in scenarios: that of its first GPU in aiconfigurator (h200_sxm, …), or `cpu`."""
    gpus, _ = _gpus()
    return gpu_hardware(gpus[0].name) if gpus else "cpu"


def gpu_hardware(name: str) -> str:
    """NVML's product name as a scenario's hardware name: `NVIDIA A100-SXM4-80GB` is a100_sxm."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower().replace("nvidia", "").replace("tesla", "")).split()
    # A server part without PCIe or NVL in its name is the SXM one: NVML says just "NVIDIA H200".
    chip = next((w for w in words if re.fullmatch(r"[ahb]\d00", w)), None)
    if chip is None:
        return "_".join(w for w in words if not re.fullmatch(r"\d+gb|blackwell|ada|generation|edition", w))
    form = next((f for f in ("pcie", "nvl") if f in words), "sxm")
    return f"{chip}_{form}"


def load_average() -> float | None:
    """Runnable processes, averaged over the last minute; None where the system keeps no such number."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


@cache
def libraries() -> dict[str, str]:
    """Versions of what shapes a measurement on the client's side, and of batchlab itself."""
    found = {"batchlab": batchlab.__version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(root: Path) -> str:
    """The short commit of `root`, `+changes` added when tracked code differs.

    Outside of git (a host that got the tree as an archive) what BATCHLAB_COMMIT says, else `unknown`.
    """
    try:
        commit = _git(root, "rev-parse", "--short=7", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_CODE)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BATCHLAB_COMMIT", "unknown")
    return f"{commit}+changes" if changed else commit


def _git(root: Path, *args: str) -> str:
    # without the lock, a look at the status never disturbs a commit that is being made
    command = ["git", "--no-optional-locks", "-C", str(root), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _cpu_model() -> str:
    """The processor's product name, from /proc/cpuinfo or the system."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join((found.group(1) if found else platform.processor() or platform.machine()).split())


# GPUs -------------------------------------------------------------------------------------------------------
@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml, initialised; None without the module, the driver or a GPU."""
    try:
        import pynvml
        pynvml.nvmlInit()
    except Exception:    # ImportError, or NVMLError of a dozen kinds: none of them a reason not to measure
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    """The GPUs that CUDA programs of this process would see, in their order. NVML itself shows them all."""
    every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return every
    chosen = []
    for wanted in filter(None, (part.strip() for part in visible.split(","))):
        match = [h for i, h in enumerate(every)
                 if wanted == str(i) or _text(nvml.nvmlDeviceGetUUID(h)).startswith(wanted)]
        if not match:
            break           # as CUDA does: an unknown one hides those after it
        chosen.append(match[0])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpus() -> tuple[list[Gpu], str | None]:
    """The visible GPUs and the driver's version."""
    with _nvml() as nvml:
        if nvml is not None:
            found = []
            for handle in _handles(nvml):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
                found.append(Gpu(_text(nvml.nvmlDeviceGetName(handle)), round(memory / GIB, 1)))
            return found, _text(nvml.nvmlSystemGetDriverVersion())
    return _gpus_by_command()


def gpu_memory() -> tuple[float, float] | None:
    """GiB of the first visible GPU that are free, and that there are; None where NVML cannot be asked."""
    with _nvml() as nvml:
        handles = _handles(nvml) if nvml is not None else []
        if not handles:
            return None
        memory = nvml.nvmlDeviceGetMemoryInfo(handles[0])
        return memory.free / GIB, memory.total / GIB


def _gpus_by_command() -> tuple[list[Gpu], str | None]:
    """The same from nvidia-smi, for a Python without nvidia-ml-py."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        query += ["-i", visible]
    if visible == "":
        return [], None
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        return [Gpu(name, round(float(mib) / 1024, 1)) for name, mib, _ in rows], rows[0][2] if rows else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return [], None


@dataclass(slots=True)
class GpuSamples:
    """What a GPU did: samples of (seconds, watts, SM clock in MHz, bytes of memory in use)."""

    name: str | None = None
    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    counted_j: float | None = None      # the card's own energy counter, where it has one

    def summary(self) -> dict[str, Any] | None:
        """Means, peaks and energy; None when nothing was sampled."""
        if not self.rows:
            return None
        at, power_w, clock_mhz, memory = zip(*self.rows, strict=True)
        steps = zip(at, at[1:], power_w, power_w[1:], strict=False)
        sampled_j = sum((b - a) * (p + q) / 2 for a, b, p, q in steps)
        energy_j = sampled_j if self.counted_j is None else self.counted_j
        return {"name": self.name, "samples": len(at), "duration_s": round(at[-1] - at[0], 3),
                "power_mean_w": round(sum(power_w) / len(at), 1), "power_max_w": round(max(power_w), 1),
                "energy_j": round(energy_j, 1),
                "sm_clock_mean_mhz": round(sum(clock_mhz) / len(at)),
                "sm_clock_min_mhz": round(min(clock_mhz)), "sm_clock_max_mhz": round(max(clock_mhz)),
                "memory_mean_gib": round(sum(memory) / len(at) / GIB, 2),
                "memory_peak_gib": round(max(memory) / GIB, 2)}


@contextmanager
def gpu_sampler(hz: float = 5.0) -> Iterator[GpuSamples]:
    """Sample the first visible GPU in a thread while the block runs. Without a GPU this does nothing.

    Memory is that of the whole card, other processes included.
    """
    samples = GpuSamples()
    with _nvml() as nvml:
        handles = _handles(nvml) if nvml is not None else []
        if not handles:
            yield samples
            return
        samples.name = _text(nvml.nvmlDeviceGetName(handles[0]))
        stop = threading.Event()
        thread = threading.Thread(target=_sample, args=(nvml, handles[0], samples, stop, hz), daemon=True)
        before_mj = _energy_mj(nvml, handles[0])
        thread.start()
        try:
            yield samples
        finally:
            stop.set()
            thread.join()
            after_mj = _energy_mj(nvml, handles[0])
            if before_mj is not None and after_mj is not None:
                samples.counted_j = (after_mj - before_mj) / 1000


def _sample(nvml: Any, handle: Any, samples: GpuSamples, stop: threading.Event, hz: float) -> None:
    begin = time.monotonic()
    while True:
        last = stop.is_set()         # one more sample after the end, so that a short block has two
        try:
            samples.rows.append((time.monotonic() - begin, nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                                 nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                                 nvml.nvmlDeviceGetMemoryInfo(handle).used))
        except nvml.NVMLError:
            return                   # a virtual GPU may refuse power or clocks: none is better than half
        if last:
            return
        stop.wait(1 / hz)


def _energy_mj(nvml: Any, handle: Any) -> int | None:
    try:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        return None
