"""Makes the environments of the peers: .engines/guidellm and .engines/aiperf, from pinned requirements on PyPI.

    python benchmarks/client/environments.py          # no-op when up to date
    python benchmarks/client/environments.py --lock   # resolves requirements/*.in anew

`vllm bench serve` is part of vLLM and runs in the engine's environment (`make engine`).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from batchlab import paths, setup_engine

HERE = Path(__file__).resolve().parent
PEERS = ("guidellm", "aiperf")
NEEDS_TORCH = ("guidellm",)


def python_of(peer: str) -> Path:
    return paths.ENGINES / peer / "bin" / "python"


def make(peer: str) -> None:
    """The environment of a peer as its lock says; SetupError when it cannot be made."""
    lock = HERE / "requirements" / f"{peer}.txt"
    stamp = paths.ENGINES / peer / ".batchlab-peer"
    if stamp.exists() and stamp.read_text() == lock.read_text():
        return
    python = setup_engine.ensure_venv(paths.ENGINES / peer, peer, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    setup_engine.install(peer, pip, ["-r", str(lock)], count=len(setup_engine.packages(lock)))
    if peer in NEEDS_TORCH:
        setup_engine.install_torch(pip, python)
        setup_engine.check_torch(python)
    stamp.write_text(lock.read_text())


def lock() -> None:
    for peer in PEERS:
        subprocess.run(
            [
                "uv",
                "pip",
                "compile",
                "--quiet",
                "--universal",
                "--python-version",
                "3.11",
                "--custom-compile-command",
                "python benchmarks/client/environments.py --lock",
                "--excludes",
                "without.txt",
                f"{peer}.in",
                "-o",
                f"{peer}.txt",
            ],
            cwd=HERE / "requirements",
            check=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environments of the benchmarked peers.")
    parser.add_argument("--lock", action="store_true", help="resolve the pins anew (needs uv)")
    if parser.parse_args().lock:
        lock()
    for peer in PEERS:
        try:
            make(peer)
        except setup_engine.SetupError as error:
            print(f"{peer}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
