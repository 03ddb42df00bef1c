"""Puts executables of the engines' names into a folder, and the Pythons that hold their packages.

bin/   trtllm-serve, text-generation-launcher, docker, podman: what they start says `stand-in` in its version
env/   for each engine with a Python of its own a bin/ with `python`, and site-packages that say its version
"""

import os
import shlex
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIBRARY = TESTS.parent / "lib"
LOCAL = "+standin"
VERSIONS = {"tensorrt-llm": "1.0.0", "tgi": "3.3.5", "sglang": "0.5.13"}


def executable(path: Path, *command: str, site: Path | None = None, **environment: str) -> Path:
    """A script at `path` that runs a command of this Python with its own arguments behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    python_path = os.pathsep.join(map(str, filter(None, (site, TESTS, LIBRARY))))
    words = {"PYTHONPATH": python_path, **environment}
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in words.items())
    path.write_text(f'#!/bin/sh\n{exports}exec {shlex.join([sys.executable, *command])} "$@"\n')
    path.chmod(0o755)
    return path


def _distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def tensorrt_llm(folder: Path, version: str = VERSIONS["tensorrt-llm"]) -> Path:
    """An environment with tensorrt_llm: bin/python and bin/trtllm-serve. Returns its Python."""
    root, release = folder / f"tensorrt-llm-{version}", version + LOCAL
    site = root / "site-packages"
    _distribution(site, "tensorrt_llm", release)
    (site / "tensorrt_llm").mkdir()
    (site / "tensorrt_llm/__init__.py").write_text(f"__version__ = {release!r}\n")
    executable(root / "bin/trtllm-serve", "-m", "standins.trtllm", release, site=site)
    return executable(root / "bin/python", site=site)


def tgi(folder: Path, version: str = VERSIONS["tgi"]) -> Path:
    """TGI outside of a container. Returns its launcher."""
    return executable(folder / f"tgi-{version}/bin/text-generation-launcher", "-m", "standins.tgi", version + LOCAL)
