"""Constants that were fitted on measured cells, with the cells they came from. Written by
benchmarks/simulator/h200_fit.py.
"""

import json
from pathlib import Path
from typing import Any

from batchlab.sim.host import HostOverheads
from batchlab.sim.power import PowerLimit

FILE = Path(__file__).with_name("fitted.json")


def fitted(hardware: str) -> dict[str, Any] | None:
    """The entry of a card: engine, quantization, host, power, fit_cells, test_cells, test_errors; None when there
    is none.
    """
    return json.loads(FILE.read_text()).get(hardware) if FILE.is_file() else None


def fitted_constants(engine: str, hardware: str, quantization: str | None = "none") -> dict[str, Any]:
    """`host` and `power` for `simulate`, as far as they were fitted; empty for a card that was not measured.

    The power limit is the card's and serves every engine in the arithmetic it was fitted in. The host's time is the
    engine's own, and is given for that engine only.
    """
    entry = fitted(hardware)
    if entry is None or entry["quantization"] != (quantization or "none"):
        return {}
    constants: dict[str, Any] = {"power": PowerLimit(**entry["power"])}
    if engine == entry["engine"]:
        constants["host"] = HostOverheads(**entry["host"])
    return constants
