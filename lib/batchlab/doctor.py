"""What this machine can run, what is missing and how to get it."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchlab import paths, provenance, setup_engine
from batchlab.engines import tensorrt_llm
from batchlab.engines.sglang import HOW as sglang_how
from batchlab.engines.sglang import VARIABLE as sglang_variable
from batchlab.engines.tgi import HOW as tgi_how

GIB = 2**30
DISK_GIB = 4.0          # the lab takes 0.7 GiB, the CPU engine 2.1, build/ and records the rest
MEMORY_GIB = 6.0        # the CPU engine with 1 GiB of KV cache, and the lab
CUDA_13_DRIVER = 580    # CUDA 13, of which PyPI's vLLM 0.26 and SGLang 0.5.13 are, runs on this driver and newer ones
# repositories of the engines' images
IMAGES = {"TensorRT-LLM": "nvcr.io/nvidia/tensorrt-llm/release", "SGLang": "lmsysorg/sglang",
          "TGI": "ghcr.io/huggingface/text-generation-inference"}
STAND_IN = "its adapter was proved against a stand-in only"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: whether it is there, what was seen, and what to do where it is not."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


def report() -> list[Check]:
    """Everything, in the order of printing. Looks only; starts no engine and needs no network."""
    return [python(), lab(), git(), disk(), memory(), port(), cpu(), gpu(), *gpu_state(), vllm_cpu(), vllm_cuda(),
            trtllm(), tgi(), sglang(), containers(), chromium()]


def main() -> int:
    """Print the report to standard output. 0, or 1 when not even recorded cells can be rendered here."""
    checks = report()
    print(text(checks))
    needed = {"Python", "lab", "disk"}
    return int(any(not check.ok for check in checks if check.name in needed))


def text(checks: Iterable[Check]) -> str:
    """One line a check, and a line with the mend under what is missing."""
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.ok else '--':4}{check.name:20}{check.detail}")
        if not check.ok and check.mend:
            lines.append(f"{'':24}→ {check.mend}")
    return "\n".join(lines)


# The lab ---------------------------------------------------------------------------------------------------
def python() -> Check:
    return Check("Python", sys.version_info >= (3, 11), f"{platform.python_version()} ({sys.prefix})",
                 "install Python 3.11 or newer, then: rm -r .venv; make PYTHON=python3.12 lab")


def lab() -> Check:
    """Whether this Python holds what requirements/lab.txt pins."""
    wrong = []
    for name, version in pins(setup_engine.REQUIREMENTS / "lab.txt").items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue        # another system's or another Python's; what is imported and absent shows by itself
        if found not in version:
            wrong.append(f"{name} {found} instead of {' or '.join(sorted(version))}")
    detail = f"{len(wrong)} packages differ from the lock: {'; '.join(wrong[:3])}" if wrong else "as locked"
    return Check("lab", not wrong, detail, "rm -f .venv/.batchlab-lab; make plan")


def pins(lock: Path) -> dict[str, set[str]]:
    """The versions that a lock pins, by name; several where they depend on Python or the system."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", lock.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def git() -> Check:
    commit = provenance.git_commit(paths.ROOT)
    return Check("git", commit != "unknown", f"commit {commit}", "clone the repository instead of copying it: records "
                 "name the commit that measured them")


def disk() -> Check:
    free = shutil.disk_usage(paths.ROOT).free / GIB
    return Check("disk", free >= DISK_GIB, f"{free:.0f} GiB free", f"free {DISK_GIB:.0f} GiB, or set "
                 "BATCHLAB_BUILD and BATCHLAB_RESULTS to folders on a larger disk")


def memory() -> Check:
    free = psutil.virtual_memory().available / GIB
    return Check("memory", free >= MEMORY_GIB, f"{free:.0f} GiB available", "the CPU engine wants "
                 f"{MEMORY_GIB:.0f} GiB; stop other programs, or lower kv_cache_gib in the scenario")


def port() -> Check:
    """Whether a server can listen on loopback."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return Check("port", True, f"127.0.0.1 gives free ports, such as {listener.getsockname()[1]}")
    except OSError as error:
        return Check("port", False, f"none on 127.0.0.1 ({error.strerror})", "bring the loopback interface up: "
                     "ip link set lo up")


def chromium() -> Check:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Check("Chromium", bool(found), found or "none (only `make test` opens reports in it)",
                 "apt-get install chromium")


# The machine -----------------------------------------------------------------------------------------------
def cpu() -> Check:
    """vLLM's CPU build picks AVX512 or AVX2 kernels on x86, and NEON ones on arm64."""
    machine = provenance.machine()
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    flags = [flag for flag in known if flag in cpu_flags()]
    ok = bool({"avx2", "asimd"} & set(flags))
    return Check("CPU", ok, f"{machine['cpu']}, {machine['cores']} cores, {' '.join(flags) or 'no vector units seen'}",
                 "vLLM's CPU build needs AVX2 (x86_64) or NEON (arm64)")


def cpu_flags() -> set[str]:
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(found.group(1).split()) if found else set()


def gpu() -> Check:
    machine = provenance.machine()
    if not machine["gpus"]:
        seen = "nvidia-smi is there, but shows no GPU" if shutil.which("nvidia-smi") else "no NVIDIA driver"
        return Check("GPU", False, seen, "none is needed for the cpu scenario and for recorded cells")
    names = ", ".join(f"{g['name']} ({g['memory_gib']:.0f} GiB)" for g in machine["gpus"])
    return Check("GPU", True, f"{names}, driver {machine['driver']}, in scenarios: {provenance.hardware()}")


