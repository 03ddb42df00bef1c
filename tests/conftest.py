"""Shared fixtures, and what nbval needs for notebooks."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import synthetic_store
from batchlab import paths

LINKED = ("lib", "notebooks", "data/models", "data/published")


def pytest_collectstart(collector: Any) -> None:
    """nbval: the study's progress goes to stderr and differs from run to run."""
    if (
        getattr(collector, "path", None)
        and collector.path.suffix == ".ipynb"
        and hasattr(collector, "skip_compare")
    ):
        collector.skip_compare += ("stderr",)


@dataclass(frozen=True, slots=True)
class QuickBuild:
    """A repository of its own: the real library and notebooks, scenario `quick`, its records, build and figures."""

    root: Path

    @property
    def build(self) -> Path:
        return self.root / "build" / "quick"

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "BATCHLAB_ROOT": str(self.root),
            "PYTHONPATH": str(self.root / "lib"),
            "BATCHLAB_RESULTS": str(self.root / "data/results"),
            "BATCHLAB_BUILD": str(self.root / "build"),
            "OMP_NUM_THREADS": "1",
        }

    def report(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m batchlab.report …` in this repository, from a directory that is not its root."""
        return subprocess.run(
            [sys.executable, "-m", "batchlab.report", *arguments],
            env=self.env,
            text=True,
            cwd=self.root.parent,
            capture_output=True,
            timeout=280,
        )


def make_repository(root: Path) -> QuickBuild:
    """Links to the real library and notebooks, and the quick scenario with a store of invented records."""
    for name in LINKED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(paths.ROOT / name, target_is_directory=True)
    (root / "data/scenarios").mkdir(parents=True)
    scenario = root / "data/scenarios/quick.yml"
    scenario.write_text(synthetic_store.SCENARIO)
    synthetic_store.fill(scenario, root / "data/results")
    return QuickBuild(root)


@pytest.fixture(scope="session")
def quick_build(tmp_path_factory: pytest.TempPathFactory) -> QuickBuild:
    """The notebooks executed and the report rendered for the quick scenario."""
    quick = make_repository(tmp_path_factory.mktemp("quick"))
    names = sorted(p.name for p in paths.NOTEBOOKS.glob("*.ipynb"))
    with ThreadPoolExecutor(2) as two:    # each is a process of its own, most of it imports
        for done in two.map(lambda name: quick.report("execute", name, "--scenario", "quick"), names):
            assert done.returncode == 0, done.stderr
    for arguments in (("render", "--scenario", "quick"), ("index",)):
        done = quick.report(*arguments)
        assert done.returncode == 0, done.stderr
    return quick
