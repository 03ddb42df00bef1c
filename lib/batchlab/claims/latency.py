"""Tests of TTFT along the limits, at a finite request rate."""

import numpy as np

from batchlab.claims.batching import BATCH, THROUGHPUT, TOKENS, TTFT, percent
from batchlab.claims.body import Body, Line
from batchlab.claims.outcome import Outcome, apart, value
from batchlab.plots.labels import metric_words, whole
from batchlab.report.readings import holds_from, times

SWEEPS = ("latency",)


def settled(line: Line, within: float) -> int:
    """Index from which on TTFT stays within a share of its lowest; the length where the last value does not."""
    y = line.y(TTFT)
    return holds_from(y <= (1 + within) * y.min())


def settles_by(body: Body, *, dataset: str, most: int, within: float, queueing: float) -> Outcome:
    """TTFT has settled at a batch limit or below; at the smallest one it is a multiple of that."""
    line = body.line(dataset, BATCH, sweeps=SWEEPS, finite_rate=True)
    at, y = settled(line, within), line.y(TTFT)
    if at == len(y):
        return Outcome(False, f"{dataset}: TTFT is {line.ends(TTFT)} and does not settle", line.cells, 2.0)
    ratio = y[0] / y.min()
    told = (
        f"{dataset}: TTFT is {line.at(0, TTFT)}, {times(ratio)} its lowest, and from {whole(line.x[at])} on it stays "
        f"within "
        f"{within:.0%} of {value(line.rows.iloc[int(y.argmin())], TTFT)}"
    )
    holds = line.x[at] <= most and ratio >= queueing
    return Outcome(bool(holds), told, line.cells, 1.0 if holds else max(line.x[at] / most, queueing / ratio))


def settles_at(body: Body, *, points: dict[str, int], within: float, steps: int) -> Outcome:
    """Where TTFT settles, for each dataset, at most some steps of two from a stated batch limit."""
    parts, holds, cells, factor = [], [], (), 1.0
    for dataset, stated in points.items():
        line = body.line(dataset, BATCH, sweeps=SWEEPS, finite_rate=True)
        at = settled(line, within)
        found = line.x[at] if at < len(line.x) else np.inf
        near = apart(found, stated) <= 2.0**steps
        holds.append(near)
        factor = factor if near else max(factor, apart(min(found, 2 * line.x[-1]), stated))
        cells += line.cells
        parts.append(f"{dataset}: TTFT settles at {line.told(at)} (stated: {stated})")
    return Outcome(all(holds), "; ".join(parts), cells, factor)


def flat(body: Body, *, dataset: str, axis: str, metric: str, within: float) -> Outcome:
    """A metric's largest over its smallest value along an axis, at a finite rate."""
    line = body.line(dataset, axis, sweeps=SWEEPS, finite_rate=True)
    y = line.y(metric)
    ratio = y.max() / y.min()
    told = (
        f"{dataset}: {metric_words(metric)[0]} is {line.ends(metric)}; largest and smallest are {ratio - 1:.0%} "
        f"apart, at "
        f"{whole(line.x[int(y.argmax())])} and {whole(line.x[int(y.argmin())])}"
    )
    return Outcome(bool(ratio <= 1 + within), told, line.cells, 1.0 if ratio <= 1 + within else ratio)


def throughput_and_ttft_rise(body: Body, *, dataset: str, by: float) -> Outcome:
    """Both from the smallest to the largest token budget, throughput all at once, TTFT at a finite rate."""
    busy, idle = body.line(dataset, TOKENS), body.line(dataset, TOKENS, sweeps=SWEEPS, finite_rate=True)
    changes = busy.y(THROUGHPUT)[-1] / busy.y(THROUGHPUT)[0] - 1, idle.y(TTFT)[-1] / idle.y(TTFT)[0] - 1
    told = (
        f"{dataset}: throughput is {busy.ends(THROUGHPUT)} ({percent(changes[0])}), TTFT {idle.ends(TTFT)} "
        f"({percent(changes[1])})"
    )
    holds = min(changes) >= by
    return Outcome(bool(holds), told, busy.cells + idle.cells, 1.0 if holds else apart(1 + min(changes), 1 + by))
