"""Readings: what a figure shows, in a sentence a dataset whose every number is computed from the frame.

Only valid points are read. Two values count as different when their 95% intervals do not touch; values
without an interval (single runs) when they differ by more than `ALIKE`.
"""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.select import along, datasets, recorded, series, several_transports, valid
from batchlab.plots.spreads import spread
from batchlab.plots.style import series_style

ALIKE = 0.05  # relative difference that is not called one
SATURATED = 0.95  # share of the best throughput from which it counts as saturated
SETTLED = 1.30  # a latency within 30% of its lowest has settled: queueing multiplies it
FOLLOWS = 0.90  # the running batch follows its limit while it fills this share of it

SINGLE = f"Single runs, without an interval: a change under {ALIKE:.0%} counts as noise."
SIMULATED = f"Simulated, without an interval: a change under {ALIKE:.0%} counts as none."


@dataclass(frozen=True, slots=True)
class Reading:
    """Sentences under a figure, a paragraph each."""

    sentences: tuple[str, ...]

    def _repr_html_(self) -> str:
        return (
            '<div class="reading">' + "".join(f"<p>{html.escape(s)}</p>" for s in self.sentences) + "</div>"
        )

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


@dataclass(frozen=True, slots=True)
class Curve:
    """One series' valid points, in the order of the axis; `low` and `high` are NaN without an interval."""

    name: str
    axis: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def differ(self, i: int, j: int) -> bool:
        """Whether points i and j differ by more than their intervals (or than ALIKE, without intervals)."""
        if np.isfinite([self.low[i], self.low[j]]).all():
            return bool(self.high[i] < self.low[j] or self.high[j] < self.low[i])
        return bool(abs(self.y[j] - self.y[i]) > ALIKE * max(abs(self.y[i]), abs(self.y[j])))

    def at(self, i: int) -> str:
        return f"{self.axis} {whole(self.x[i])}"


def curves(
    points: pd.DataFrame, axis: str, metric: str, defaults: Any = None
) -> Iterator[tuple[str, Curve | None]]:
    """(name, curve) a dataset and series along `axis`; None where fewer than two points are valid."""
    for name, rows in named(along(points, axis, defaults)):
        good = rows[valid(rows) & rows[metric].notna()].sort_values(axis, kind="stable")
        if len(good) < 2:
            yield name, None
            continue
        bounds = [
            good[f"{metric}_{end}"].to_numpy(float) if f"{metric}_{end}" in good else np.full(len(good), np.nan)
            for end in ("lo", "hi")
        ]
        yield name, Curve(name, axis, good[axis].to_numpy(float), good[metric].to_numpy(float), *bounds)


