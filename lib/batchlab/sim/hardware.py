"""Cards: what aiconfigurator-core describes, and a few of our own."""

from dataclasses import dataclass
from functools import cache
from importlib import resources, util
from pathlib import Path

import yaml

from batchlab.errors import UsageError

NOT_INSTALLED = "the package aiconfigurator-core is not installed: pip install -r requirements/lab.txt"


@dataclass(frozen=True, slots=True)
class Card:
    """A card's data sheet. `measured`: aiconfigurator-core holds operator times measured on it."""

    name: str
    memory_bytes: float
    bandwidth: float  # bytes/s
    flops_16: float  # dense 16-bit tensor operations/s
    flops_8: float | None  # dense fp8 operations/s
    pcie: float  # bytes/s, one direction
    link: float  # bytes/s to the neighbours in the node, one direction
    measured: bool
    source: str
    multiprocessors: int | None = None


# Not in aiconfigurator-core. NVIDIA A10G data sheet: 24 GB, 600 GB/s, 70 TFLOP/s dense bf16.
OWN_CARDS = {
    "a10g": Card("a10g", 24 * 2**30, 600e9, 70e12, None, 32e9, 32e9, False, "NVIDIA A10G data sheet", 80),
}
# Streaming multiprocessors, which aiconfigurator-core does not tell: NVIDIA's architecture whitepapers.
MULTIPROCESSORS = {
    "a100_pcie": 108,
    "a100_sxm": 108,
    "a30": 56,
    "b200_sxm": 148,
    "gb200": 148,
    "h100_pcie": 114,
    "h100_sxm": 132,
    "h200_sxm": 132,
    "l4": 58,
    "l40s": 142,
}


def systems_folder() -> Path | None:
    """Where aiconfigurator-core keeps its systems; None when the package is not installed."""
    if util.find_spec("aiconfigurator_core") is None:
        return None
    return Path(str(resources.files("aiconfigurator_core"))) / "systems"


@cache
def known_cards() -> dict[str, Card]:
    """Every card by its name: aiconfigurator-core's NVIDIA systems, and ours."""
    cards = dict(OWN_CARDS)
    folder = systems_folder()
    for file in sorted(folder.glob("*.yaml")) if folder else []:
        spec = yaml.safe_load(file.read_text())
        gpu = spec.get("gpu") if isinstance(spec, dict) else None
        if not gpu or "bfloat16_tc_flops" not in gpu:
            continue
        measured = (folder / spec["data_dir"] / "gemm").is_dir()
        cards[file.stem] = Card(
            file.stem,
            gpu["mem_capacity"],
            gpu["mem_bw"],
            gpu["bfloat16_tc_flops"],
            gpu.get("fp8_tc_flops"),
            spec["node"]["pcie_bw"],
            spec["node"]["intra_node_bw"],
            measured,
            f"aiconfigurator-core systems/{file.name}",
            MULTIPROCESSORS.get(file.stem),
        )
    return cards


def load_card(name: str) -> Card:
    """A card by name. Raises UsageError, listing what there is, for an unknown one."""
    cards = known_cards()
    if name not in cards:
        measured = sorted(c.name for c in cards.values() if c.measured)
        rest = sorted(c.name for c in cards.values() if not c.measured)
        if systems_folder() is None:
            raise UsageError(f"hardware '{name}': {NOT_INSTALLED}; without it there is {', '.join(sorted(cards))}")
        raise UsageError(
            f"unknown hardware '{name}'; with measured operator times: {', '.join(measured)}; "
            f"by roofline only: {', '.join(rest)}"
        )
    return cards[name]
