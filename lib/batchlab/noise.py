"""How much a run differs from itself by chance: told by points that were repeated, lent to single runs alike.

Runs are alike (`Kind`) on one engine and transport, and where its front end keeps up, or where it does not: a front end
at its limit varies with its host by several times what an engine does.
"""

import math
from collections.abc import Hashable, Iterable

import numpy as np
import pandas as pd
from scipy.special import stdtrit

WAY = ("engine", "transport")
LATE = 0.05  # of the run: a front end further behind its engine than this is said to limit it

Kind = tuple[Hashable, ...]  # WAY, and whether the front end is late


def late(frame: pd.DataFrame) -> np.ndarray:
    """Whether the front end of each row (cells, or points of them) is behind its engine by more than LATE of the run;
    False where it is not known.
    """
    if not {"front_end_behind_s", "duration_s"} <= set(frame.columns):
        return np.zeros(len(frame), bool)
    behind, took = (pd.to_numeric(frame[c]).to_numpy(float) for c in ("front_end_behind_s", "duration_s"))
    return behind > LATE * took


def kinds(frame: pd.DataFrame) -> list[Kind]:
    """The kind of each row; WAY as far as the frame has it."""
    ways = frame[[c for c in WAY if c in frame]].itertuples(index=False, name=None)
    return [(*way, bool(is_late)) for way, is_late in zip(ways, late(frame), strict=True)]


def pooled(values: np.ndarray, point: np.ndarray, kind: list[Kind]) -> dict[Kind, tuple[float, int]]:
    """Relative standard deviation of a run and its degrees of freedom, by kind, pooled over repeated points.

    `values` is a figure of each run (float, NaN where it has none), `point` the number of its point, `kind` its kind. A
    point whose runs are of several kinds counts as the most common. Kinds without a repeated point are left out.
    """
    of: dict[Kind, list[np.ndarray]] = {}
    for number in np.unique(point):
        at = np.flatnonzero(point == number)
        mine = [kind[i] for i in at]
        of.setdefault(max(dict.fromkeys(mine), key=mine.count), []).append(values[at])
    found = {each: repeat_noise(groups) for each, groups in of.items()}
    return {each: told for each, told in found.items() if told[1]}


def repeat_noise(points: Iterable[np.ndarray]) -> tuple[float, int]:
    """Relative standard deviation of a run, pooled over points, and the degrees of freedom.

    `points` has the values of one figure over a point's repeats, each. (0, 0) where no point has two.
    """
    squares, freedom = 0.0, 0
    for values in points:
        values = values[~np.isnan(values)]
        if len(values) > 1 and values.mean() > 0:
            squares += float(((values / values.mean() - 1) ** 2).sum())
            freedom += len(values) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def half(told: tuple[float, int] | None) -> float:
    """Half of the 95% interval of a single run, as a share of its value; NaN without repeats."""
    return float(stdtrit(told[1], 0.975)) * told[0] if told else math.nan
