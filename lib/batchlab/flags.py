"""What the commands share: kinds of flag values, and a summary on standard output."""

import argparse
import json
import math
from typing import Any


def count(text: str) -> int:
    """A flag's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """A flag's finite number above 0."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def rate(text: str) -> float:
    """A flag's request rate, math.inf for all at once."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is neither a number above 0 nor inf")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a line a figure that there is."""
    if as_json:
        print(json.dumps(summary, indent=1, allow_nan=False))
        return
    width = max(map(len, summary))
    print("\n".join(f"{key:<{width}}  {value}" for key, value in summary.items() if value is not None))


def share(text: str) -> float:
    """A flag's number from 0 to below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to below 1")
    return value
