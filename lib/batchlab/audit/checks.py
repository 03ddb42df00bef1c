"""The checks: each looks at a row (and its table) and finds nothing, or says what cannot be and by how much."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from batchlab.audit import bounds, printed
from batchlab.audit.roofs import Roofs
from batchlab.errors import UsageError
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import load_quantization
from batchlab.sim.models import load_model

TOLERANCE = 0.05  # of arithmetic between printed values: rounding, and means of unequal runs


@dataclass(frozen=True, slots=True)
class Setting:
    """What the rows are held against, where their own columns do not say it."""

    hardware: str | None = None
    model: str | None = None
    quantization: str = "none"
    tolerance: float = TOLERANCE


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one row. `factor` is how far past its bound the printed value is (1.5: by half)."""

    check: str
    severity: str  # impossible | contradiction | implausible
    line: int
    row: str
    column: str
    printed: float
    bound: float
    factor: float
    message: str


# a check's name, its severity, what it looks at
CHECKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "batch_over_tpot": ("impossible", bounds.batch_over_tpot),
    "offered_load": ("impossible", bounds.offered_load),
    "backlog": ("impossible", bounds.backlog),
    "queue": ("impossible", bounds.queue),
    "compute_roof": ("impossible", bounds.compute_roof),
    "memory_roof": ("impossible", bounds.memory_roof),
    "decode_step": ("impossible", bounds.decode_step),
    "prefill_time": ("impossible", bounds.prefill_time),
    "card_memory": ("impossible", bounds.card_memory),
    "idle_slots": ("implausible", bounds.idle_slots),
    "two_throughputs": ("contradiction", printed.two_throughputs),
    "ratio": ("contradiction", printed.ratio),
    "stated_limit": ("contradiction", printed.stated_limit),
}


def check(table: pd.DataFrame, setting: Setting = Setting(), only: tuple[str, ...] = ()) -> list[Finding]:
    """All findings in a table (`table.load`), in the order of its rows; of the checks in `only`, or of all.

    A check that a row lacks values for is silent, and so are those of card and model where neither the row nor
    `setting` names them. UsageError for a card, model or check that is not known.
    """
    if unknown := [name for name in only if name not in CHECKS]:
        raise UsageError(f"no check `{unknown[0]}`; there are: {', '.join(CHECKS)}")
    return [finding for row in table.to_dict("records") for finding in _row(row, table, setting, only or tuple(CHECKS))]


def _row(row: dict[str, Any], table: pd.DataFrame, setting: Setting, names: tuple[str, ...]) -> Iterator[Finding]:
    values = bounds.Row(row, roofs_of(row, setting), setting.tolerance)
    for name in names:
        severity, function = CHECKS[name]
        found = function(values, table) if function.__module__ == printed.__name__ else function(values)
        if found is not None:
            yield Finding(name, severity, int(row["line"]), label(row), **found)


def roofs_of(row: dict[str, Any], setting: Setting) -> Roofs | None:
    """The bounds of the row's card and model; None where one of them is not known."""
    hardware, model = setting.hardware or text(row, "hardware"), setting.model or text(row, "model")
    if not hardware or not model:
        return None
    card = load_card(hardware)
    return Roofs(card, load_model(model), load_quantization(setting.quantization, card))


def text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def label(row: dict[str, Any]) -> str:
    """ "vllm, (2048, 128), max_batch_size 16": what tells the row from its neighbours."""
    parts = [" ".join(filter(None, [text(row, "engine"), text(row, "setting")]))]
    named = ("input_len", "output_len", "max_batch_size", "max_num_tokens", "request_rate_req_s")
    value = {k: row.get(k, math.nan) for k in named}
    if not math.isnan(value["input_len"]) and not math.isnan(value["output_len"]):
        parts.append(f"({value['input_len']:g}, {value['output_len']:g})")
    else:
        parts.append(text(row, "dataset"))
    parts += [f"{k} {value[k]:g}" for k in ("max_batch_size", "max_num_tokens") if not math.isnan(value[k])]
    rate = value["request_rate_req_s"]
    parts += [] if math.isnan(rate) else ["all at once" if math.isinf(rate) else f"{rate:g} req/s"]
    return ", ".join(filter(None, parts)) or f"line {row['line']}"


def worst(findings: list[Finding]) -> Finding | None:
    """The finding furthest past its bound."""
    return max(findings, key=lambda f: f.factor, default=None)
