"""What a test says, and how its numbers are written."""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from batchlab.plots.labels import metric_words, number


class Missing(Exception):
    """A test that cannot be made; the message says why.

    `planned`: a scenario plans the cells, but they are not recorded yet, or do not decide.
    """

    def __init__(self, message: str, *, planned: bool = False) -> None:
        super().__init__(message)
        self.planned = planned


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a claim holds where it was tested, the numbers in a sentence or two, and the cells behind them.

    `factor`: how far the number found is from the one claimed, 1 for no distance, 2 for twice or half. `differs`:
    what of
    the set-up explains why the claim does not hold, where the test itself knows.
    """

    holds: bool
    detail: str
    cells: tuple[str, ...] = ()
    factor: float = 1.0
    differs: tuple[str, ...] = ()


def apart(found: float, claimed: float) -> float:
    """The factor between two positive numbers, at least 1."""
    return max(found / claimed, claimed / found) if found > 0 and claimed > 0 else 1.0


def value(row: pd.Series | dict[str, Any], metric: str) -> str:
    """ "4,945 ± 90 tok/s": a point's value with the half-width of its 95% interval, where it has one."""
    _, unit = metric_words(metric)
    half = (row.get(f"{metric}_hi", math.nan) - row.get(f"{metric}_lo", math.nan)) / 2
    told = number(row[metric])
    if math.isfinite(half) and half > 0:
        digits = 0 if row[metric] >= 100 else 1 if row[metric] >= 10 else 2
        told += f" ± {max(half, 10**-digits):,.{digits}f}"
    return f"{told} {unit}".strip()


def listed(parts: list[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(text: str) -> str:
    """With a capital and a full stop. Names that begin small (vLLM, h200) stay as they are."""
    text = text.strip()
    if not text:
        return ""
    first = text.split()[0].rstrip(":,;")
    start = text[0].upper() if first.isalpha() and first.islower() else text[0]
    return start + text[1:] + ("" if text.endswith((".", ":")) else ".")
