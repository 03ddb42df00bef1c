"""A results store, the stand-ins' executables and batchlab's command line on them, for tests of whole runs."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from batchlab import paths, plan, scenario
from batchlab.store import Store
from batchlab.study import Study
from standins import install

VERSION = {engine: version + install.LOCAL for engine, version in install.VERSIONS.items()}


@dataclass(frozen=True, slots=True)
class Lab:
    """A repository under `home`, with the real library and notebooks, and the executables."""

    home: Path
    env: dict[str, str]

    def write(self, name: str, text: str) -> Path:
        """A scenario file."""
        file = self.home / f"data/scenarios/{name}.yml"
        file.write_text(text)
        return file

    def start(self, module: str, *arguments: str | Path, **more: str) -> subprocess.Popen:
        """`python -m MODULE ...`, with more variables in its environment."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=self.env | more,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, module: str, *arguments: str | Path, timeout_s: float = 240, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """The same, to its end; what it does not finish in time is an error."""
        with self.start(module, *arguments, **more) as child:
            try:
                out, err = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                child.terminate()
                raise
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    def study(self, file: Path) -> Study:
        """The scenario with its records."""
        loaded = scenario.load(file)
        return Study(loaded, plan.expand(loaded), Store(self.home / "data/results" / loaded.hardware))

    def frame(self, file: Path) -> pd.DataFrame:
        return self.study(file).frame()

    def containers(self) -> list[str]:
        """Names of what docker and podman hold."""
        listed = []
        for tool in ("docker", "podman"):
            command = [self.home / f"{tool}-bin" / tool, "ps", "-a", "--format", "{{.Names}}"]
            listed += subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
        return listed

    def left(self) -> list[str]:
        """Engines' processes and containers that are still there."""
        found = []
        for process in install.processes(self.home):
            found.append(f"{process.pid} {' '.join(process.cmdline())}")
        return found + self.containers()


def lab(home: Path, tool: str = "docker", trtllm: str = install.VERSIONS["tensorrt-llm"]) -> Lab:
    """A Lab in an empty folder; `tool` is the container tool that batchlab is to take."""
    for name in ("docker", "podman"):
        install.container_tool(home, name)
    for part in ("lib", "notebooks", "data/models", "data/published"):
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).symlink_to(paths.ROOT / part, target_is_directory=True)
    (home / "data/scenarios").mkdir()
    env = {
        **os.environ,
        "BATCHLAB_ROOT": str(home),
        "BATCHLAB_RESULTS": str(home / "data/results"),
        "BATCHLAB_BUILD": str(home / "build"),
        "BATCHLAB_TENSORRT_LLM_PYTHON": str(install.tensorrt_llm(home, trtllm)),
        "BATCHLAB_TGI_LAUNCHER": str(install.tgi(home)),
        "BATCHLAB_SGLANG_PYTHON": str(install.sglang(home)),
        "BATCHLAB_CONTAINER_TOOL": str(home / f"{tool}-bin" / tool),
        "PYTHONPATH": str(install.LIBRARY),
        "OMP_NUM_THREADS": "1",
    }
    return Lab(home, env)
