"""What 08-validation tells of hosts: how fast each engine start's was, and what is left of an error beside it."""

import numpy as np
import pandas as pd

from batchlab import host_times
from batchlab.plots.labels import metric_words, number
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, with_range
from batchlab.report.validation import LEFT_OUT, named, percent
from batchlab.validation import WORST

NOT_SHOWN = "not shown"
WITH = {"error": "constants of the fit cells", "own_error": "one calibrating cell a start"}
LAUNCHED = {
    "graph_us": "decodes alone, one graph (ms)",
    "pieces_us": "with prompts, graphs in pieces (ms)",
    "eager_us": "with prompts, kernel by kernel (ms)",
}


def twice_table(found: pd.DataFrame) -> Table:
    """Two rows a figure: errors with the constants of the fit cells, and with one calibrating cell an engine start.
    `found` is what `host_times.calibrated` returns.
    """
    rows = []
    for figure, group in found.groupby("figure", sort=False):
        for column, words in WITH.items():
            size = group[column].abs()
            row = {"figure": metric_words(figure)[0], "simulated with": words, "cells tested": len(group)}
            row |= {"mean error": percent(size.mean()), "largest": percent(size.max())}
            rows.append(row | {f"above {WORST:.0%}": int((size > WORST).sum())})
    return table(pd.DataFrame(rows), empty=LEFT_OUT)


def twice_reading(found: pd.DataFrame, compared: pd.DataFrame) -> Reading:
    """What the calibrating cells change, how far off they are themselves (they are not tested), and how much of what is
    left lies inside the measured figure's interval.
    """
    if found.empty:
        return Reading((LEFT_OUT,))
    changed = found[found["calibrated_on"].notna()]
    before, after = (found[found[column].abs() > WORST] for column in WITH)
    told = [
        f"{changed['calibrated_on'].nunique()} of {found['start'].nunique()} engine starts with tested cells have a "
        f"calibrating cell: {changed['cell'].nunique()} of {found['cell'].nunique()} tested cells are simulated with "
        f"another cell's host and card. Figures off by more than {WORST:.0%}: {len(before)} with the constants of the "
        f"fit cells, {len(after)} with those of the calibrating cells."
    ]
    own = compared[compared["cell"].isin(set(changed["calibrated_on"]))]
    if len(own):
        worst = own.loc[own["error"].abs().idxmax()]
        told.append(
            f"The calibrating cells, with the constants of the fit cells, are off by {percent(abs(worst['error']))} at "
            f"most ({metric_words(worst['figure'])[0]}, {named(worst)}); they count in neither half."
        )
    known = after[after["low"].notna()]
    if len(known):
        inside = int(known["own"].between(known["low"], known["high"]).sum())
        told.append(
            f"Of these {len(after)} figures, {len(known)} have a 95% interval within their run; the simulated value "
            f"lies inside it for {inside}."
        )
    return Reading(tuple(told))


def above_table(found: pd.DataFrame) -> Table:
    """The figures still off by more than the goal, with the interval of each measured one and why it may be off."""
    wide = found[found["own_error"].abs() > WORST].sort_values("own_error", key=abs, ascending=False, kind="stable")
    rows = [
        {
            "cell": named(row),
            "figure": metric_words(row["figure"])[0],
            "measured (95% interval)": _interval(row),
            "simulated": row["own"],
            "error": percent(row["own_error"], signed=True),
            "against the simulation": row["why"],
        }
        for row in wide.to_dict("records")
    ]
    none = f"No figure that was tested is off by more than {WORST:.0%}."
    return table(pd.DataFrame(rows), empty=none)


def starts_table(cells: pd.DataFrame) -> Table:
    """A row an engine start: how long its host took from the plan of an iteration to its last launch, and the cell that
    calibrates it.
    """
    rows, chosen = [], host_times.calibrating(cells)
    for row in host_times.by_start(cells).to_dict("records"):
        told = {"engine start": row["started"].replace("T", " ")[:16], "cores": row["cores"], "cells": row["cells"]}
        told |= {words: _range(row, name) for name, words in LAUNCHED.items()}
        rows.append(told | {"calibrating cell": chosen[row["start"]]})
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


def _interval(row: dict[str, float]) -> str:
    if np.isnan(row["low"]):
        return number(row["measured"])
    return with_range(row["measured"], row["low"], row["high"])


def _range(row: dict[str, float], name: str) -> str:
    if np.isnan(row[name]):
        return NOT_SHOWN
    middle, low, high = (row[key] / 1e3 for key in (name, f"{name}_low", f"{name}_high"))
    return number(middle) if low == high else with_range(middle, low, high)
