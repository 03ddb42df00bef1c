"""From cells (a row a repeat) to the points that figures show (a row a point), missing ones included."""

from typing import Any

import numpy as np
import pandas as pd

from batchlab import metrics, study
from batchlab.plots.captions import texts
from batchlab.plots.select import reasons, recorded, valid

KEPT = ("machine", "commit")


def points(cells: pd.DataFrame) -> pd.DataFrame:
    """`study.aggregate` of the cells (`study.fair`), in the plan's order, and a row for each point without a recorded
    cell.

    Besides aggregate's columns: `recorded` (bool), `machine` and `commit` (distinct values, joined),
    `reasons` (a list, every reason of every invalid repeat). `n` is 0 for a point that is not recorded.
    """
    by = [c for c in study.POINT if c in cells]
    measured = [k for k in (*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS) if k != "invalid_reasons"]
    told = ["n", "num_requests", "recorded", "reasons", *KEPT]
    if cells.empty:
        return pd.DataFrame(columns=[*by, *measured, *told])
    cells = study.fair(cells)
    once = cells.drop_duplicates("cell") if "cell" in cells else cells
    averaged = study.aggregate(once, by=by)
    figures = {key(row, by): row for row in averaged.to_dict("records")}
    rows: list[dict[str, Any]] = []
    # taken out of the frame once: a small frame a point takes seconds
    done, bad = recorded(once).to_numpy(), (recorded(once) & ~valid(once)).to_numpy()
    told_of, sources = "reasons" in once, once[[c for c in KEPT if c in once]]
    group = once.groupby(by, dropna=False, sort=False).ngroup().to_numpy()
    coordinates, requests = once[by].to_dict("records"), once["num_requests"].to_numpy()
    for at in np.split(np.argsort(group, kind="stable"), np.flatnonzero(np.diff(np.sort(group))) + 1):
        point = coordinates[at[0]]
        planned = {"n": 0, "valid": False, "num_requests": requests[at[0]]}
        row = point | figures.get(key(point, by), planned)
        wrong = reasons(once.iloc[at]) if told_of or bad[at].any() else []
        row |= {"recorded": bool(done[at].any()), "reasons": wrong}
        some = sources.iloc[at[done[at]]]
        rows.append(row | {c: texts(some, c) or None for c in KEPT})
    columns = dict.fromkeys([*by, *averaged, *measured, *told])
    return pd.DataFrame(rows, columns=list(columns))


def key(row: Any, by: list[str]) -> tuple[str, ...]:
    """A point's coordinates in a form in which null equals null."""
    return tuple("" if row[c] is None or pd.isna(row[c]) else str(row[c]) for c in by)
