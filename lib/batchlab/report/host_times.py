"""What 08-validation tells of machines: how fast each engine start's host was, and the errors once that is known."""

import numpy as np
import pandas as pd

from batchlab import host_times
from batchlab.host_times import OTHERS, OWN, RECORDED
from batchlab.plots.labels import metric_words, number
from batchlab.plots.saving import Shown
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, with_range
from batchlab.report.validation import LEFT_OUT, errors_figure, named, percent
from batchlab.study import Study
from batchlab.validation import AGAIN, BLIND, FITTED, GOALS, WORST

NOT_SHOWN = "not shown"
WITH = {"error": "constants alone", "own_error": "the machine known"}
LAUNCHED = {
    "graph_us": "decodes alone, one graph (ms)",
    "pieces_us": "with prompts, graphs in pieces (ms)",
    "eager_us": "with prompts, kernel by kernel (ms)",
}


def known_errors(study: Study, found: pd.DataFrame) -> Shown | Reading:
    """The figure of every cell's error with its machine known. `found` is what `host_times.known` returns."""
    if found.empty:
        return Reading((LEFT_OUT,))
    note = "each beside its simulation with its own launches and the card that other cells show"
    told = twice_reading(found, found)
    return errors_figure(study, found.assign(error=found["own_error"]), "validation-known", note, told)


def twice_table(found: pd.DataFrame) -> Table:
    """Rows a figure, for the blind cells and for all tested ones: errors with the constants of the fit cells, and with
    the machine known. `found` is what `host_times.known` returns.
    """
    rows = []
    tested = found[found["set"] != AGAIN]
    for words, cells in ((BLIND, tested[tested["set"] == BLIND]), ("all tested", tested)):
        for figure, group in cells.groupby("figure", sort=False):
            for column, how in WITH.items():
                size = group[column].abs()
                row = {"cells": f"{words}, {len(group)}", "figure": metric_words(figure)[0], "simulated with": how}
                row |= {"mean error": percent(size.mean()), "largest": percent(size.max())}
                rows.append(row | {f"above {WORST:.0%}": int((size > WORST).sum())})
    return table(pd.DataFrame(rows), empty=LEFT_OUT)


def twice_reading(found: pd.DataFrame, compared: pd.DataFrame) -> Reading:
    """Whether the goals are met with the machine known, how it is known, and what is left out. `compared` is what
    `validation.compare` returns.
    """
    if found.empty:
        return Reading((LEFT_OUT,))
    tested, told = found[found["set"] != AGAIN], []
    for words, rows in (("Blind", tested[tested["set"] == BLIND]), ("All tested", tested)):
        if len(rows):
            told.append(f"{words}, {rows['cell'].nunique()} cells with their machine known: {_goals(rows)}.")
    how = found.drop_duplicates("cell")["launches"].value_counts()
    told.append(
        "Launches are "
        + ", ".join(f"{name} in {how[name]}" for name in (RECORDED, OWN, OTHERS) if name in how)
        + f" of {how.sum()} cells."
    )
    mine = compared["cell"].isin(set(found["cell"])) | (compared["set"] == FITTED)
    alike = compared[(compared["transport"] == "inprocess") & (compared["engine"].isin(found["engine"].unique()))]
    if without := sorted(set(alike.loc[~mine, "cell"])):
        told.append(
            f"Left out, since nothing shows how long their hosts took to launch: {', '.join(without)}; they stand "
            "among the cells above."
        )
    again = found[found["set"] == AGAIN]
    if len(again):
        told.append(f"{again['cell'].nunique()} measured once more, which count in no mean: {_goals(again)}.")
    return Reading(tuple(told))


def _goals(rows: pd.DataFrame) -> str:
    """The mean error of each figure with the machine known, and how many are above the goal for any cell."""
    means = []
    for figure, group in rows.groupby("figure", sort=False):
        size = group["own_error"].abs()
        met = "within" if size.mean() <= GOALS[figure] else "above"
        means.append(f"{metric_words(figure)[0]} {percent(size.mean())} on average ({met} {GOALS[figure]:.0%})")
    size = rows["own_error"].abs()
    above, worst = int((size > WORST).sum()), rows.loc[size.idxmax()]
    words = f"{metric_words(worst['figure'])[0]}, {named(worst)}"
    return (
        f"{', '.join(means)}; {above or 'none'} of {len(rows)} figures above {WORST:.0%}, at most "
        f"{percent(size.max())} ({words})"
    )


def above_table(found: pd.DataFrame) -> Table:
    """The figures off by more than the goal with the machine known, with the interval of each measured one and what
    differs.
    """
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
    """A row an engine start: how long its host took from the plan of an iteration to its last launch."""
    rows = []
    for row in host_times.by_start(cells).to_dict("records"):
        told = {"engine start": row["started"].replace("T", " ")[:16], "cores": row["cores"], "cells": row["cells"]}
        told |= {words: _range(row, name) for name, words in LAUNCHED.items()}
        rows.append(told)
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
