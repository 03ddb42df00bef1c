"""What 08-validation tells of hosts: how fast each engine start's was, and what is left of an error beside it."""

import numpy as np
import pandas as pd

from batchlab import host_times
from batchlab.plots.labels import metric_words, number
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.report.validation import named, percent

NOT_SHOWN = "not shown"
LAUNCHED = {
    "graph_us": "decodes alone, one graph (ms)",
    "pieces_us": "with prompts, graphs in pieces (ms)",
    "eager_us": "with prompts, kernel by kernel (ms)",
}


def above_table(wide: pd.DataFrame, above: float) -> Table:
    """The figures off by more than `above`, and what they are off by with the cell's own host times. `wide` is what
    `host_times.with_own_host` returns.
    """
    rows = [
        {
            "cell": named(row),
            "set": row["set"],
            "figure": metric_words(row["figure"])[0],
            "measured": row["measured"],
            "simulated": row["simulated"],
            "error": percent(row["error"], signed=True),
            "with its own host's times": _own(row["own_error"]),
        }
        for row in wide.to_dict("records")
    ]
    none = f"No figure that was compared, of an engine whose host times were fitted, is off by more than {above:.0%}."
    return table(pd.DataFrame(rows), empty=none)


def above_reading(wide: pd.DataFrame, above: float) -> Reading:
    """How many figures are off by more than `above`, and how many still are with their own host's times."""
    if wide.empty:
        return Reading((f"No error above {above:.0%} is left to explain.",))
    shown = wide[wide["own_error"].notna()]
    told = f"{len(wide)} figures of {wide['cell'].nunique()} cells are off by more than {above:.0%}."
    if len(shown):
        left = int((shown["own_error"].abs() > above).sum())
        told += (
            f" In {len(shown)} of them the cell's iterations show how fast its own host launched kernels: with those "
            f"times instead of the fitted ones, {left} of these {len(shown)} are. That is a finding about hosts, not a "
            "test: the times are read from the very cells that are compared."
        )
    return Reading((told,))


def starts_table(cells: pd.DataFrame) -> Table:
    """A row an engine start: how long its host took from the plan of an iteration to its last launch."""
    rows = []
    for row in host_times.by_start(cells).to_dict("records"):
        told = {"engine start": row["started"].replace("T", " ")[:16], "cores": row["cores"], "cells": row["cells"]}
        rows.append(told | {words: _range(row, name) for name, words in LAUNCHED.items()})
    return table(pd.DataFrame(rows), empty="No measured iteration shows how long its host took to launch it.")


def starts_reading(cells: pd.DataFrame) -> Reading:
    """How far launches, and equal iterations of decodes, lie apart between engine starts."""
    told = []
    for name, words in (("eager_us", "kernel by kernel"), ("pieces_us", "as graphs in pieces")):
        values = cells[name].dropna()
        if len(values) > 1:
            low, high = (number(us / 1e3) for us in (values.min(), values.max()))
            told.append(
                f"An iteration with prompts that is launched {words} takes the host {low} to {high} ms, by the cell "
                f"(medians of {len(values)} cells)."
            )
    same = host_times.same_iteration(cells)
    if len(same):
        apart, within = same["highest_us"] / same["lowest_us"] - 1, same["within"]
        told.append(
            f"One and the same iteration of decodes, measured in more than one engine start at {len(same)} points, "
            f"takes up to {percent(apart.max())} longer in one start than in another (median {percent(apart.median())})"
            f", and up to {percent(within.max())} longer in one cell than in another of the same start (median "
            f"{percent(within.median())}): cards and hosts of one kind differ by that."
        )
    return Reading(tuple(told) or ("No iteration was measured in more than one engine start.",))


def _own(error: float) -> str:
    return NOT_SHOWN if np.isnan(error) else percent(error, signed=True)


def _range(row: dict[str, float], name: str) -> str:
    if np.isnan(row[name]):
        return NOT_SHOWN
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    middle = number(row[name] / 1e3)
    return middle if low == high else f"{middle} ({number(low / 1e3)} to {number(high / 1e3)})"