def gpu_state() -> list[Check]:
    """The driver's age and what memory the first GPU has free; nothing on a machine without one."""
    machine = provenance.machine()
    if not machine["gpus"]:
        return []
    driver = str(machine["driver"] or "")
    major = driver.partition(".")[0]
    checks = [Check("GPU driver", major.isdigit() and int(major) >= CUDA_13_DRIVER, driver or "unknown",
                    f"engines built for CUDA 13 want driver {CUDA_13_DRIVER} or newer: update it "
                    "(https://www.nvidia.com/drivers), or install builds for CUDA 12")]
    if (memory := provenance.gpu_memory()) is not None:
        free, total = memory
        checks.append(Check("GPU memory", free >= 0.9 * total, f"{free:.0f} of {total:.0f} GiB free; an 8B model in "
                            "bfloat16 takes 15, the KV cache the rest",
                            "another program holds the rest; nvidia-smi shows which, stop it before measuring"))
    return checks


# Engines ---------------------------------------------------------------------------------------------------
def versions(python_path: str, names: Iterable[str]) -> dict[str, str] | None:
    """Versions of the packages that another Python holds; None when it does not run. Imports none of them."""
    code = ("import importlib.metadata as m, json, sys\n"
            "found = {}\n"
            "for n in sys.argv[1:]:\n"
            "  try: found[n] = m.version(n)\n"
            "  except m.PackageNotFoundError: pass\n"
            "print(json.dumps(found))")
    command = [python_path, "-I", "-c", code, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def vllm_cpu() -> Check:
    interpreter = paths.ENGINES / "vllm-cpu" / "bin" / "python"
    found = versions(str(interpreter), ("vllm-cpu", "torch")) or {}
    if "vllm-cpu" in found and "torch" in found:
        wanted = pins(setup_engine.REQUIREMENTS / "vllm-cpu.txt")["vllm-cpu"]
        return Check("vLLM (CPU)", found["vllm-cpu"] in wanted, f"{found['vllm-cpu']}, torch {found['torch']}",
                     "make engine")
    reason = setup_engine.unsupported()
    return Check("vLLM (CPU)", False, reason or "not installed", "" if reason else "make engine")


def vllm_cuda() -> Check:
    how = "conda env create -f environment.yml, or pip install vllm==0.26.0 in any Python; then export " \
          "BATCHLAB_VLLM_PYTHON=/path/to/its/python"
    return _in_python("vLLM (GPU)", "BATCHLAB_VLLM_PYTHON", "vllm", how)


def _in_python(name: str, variable: str, package: str, how: str) -> Check:
    """An engine in the Python that an environment variable names."""
    given = os.environ.get(variable)
    if not given:
        return Check(name, False, f"{variable} is not set", how)
    found = versions(given, (package, "torch"))
    if found is None:
        return Check(name, False, f"{variable}={given} does not run", f"correct {variable}")
    if package not in found:
        return Check(name, False, f"{variable}={given} holds no {package}", how)
    return Check(name, True, f"{found[package]}, torch {found.get('torch', 'none')} ({given})")


def trtllm() -> Check:
    """In a Python of its own, on the PATH, or as an image; the first of these that is there."""
    if os.environ.get(tensorrt_llm.VARIABLE):
        return _in_python("TensorRT-LLM", tensorrt_llm.VARIABLE, "tensorrt_llm", tensorrt_llm.HOW)
    return _command_or_image("TensorRT-LLM", "trtllm-serve", tensorrt_llm.HOW)


def tgi() -> Check:
    return _command_or_image("TGI", os.environ.get("BATCHLAB_TGI_LAUNCHER") or "text-generation-launcher", tgi_how)


def sglang() -> Check:
    found = images(IMAGES["SGLang"])
    if found and not os.environ.get(sglang_variable):
        return Check("SGLang", True, f"image {found[0]} (runtime: container)")
    return _in_python("SGLang", sglang_variable, "sglang", sglang_how)


def _command_or_image(name: str, command: str, how: str) -> Check:
    found = shutil.which(command)
    if found:
        return Check(name, True, f"{found}; {STAND_IN}")
    found = images(IMAGES[name])
    if found:
        return Check(name, True, f"image {found[0]} (runtime: container); {STAND_IN}")
    return Check(name, False, f"no {command} on the PATH and no image {IMAGES[name]}; {STAND_IN}", how)


def images(repository: str) -> list[str]:
    """The images of a repository that docker or podman holds, with their tags."""
    for name in ("docker", "podman"):
        if shutil.which(name):
            command = [name, "images", "--format", "{{.Repository}}:{{.Tag}}", repository]
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(command, capture_output=True, text=True, timeout=20)
                found = [line for line in done.stdout.split() if line.startswith(f"{repository}:")]
                if not done.returncode and found:
                    return found
    return []


def containers() -> Check:
    """docker or podman that answers; whether it can hand a GPU to a container."""
    silent = []
    for name in ("docker", "podman"):
        if not shutil.which(name):
            continue
        try:
            done = subprocess.run([name, "info", "--format", "{{json .}}"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            silent.append(name)
            continue
        if done.returncode:
            silent.append(name)
            continue
        gpus = "nvidia" in done.stdout.lower() or bool(shutil.which("nvidia-ctk"))
        return Check("containers", True, f"{name} answers, " + ("GPUs can be passed on" if gpus else "without GPUs: "
                     "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"))
    if silent:
        return Check("containers", False, f"{' and '.join(silent)} installed, but not answering",
                     "start it (systemctl start docker), or join its group: usermod -aG docker $USER")
    return Check("containers", False, "neither docker nor podman", "needed only for engines in containers: "
                 "https://docs.docker.com/engine/install/")