def named(line: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(name, rows) a dataset and series; the series is named where there are several."""
    several = len(list(series(line))) > 1 if len(line) else False
    for dataset in datasets(line):
        for key, rows in series(line[line["dataset"] == dataset]):
            look = series_style(*key, name_transport=several_transports(line))
            yield f"{dataset}, {look.label}" if several else dataset, rows


def read(points: pd.DataFrame, axis: str, metric: str, defaults: Any, say: Callable[[Curve], str]) -> Reading:
    """A sentence a curve, and one more where a curve is of single runs; too few valid points are said instead."""
    drawn = list(curves(points, axis, metric, defaults))
    found = [
        f"{name}: {say(curve)}" if curve else f"{name}: too few valid points to read." for name, curve in drawn
    ]
    if any(curve and not np.isfinite(curve.low).any() for _, curve in drawn):
        found.append(SIMULATED if set(points["evidence"]) == {"simulated"} else SINGLE)
    return Reading(tuple(found) or ("Nothing is planned for this figure.",))


def times(ratio: float) -> str:
    """A ratio as "6.4 times", without decimals from ten on."""
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:,.0f} times"


def between(low: float, high: float) -> str:
    """A range of ratios, or one ratio where both read the same."""
    first, last = times(low), times(high)
    return last if first == last else f"{first.removesuffix(' times')} to {last}"


def change(curve: Curve, metric: str) -> str:
    """From the first to the last value: by how much, and whether that is more than the intervals."""
    words, unit = metric_words(metric)
    first, last = curve.y[0], curve.y[-1]
    ends = f"{number(first)} {unit} at {curve.at(0)}, {number(last)} {unit} at {whole(curve.x[-1])}"
    peak = int(np.argmax(np.abs(curve.y - first)))
    if not any(curve.differ(0, i) for i in range(1, len(curve.y))):
        return f"{words} does not change with {curve.axis} beyond the noise ({ends})."
    if curve.differ(0, len(curve.y) - 1):
        return f"{words} {'rises' if last > first else 'falls'} by {abs(last / first - 1):.0%} ({ends})."
    return (
        f"{words} ends where it began ({ends}), but reaches {number(curve.y[peak])} {unit} at "
        f"{whole(curve.x[peak])}."
    )


def holds_from(enough: np.ndarray) -> int:
    """Index from which on every element is true; the length where the last one is not."""
    return int(len(enough) - np.argmin(enough[::-1])) if not enough.all() else 0


def saturation(curve: Curve) -> int:
    """Index of the first point from which on every value stays within SATURATED of the best."""
    return holds_from(curve.y >= SATURATED * curve.y.max())


def settled(curve: Curve) -> int:
    """Index of the first point from which on every value stays within SETTLED of the lowest."""
    return holds_from(curve.y <= SETTLED * curve.y.min())


def throughput(
    points: pd.DataFrame, axis: str, defaults: Any = None, metric: str = "output_throughput_tok_s"
) -> Reading:
    """How throughput moves along `axis`, and where it saturates."""
    words, unit = metric_words(metric)

    def say(c: Curve) -> str:
        best, knee, last = int(np.argmax(c.y)), saturation(c), len(c.y) - 1
        if axis == "max_num_tokens" or best == 0 or not c.differ(0, best):
            return change(c, metric)
        sentence = (
            f"{words} grows {times(c.y[best] / c.y[0])}, from {number(c.y[0])} {unit} at {c.at(0)} "
            f"to {number(c.y[best])} {unit} at {whole(c.x[best])}"
        )
        if knee > last:
            return f"{sentence}, then falls to {number(c.y[last])} {unit} at {whole(c.x[last])}."
        if knee == last:
            return f"{sentence}, and has not saturated at the largest value recorded."
        lower = f"{1 - c.y[last] / c.y[best]:.0%} lower"
        dip = f"; at {whole(c.x[last])} it is {lower}" if c.differ(best, last) else ""
        return f"{sentence}; from {whole(c.x[knee])} on it stays within {1 - SATURATED:.0%} of the best{dip}."

    return read(points, axis, metric, defaults, say)


def trend(points: pd.DataFrame, axis: str, metric: str, defaults: Any = None) -> Reading:
    """How any metric moves from the smallest to the largest value of `axis`."""
    return read(points, axis, metric, defaults, lambda curve: change(curve, metric))


def ttft(points: pd.DataFrame, axis: str, defaults: Any = None, metric: str = "ttft_mean_ms") -> Reading:
    """How TTFT moves along `axis`, and from which value on it has settled."""
    words, unit = metric_words(metric)

    def say(c: Curve) -> str:
        low, knee, last = int(np.argmin(c.y)), settled(c), len(c.y) - 1
        if axis == "max_num_tokens" or low == 0 or not c.differ(0, low):
            return change(c, metric)
        sentence = (
            f"{words} falls from {number(c.y[0])} {unit} at {c.at(0)} "
            f"to {number(c.y[low])} {unit} at {whole(c.x[low])}"
        )
        if knee > last:
            return f"{sentence}, then rises to {number(c.y[last])} {unit} at {whole(c.x[last])}."
        if knee == last:
            return f"{sentence}, and was still falling at the largest value recorded."
        rest = f"between {number(c.y[knee:].min())} and {number(c.y[knee:].max())} {unit}"
        return f"{sentence}; from {whole(c.x[knee])} on it stays {rest}."

    return read(points, axis, metric, defaults, say)


def tpot(points: pd.DataFrame, axis: str, defaults: Any = None, metric: str = "tpot_mean_ms") -> Reading:
    """How TPOT moves along `axis`: the price of a larger batch."""
    words, unit = metric_words(metric)

    def say(c: Curve) -> str:
        last = len(c.y) - 1
        if axis == "max_num_tokens" or c.y[last] <= c.y[0] or not c.differ(0, last):
            return change(c, metric)
        return (
            f"{words} grows {times(c.y[last] / c.y[0])}, from {number(c.y[0])} {unit} at {c.at(0)} to "
            f"{number(c.y[last])} {unit} at {whole(c.x[last])}."
        )

    return read(points, axis, metric, defaults, say)


def tpot_range(cells: pd.DataFrame, axis: str, defaults: Any = None) -> Reading:
    """Where the slowest request's TPOT is furthest above the fastest one's."""
    found = []
    for name, cells_of_one in named(along(cells, axis, defaults)):
        rows = spread(cells_of_one, axis)
        if rows.empty:
            found.append(f"{name}: no valid cell to read.")
            continue
        top, least = rows.loc[rows["ratio"].idxmax()], rows.loc[rows["ratio"].idxmin()]
        found.append(
            f"{name}: the slowest request's TPOT is {between(least['ratio'], top['ratio'])} the fastest one's; "
            f"the range is widest at {axis} {whole(top[axis])}, "
            f"{number(top['tpot_min_ms'])} to {number(top['tpot_max_ms'])} ms."
        )
    return Reading(tuple(found) or ("Nothing is planned for this figure.",))


def running(points: pd.DataFrame, defaults: Any = None, metric: str = "running_batch_mean") -> Reading:
    """Up to which limit the running batch fills the limit, and what it is at the largest one."""

    def say(c: Curve) -> str:
        full = c.y >= FOLLOWS * c.x
        last = len(c.y) - 1
        share = f"{c.y[last] / c.x[last]:.0%} of the limit"
        largest = f"at {whole(c.x[last])} the mean is {number(c.y[last])}, {share}"
        if full.all():
            return f"the running batch fills at least {FOLLOWS:.0%} of every limit recorded; {largest}."
        below = int(np.argmin(full))
        if below == 0:
            return (
                f"the running batch stays under {FOLLOWS:.0%} of the limit already at {c.at(0)}; {largest}."
            )
        return (
            f"the running batch fills at least {FOLLOWS:.0%} of the limit up to {c.at(below - 1)}; {largest}."
        )

    return read(points, "max_batch_size", metric, defaults, say)


def coverage(cells: pd.DataFrame) -> Reading:
    """How many cells there are, and how many of them are recorded and valid."""
    unique = cells.drop_duplicates("cell") if "cell" in cells else cells
    done, good = int(recorded(unique).sum()), int(valid(unique).sum())
    sentence = f"{done} of {len(unique)} cells are recorded, {good} of them valid."
    if done < len(unique):
        sentence += f" {len(unique) - done} are missing and shown as missing."
    return Reading((sentence,))
