"""Notebook 07: S2's question over the cells of every scenario that asks it, beside S2's own table."""

import pandas as pd

from batchlab import plots
from batchlab.audit import load
from batchlab.paths import PUBLISHED
from batchlab.plots.budgets import REQUESTS, token_budget
from batchlab.plots.labels import number, whole
from batchlab.plots.saving import Shown, save
from batchlab.plots.select import recorded, valid
from batchlab.plots.style import engine_name
from batchlab.report.elsewhere import cards
from batchlab.report.elsewhere import cells as recorded_elsewhere
from batchlab.report.readings import Reading
from batchlab.report.setup import cells_of
from batchlab.report.tables import Table, table
from batchlab.study import Study

FIXED, MOVING = "token-budget", "token-budget-dynamic"


def cells(opened: Study) -> pd.DataFrame:
    """The scenario's own cells of both sweeps, measured where that is possible; no row where it has neither."""
    return cells_of(opened, FIXED, MOVING)


def elsewhere(opened: Study, own: pd.DataFrame) -> pd.DataFrame:
    """What other scenarios have recorded of the same sweep and datasets (see elsewhere.cells)."""
    return recorded_elsewhere(opened, own, FIXED)


def published(own: pd.DataFrame) -> pd.DataFrame:
    """S2's printed table of vLLM as points, for the datasets that `own` has too."""
    printed = load(PUBLISHED / "s2-vllm.csv").assign(evidence="published", valid=True, recorded=True)
    return printed[printed["dataset"].isin(own["dataset"])].reset_index(drop=True)


def points(own: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(fixed budgets of all evidence, moving budgets)."""
    moving = own[own["token_rule"].notna()] if "token_rule" in own else own.iloc[0:0]
    fixed = own.drop(moving.index)
    made = [plots.points(frame) for frame in (fixed, others) if len(frame)]
    together = pd.concat([*made, published(own)], ignore_index=True) if made else plots.points(fixed)
    return together, plots.points(moving)


def figure(fixed: pd.DataFrame, moving: pd.DataFrame, opened: Study) -> Shown | Reading:
    """The figure, or a line that says there is nothing to show."""
    if fixed.empty:
        return Reading((f"No sweep of {opened.scenario.name} asks this.",))
    axes = token_budget(fixed, moving, caution(fixed))
    alt = f"Requests a second against max_num_tokens, a panel a dataset. {reading(fixed, moving)}"
    return save(axes[0].figure, "token-budget", alt, opened)


def caution(fixed: pd.DataFrame) -> str:
    """That the cards behind a figure are not the same one."""
    return cards(fixed, "where KV memory was made the same, speed was not")


def reading(fixed: pd.DataFrame, moving: pd.DataFrame) -> Reading:
    """For each dataset and engine: what the fixed budgets serve, and what a moving one does against them."""
    told = []
    good = fixed[valid(fixed) & fixed[REQUESTS].notna()]
    for (dataset, engine, evidence), rows in good.groupby(["dataset", "engine", "evidence"], sort=False):
        y = rows[REQUESTS].astype(float)
        best, least = rows.loc[y.idxmax()], rows.loc[y.idxmin()]
        told.append(
            f"{dataset}, {engine_name(engine)}, {evidence}: {number(y.min())} to {number(y.max())} req/s, best at "
            f"max_num_tokens {whole(best['max_num_tokens'])} and least at {whole(least['max_num_tokens'])}"
            + _moving(rows, moving, dataset, engine, evidence)
        )
    return Reading(tuple(f"{t}." for t in told) or ("No valid cell is recorded.",))


def _moving(rows: pd.DataFrame, moving: pd.DataFrame, dataset: str, engine: str, evidence: str) -> str:
    if moving.empty:
        return ""
    mine = moving[
        (moving["dataset"] == dataset) & (moving["engine"] == engine) & (moving["evidence"] == evidence) & valid(moving)
    ]
    if mine.empty:
        return ""
    row = mine.iloc[0]
    start = rows[rows["max_num_tokens"] == row["max_num_tokens"]]
    told = f"; a budget that moves serves {number(row[REQUESTS])}"
    over = [
        (start, "the fixed one it starts from"),
        (rows[rows[REQUESTS] == rows[REQUESTS].max()], "the best fixed one"),
    ]
    parts = [f"{row[REQUESTS] / at[REQUESTS].iloc[0] - 1:+.1%} against {what}" for at, what in over if len(at)]
    return f"{told} ({', '.join(parts)})"


def numbers(fixed: pd.DataFrame, moving: pd.DataFrame) -> Table:
    """A row a point, fixed and moving."""
    both = pd.concat([fixed.assign(budget="fixed"), moving.assign(budget="moving")], ignore_index=True)
    columns = ["dataset", "engine", "engine_version", "evidence", "hardware", "budget", "max_num_tokens", REQUESTS]
    told = {c: c for c in columns[:-1]} | {
        REQUESTS: "request throughput (req/s)",
        "running_batch_mean": "running batch",
    }
    shown = both[recorded(both)] if len(both) else both
    return table(shown.reindex(columns=list(told)), told, empty="Nothing is recorded.")
