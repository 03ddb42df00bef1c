"""Puts executables of the engines' names into a folder, and the Pythons that hold their packages.

bin/   trtllm-serve, text-generation-launcher, docker, podman: what they start says `stand-in` in its version
env/   for each engine with a Python of its own a bin/ with `python`, and site-packages that say its version
"""

import contextlib
import os
import shlex
import sys
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]
LIBRARY = TESTS.parent / "lib"
LOCAL = "+standin"
VERSIONS = {"tensorrt-llm": "1.3.0", "tgi": "3.3.5", "sglang": "0.5.13"}


def executable(home: Path, place: str, *command: str, site: Path | None = None, **environment: str) -> Path:
    """A script at home/place that runs a command of this Python with its own arguments behind.

    Whatever it starts has STANDIN_HOME in its environment, by which a test finds its own processes.
    """
    path = home / place
    path.parent.mkdir(parents=True, exist_ok=True)
    python_path = os.pathsep.join(map(str, filter(None, (site, TESTS, LIBRARY))))
    words = {"PYTHONPATH": python_path, "STANDIN_HOME": str(home), **environment}
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in words.items())
    path.write_text(f'#!/bin/sh\n{exports}exec {shlex.join([sys.executable, *command])} "$@"\n')
    path.chmod(0o755)
    return path


def processes(home: Path) -> list[psutil.Process]:
    """What still runs of the executables under `home`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STANDIN_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _distribution(site: Path, name: str, version: str, module: str, content: str) -> None:
    """Site-packages with a distribution's metadata and one module of it."""
    metadata = site / f"{name}-{version}.dist-info/METADATA"
    for file, text in (
        (metadata, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
        (site / name / "__init__.py", f"__version__ = {version!r}\n"),
        (site / name / module, content),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def tensorrt_llm(home: Path, version: str = VERSIONS["tensorrt-llm"]) -> Path:
    """An environment with tensorrt_llm: bin/python and, beside it, bin/trtllm-serve. Returns its Python."""
    root, release = f"tensorrt-llm-{version}", version + LOCAL
    site = home / root / "site-packages"
    _distribution(site, "tensorrt_llm", release, "version.py", f"__version__ = {release!r}\n")
    executable(home, f"{root}/bin/trtllm-serve", "-m", "standins.trtllm", release, site=site)
    return executable(home, f"{root}/bin/python", site=site)


def tgi(home: Path, version: str = VERSIONS["tgi"]) -> Path:
    """TGI outside of a container. Returns its launcher."""
    return executable(home, f"tgi-{version}/bin/text-generation-launcher", "-m", "standins.tgi", version + LOCAL)


def sglang(home: Path, version: str = VERSIONS["sglang"]) -> Path:
    """An environment with sglang and its launch_server. Returns its Python."""
    root, release = f"sglang-{version}", version + LOCAL
    site = home / root / "site-packages"
    start = f"import sys\n\nfrom standins import sglang\n\nsys.argv.insert(1, {release!r})\nsglang.main()\n"
    _distribution(site, "sglang", release, "launch_server.py", start)
    return executable(home, f"{root}/bin/python", site=site)


def image(engine: str, version: str | None = None) -> str:
    """The name of an engine's image that the container tools have."""
    repository = {
        "tensorrt-llm": "nvcr.io/nvidia/tensorrt-llm/release:",
        "tgi": "ghcr.io/huggingface/text-generation-inference:",
        "sglang": "lmsysorg/sglang:v",
    }[engine]
    return f"{repository}{version or VERSIONS[engine]}-standin"


def container_tool(home: Path, tool: str) -> Path:
    """docker or podman, which knows the engines' images. Returns the executable."""
    state = home / f"{tool}-containers"
    state.mkdir(parents=True)
    (state / "images").write_text("\n".join(map(image, VERSIONS)))
    return executable(home, f"{tool}-bin/{tool}", "-m", "standins.containers", tool, STANDIN_CONTAINERS=str(state))
