"""Which rows of a frame go into a figure, and which of them are valid, invalid or missing."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from batchlab.errors import UsageError
from batchlab.plots.labels import OTHER_AXIS

SERIES = ["engine", "evidence", "transport"]


def flags(frame: pd.DataFrame, column: str, default: bool) -> pd.Series:
    """A boolean column where null, or no such column, counts as `default`."""
    if column not in frame:
        return pd.Series(default, index=frame.index)
    return frame[column].map(lambda v: default if v is None or pd.isna(v) else bool(v)).astype(bool)


def recorded(frame: pd.DataFrame) -> pd.Series:
    """Boolean per row: there is a record (valid or not)."""
    return flags(frame, "recorded", True)


def valid(frame: pd.DataFrame) -> pd.Series:
    """Boolean per row: recorded, and measuring what it says."""
    return recorded(frame) & flags(frame, "valid", True)


def reasons(frame: pd.DataFrame) -> list[str]:
    """Every reason for which repeats behind recorded rows are invalid, as often as it occurs."""
    found: list[str] = []
    if "reasons" in frame:
        return [reason for some in frame["reasons"] for reason in some]
    bad = frame[recorded(frame) & ~valid(frame)]
    for value in bad.get("invalid_reasons", []):
        items = (
            []
            if value is None or isinstance(value, float)
            else ([value] if isinstance(value, str) else list(value))
        )
        found += items or ["no reason given"]
    return found


def require(frame: pd.DataFrame, *columns: str) -> None:
    """UsageError when the frame lacks a column, naming those it has that look alike."""
    for column in columns:
        if column not in frame:
            near = [c for c in frame if c.split("_")[0] == column.split("_")[0]]
            raise UsageError(
                f"no column {column!r} in this frame" + (f"; there are {', '.join(near)}" if near else "")
            )


def series(points: pd.DataFrame) -> Iterator[tuple[tuple[str, str, Any], pd.DataFrame]]:
    """The frame's series: ((engine, evidence, transport), rows), a null transport being one of its own."""
    require(points, "engine", "evidence")
    by = [c for c in SERIES if c in points]
    for key, rows in points.groupby(by, dropna=False, sort=True):
        engine, evidence, *rest = key
        transport = rest[0] if rest and not pd.isna(rest[0]) else None
        yield (engine, evidence, transport), rows


def several_transports(frame: pd.DataFrame) -> bool:
    """Whether measured series of the frame differ in their transport, so that labels must name it."""
    if "transport" not in frame:
        return False
    real = frame[frame["evidence"] != "simulated"] if "evidence" in frame else frame
    return real["transport"].nunique() > 1


def datasets(frame: pd.DataFrame) -> list[str]:
    """Dataset names in the order in which the frame first shows them (the scenario's order)."""
    require(frame, "dataset")
    return list(dict.fromkeys(frame["dataset"]))


def along(points: pd.DataFrame, axis: str, defaults: Any = None) -> pd.DataFrame:
    """The points on one line through the plane of the two limits: `axis` varies, the other limit is fixed.

    The other limit is fixed at its default where the axis varies there, otherwise at the value with the most
    points: that serves a cross, a grid, and engines whose defaults differ. `defaults` maps the limits' names
    to numbers (a scenario's `defaults`).
    """
    if axis not in OTHER_AXIS:
        raise UsageError(f"axis {axis!r} is not one of {', '.join(OTHER_AXIS)}")
    other = OTHER_AXIS[axis]
    require(points, axis, other, "dataset", "engine")
    kept = []
    for _, rows in points.groupby(["dataset", "engine"], sort=False, dropna=False):
        counts = rows.groupby(other)[axis].nunique()
        if counts.empty:
            continue
        default = dict(defaults or {}).get(other)
        at = default if default in counts.index and counts[default] >= min(2, counts.max()) else counts.idxmax()
        kept.append(rows[rows[other] == at].sort_values(axis, kind="stable"))
    return pd.concat(kept) if kept else points.iloc[0:0]
