"""What other scenarios have recorded of the question that a notebook asks, so that one figure holds all evidence."""

from collections.abc import Iterable

import pandas as pd

from batchlab import study
from batchlab.claims.setups import card
from batchlab.errors import UsageError
from batchlab.plots.select import SERIES, recorded
from batchlab.scenario import names
from batchlab.study import Study


def cells(opened: Study, own: pd.DataFrame, *sweeps: str) -> pd.DataFrame:
    """The recorded cells of these sweeps in other scenarios, of models and datasets that `own` has.

    Simulated cells are made, nothing is measured. An engine that `own` has by the same evidence and transport is left
    out: a figure shows both alike, and a line through two cards would mean nothing.
    """
    found = []
    for name in names() if len(own) else ():
        try:
            other = study.open_study(name) if name != opened.scenario.name else None
        except UsageError:  # a scenario that is being written is no reason to fail here
            continue
        for sweep in sweeps if other else ():
            if not other.has(sweep):
                continue
            frame = other.frame(sweep)
            frame = other.ensure(sweep) if (frame["evidence"] == "simulated").all() else frame
            alike = frame["dataset"].isin(own["dataset"]) & frame["model"].isin(own["model"])
            found.append(frame[alike & recorded(frame) & ~_there(frame, [own, *found])])
    return pd.concat(found, ignore_index=True) if found else own.iloc[0:0]


def _there(frame: pd.DataFrame, before: Iterable[pd.DataFrame]) -> pd.Series:
    """Boolean per row: another machine's rows of the same engine, evidence and transport came before."""
    taken = {tuple(map(str, row)): machine for rows in before for *row, machine in _keys(rows)}
    there = [taken.get(tuple(map(str, row)), machine) != machine for *row, machine in _keys(frame)]
    return pd.Series(there, index=frame.index, dtype=bool)


def _keys(frame: pd.DataFrame) -> Iterable[tuple[object, ...]]:
    return frame[[*SERIES, "hardware"]].itertuples(index=False)


def cards(frame: pd.DataFrame, but: str) -> str:
    """That the recorded cells behind a figure are of several cards, `but` what that means; nothing for one."""
    there = [card(c) for c in dict.fromkeys(frame.loc[recorded(frame), "hardware"])]
    return f"{' and '.join(there)} are different cards: {but}" if len(there) > 1 else ""
