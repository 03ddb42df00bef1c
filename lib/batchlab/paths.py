"""Where things are. Everything is resolved from the repository's root, so the caller's directory never matters."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("BATCHLAB_ROOT") or Path(__file__).resolve().parents[2])
DATA = ROOT / "data"
SCENARIOS = DATA / "scenarios"
MODELS = DATA / "models"
PUBLISHED = DATA / "published"
RESULTS = Path(os.environ.get("BATCHLAB_RESULTS") or DATA / "results")
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
BUILD = Path(os.environ.get("BATCHLAB_BUILD") or ROOT / "build")
ENGINES = ROOT / ".engines"
