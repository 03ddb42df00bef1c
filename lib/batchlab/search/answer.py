"""What a search found, with everything that it looked at."""

import html
from dataclasses import dataclass
from typing import Any

import pandas as pd

from batchlab import paths
from batchlab.search.probes import Point, Probes
from batchlab.search.verdict import UNDECIDED, Judged


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` states the answer; `best` is the point found, None when none keeps the limits.

    `points`: a row a point that was looked at, with its verdict, how that came about, and each requirement's mean with
    its interval. `frame`: the study's frame of their cells. `kept` and `not_kept` bracket the answer on the axis that
    was searched. `violations` are pairs that contradict what the search assumes, as (easier point that misses, harder
    one that keeps). `only_recorded` says why nothing was measured, None where it was.
    """

    text: str
    best: Point | None
    kept: float | None
    not_kept: float | None
    violations: tuple[tuple[float, float], ...]
    confidence: float
    points: pd.DataFrame
    frame: pd.DataFrame
    only_recorded: str | None

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<div class="reading"><p>{html.escape(self.text)}</p></div>'


def points_frame(judged: dict[Point, Judged]) -> pd.DataFrame:
    """A row a point, in the order of rate and limits."""
    order = sorted(judged, key=lambda p: (p.max_num_tokens, p.max_batch_size, p.request_rate))
    return pd.DataFrame([_row(p, judged[p]) for p in order])


def _row(point: Point, found: Judged) -> dict[str, Any]:
    row: dict[str, Any] = {
        "max_batch_size": point.max_batch_size,
        "max_num_tokens": point.max_num_tokens,
        "request_rate": point.request_rate,
        "verdict": found.verdict,
        "how": found.how,
        "sure": found.sure,
        "runs": found.runs,
    }
    for e in found.estimates:
        row |= {e.requirement.name: e.value, f"{e.requirement.name}_lo": e.low, f"{e.requirement.name}_hi": e.high}
    return row


def told_limits(probes: Probes) -> str:
    """The requirements in words."""
    *most, last = [r.told() for r in probes.requirements]
    return f"{', '.join(most)} and {last}" if most else last


def caveats(probes: Probes, violations: tuple[tuple[float, float], ...], axis: str) -> list[str]:
    """What a reader of the answer must know: confidence, undecided points, contradictions, missing measurements."""
    rule, judged = probes.rule, probes.judged
    told = []
    unsure = [p for p, j in judged.items() if j.runs and not j.sure]
    if any(j.sure for j in judged.values()):
        told.append(
            f"Confidence {rule.confidence:.0%} at each point ({rule.repeats} to {rule.max_repeats} runs, one where it "
            f"is {rule.clear:.0%} or more off a limit)."
        )
    if unsure:
        told.append(f"{len(unsure)} of {len(judged)} points by the value of single runs alone, without an interval.")
    if open_ones := sorted(getattr(p, axis) for p, j in judged.items() if j.verdict == UNDECIDED):
        told.append(
            f"Undecided after the last run: {axis} {', '.join(f'{x:g}' for x in open_ones)}; counted as not kept."
        )
    told += [
        f"Not monotone: {axis} {missed:g} misses the limits although {kept:g} keeps them; the answer is below both."
        for missed, kept in violations
    ]
    if probes.only_recorded:
        told.append(f"Nothing was measured for this: {probes.only_recorded.replace(f'{paths.ROOT}/', '')}.")
    return told
