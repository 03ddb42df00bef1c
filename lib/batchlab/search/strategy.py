"""Where to look next. Each strategy is a generator: `judge(x)`, a generator too, gives the verdict on a point after
yielding the cells that it takes; what a strategy returns is never more than the verdicts say."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchlab.search.verdict import KEEPS, MISSES

Judge = Callable[[float], Generator[Any, None, str]]
DOUBLINGS = 16  # from the first guess, up and down


@dataclass(frozen=True, slots=True)
class Bracket:
    """The largest x that keeps below every x that misses, and the smallest x above it that does not keep.

    `violations`: (missed, kept) pairs where the smaller misses and the larger keeps, against what a search assumes.
    """

    kept: float | None
    above: float | None
    violations: tuple[tuple[float, float], ...]


def bracket(verdicts: Mapping[float, str]) -> Bracket:
    """What verdicts on points say together, the smaller x being the easier one."""
    missed = sorted(x for x, v in verdicts.items() if v == MISSES)
    kept = sorted(x for x, v in verdicts.items() if v == KEEPS)
    violations = tuple((m, k) for m in missed for k in kept if m < k)
    below = [x for x in kept if not missed or x < missed[0]]
    best = below[-1] if below else None
    higher = [x for x, v in verdicts.items() if v != KEEPS and (best is None or x > best)]
    return Bracket(best, min(higher, default=None), violations)


def three_digits(x: float) -> float:
    """Points with few digits: a search that is run again asks for the same ones, and finds them recorded."""
    return float(f"{x:.3g}")


def bisect_rate(
    judge: Judge,
    verdicts: dict[float, str],
    *,
    start: float,
    low: float | None,
    high: float | None,
    tolerance: float,
) -> Generator[Any, None, Bracket]:
    """The highest rate that keeps, to within `tolerance` (a share of it).

    Doubles from `start` until it misses (or halves until it keeps), never beyond `low` and `high` where they are given;
    then bisects by the geometric mean. `verdicts` holds what is known already, and gets what is found. A point that is
    neither kept nor missed counts as not kept, so the answer errs to the safe side.
    """

    def ask(x: float) -> Generator[Any, None, None]:
        verdicts[x] = yield from judge(x)

    inside = lambda x: min(max(x, low or 0.0), high or math.inf)  # noqa: E731
    if not any(v in (KEEPS, MISSES) for v in verdicts.values()):
        yield from ask(inside(three_digits(start)))
    for _ in range(DOUBLINGS):
        now = bracket(verdicts)
        if now.kept is None:
            lower = inside(three_digits(min(verdicts) / 2))
        elif now.above is None:
            lower = inside(three_digits(now.kept * 2))
        else:
            break
        if lower in verdicts:
            break
        yield from ask(lower)
    while True:
        now = bracket(verdicts)
        if now.kept is None or now.above is None or now.above <= now.kept * (1 + tolerance):
            return now
        middle = three_digits(math.sqrt(now.kept * now.above))
        if middle in verdicts or not now.kept < middle < now.above:
            return now
        yield from ask(middle)


def bisect_list(judge: Judge, verdicts: dict[float, str], candidates: Sequence[float]) -> Generator[Any, None, Bracket]:
    """The largest of ascending candidates that keeps; the ends are asked first, in case one settles it."""
    left, right = 0, len(candidates) - 1
    for end in dict.fromkeys((right, left)):
        verdicts[candidates[end]] = yield from judge(candidates[end])
        if end == right and verdicts[candidates[end]] == KEEPS:
            return bracket(verdicts)
    while right - left > 1 and bracket(verdicts).kept is not None:
        middle = (left + right) // 2
        verdicts[candidates[middle]] = yield from judge(candidates[middle])
        left, right = (middle, right) if verdicts[candidates[middle]] == KEEPS else (left, middle)
    return bracket(verdicts)


def scan(judge: Judge, verdicts: dict[float, str], candidates: Sequence[float]) -> Generator[Any, None, None]:
    """Every candidate: for limits that neither ease nor harden with x all along."""
    for x in candidates:
        verdicts[x] = yield from judge(x)
