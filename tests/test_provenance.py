"""Provenance: the machine, the commit, and a GPU sampled through a stand-in for NVML."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from batchlab import provenance

GIB = 2**30


class NvmlError(Exception):
    pass


def fake_nvml(names: list[str], *, power_mw: int = 300_000, energy: bool = True) -> types.ModuleType:
    """A pynvml with these GPUs, drawing a constant power."""
    nvml = types.ModuleType("pynvml")
    begin = time.monotonic()

    def total_energy_mj(_: int) -> int:
        if not energy:
            raise NvmlError("not supported")
        return round((time.monotonic() - begin) * power_mw)

    nvml.NVMLError, nvml.NVML_CLOCK_SM = NvmlError, 1
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(names)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: names[handle]
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}aaa"
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=80 * GIB, used=(handle + 1) * GIB)
    nvml.nvmlSystemGetDriverVersion = lambda: b"580.1"
    nvml.nvmlDeviceGetPowerUsage = lambda handle: power_mw
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: 1980
    nvml.nvmlDeviceGetTotalEnergyConsumption = total_energy_mj
    return nvml


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """No GPU unless a test brings one, and nothing remembered between tests."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(provenance, "_gpus_by_command", lambda: ([], None))
    provenance.machine.cache_clear()
    yield
    provenance.machine.cache_clear()


def test_machine_without_a_gpu_is_named_by_its_cpu() -> None:
    machine = provenance.machine()
    assert machine["name"] == f"{machine['cpu']}, {machine['cores']} cores"
    assert machine["gpus"] == [] and machine["driver"] is None and machine["memory_gib"] > 0
    assert provenance.hardware() == "cpu"


def test_machine_keeps_the_host_name_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    real = platform.uname()
    monkeypatch.setattr(platform, "uname", lambda: real._replace(node="secret-host"))
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    assert platform.node() == "secret-host"
    assert "secret-host" not in json.dumps(provenance.cell({"name": "vllm"}, time.time(), 0.5))


def test_machine_with_gpus_is_named_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200", "NVIDIA H200"]))
    machine = provenance.machine()
    assert machine["name"] == "2× NVIDIA H200" and machine["driver"] == "580.1"
    assert machine["gpus"][0] == {"name": "NVIDIA H200", "memory_gib": 80.0}
    assert provenance.hardware() == "h200_sxm"


@pytest.mark.parametrize(("visible", "first"), [
    ("1", "NVIDIA L40S"), ("1,0", "NVIDIA L40S"), ("GPU-1", "NVIDIA L40S"), ("0", "NVIDIA H200"), ("", None),
    ("7,0", None)])
def test_cuda_visible_devices_chooses(visible: str, first: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200", "NVIDIA L40S"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = provenance.machine()["gpus"]
    assert (gpus[0]["name"] if gpus else None) == first


@pytest.mark.parametrize(("product", "hardware"), [
    ("NVIDIA H200", "h200_sxm"), ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
    ("NVIDIA A100 80GB PCIe", "a100_pcie"), ("NVIDIA H100 NVL", "h100_nvl"), ("NVIDIA L40S", "l40s"),
    ("Tesla T4", "t4"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090")])
def test_hardware_names_follow_aiconfigurator(product: str, hardware: str) -> None:
    assert provenance.gpu_hardware(product) == hardware


def test_nvidia_smi_stands_in_for_a_missing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 81920, 550.54'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert provenance.hardware() == "a100_sxm"
    assert provenance.machine()["gpus"] == [{"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 80.0}]


def test_sampler_without_a_gpu_does_nothing() -> None:
    with provenance.gpu_sampler() as gpu:
        pass
    assert gpu.summary() is None


@pytest.mark.parametrize("counter", [True, False])
def test_sampler_finds_power_energy_and_peak_memory(counter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200"], energy=counter))
    with provenance.gpu_sampler(hz=200) as gpu:
        time.sleep(0.1)
    found = gpu.summary()
    assert found and found["samples"] >= 2
    assert (found["power_mean_w"], found["power_max_w"], found["sm_clock_mean_mhz"]) == (300.0, 300.0, 1980)
    assert found["memory_peak_gib"] == 1.0
    assert found["energy_j"] == pytest.approx(300 * found["duration_s"], rel=0.3)


def test_sampler_of_a_short_block_has_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200"]))
    with provenance.gpu_sampler(hz=0.001) as gpu:
        while not gpu.rows:
            time.sleep(0.001)
    assert gpu.summary()["samples"] == 2


def test_sampler_survives_a_card_that_refuses_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(["GRID T4"])

    def refused(_: int) -> int:
        raise NvmlError("not supported")

    nvml.nvmlDeviceGetPowerUsage = refused
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with provenance.gpu_sampler() as gpu:
        time.sleep(0.01)
    assert gpu.summary() is None


def test_sampler_lets_the_block_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200"]))
    with pytest.raises(ZeroDivisionError), provenance.gpu_sampler():
        _ = 1 / 0


def run_git(folder: Path, *args: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *args], check=True,
                   capture_output=True)


def test_commit_says_when_code_was_changed(tmp_path: Path) -> None:
    assert provenance.git_commit(tmp_path) == "unknown"
    run_git(tmp_path, "init", "-q")
    for name in ("code.py", "README.md", "figures/a.svg", "data/results/h200/b.zip"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "first")
    clean = provenance.git_commit(tmp_path)
    assert len(clean) == 7 and set(clean) <= set("0123456789abcdef")

    for name in ("README.md", "figures/a.svg", "data/results/h200/b.zip", "untracked.py"):
        (tmp_path / name).write_text("2")
    assert provenance.git_commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert provenance.git_commit(tmp_path) == f"{clean}+changes"


def test_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_commit(Path.cwd()) == "unknown"


def test_cell_provenance_is_plain_json() -> None:
    found = json.loads(json.dumps(provenance.cell({"name": "vllm", "version": "0.32.0"}, 0.0, None)))
    assert found["started"] == "1970-01-01T00:00:00+00:00" and found["engine"]["version"] == "0.32.0"
    assert {"machine", "commit", "engine", "load_average", "libraries"} <= set(found)
    assert {"batchlab", "numpy", "pyarrow"} <= set(found["libraries"])
