"""Tables for notebooks and the report: plain HTML, three digits, numbers to the right, nothing random."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.select import SERIES, recorded, valid
from batchlab.plots.style import engine_name

EXACT = {
    "max_batch_size",
    "max_num_tokens",
    "num_requests",
    "input_len",
    "output_len",
    "repeat",
    "seed",
    "n",
    "completed",
    "failed",
    "preemptions",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of finished text under headings; `numeric` says which columns are right-aligned."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    empty: str = "Nothing to show."

    def _repr_html_(self) -> str:
        if not self.rows:
            return f'<p class="note">{html.escape(self.empty)}</p>'
        classes = [' class="number"' if n else "" for n in self.numeric]
        head = "".join(
            f'<th scope="col"{c}>{html.escape(h)}</th>' for h, c in zip(self.headings, classes, strict=True)
        )
        classes = [c or long(column) for c, column in zip(classes, zip(*self.rows, strict=True), strict=True)]
        body = "".join(
            "<tr>"
            + "".join(f"<td{c}>{html.escape(v)}</td>" for v, c in zip(row, classes, strict=True))
            + "</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="scroll" tabindex="0">{table}</div>'

    def __repr__(self) -> str:
        if not self.rows:
            return self.empty
        widths = [max(len(r[i]) for r in (self.headings, *self.rows)) for i in range(len(self.headings))]

        def line(row: Sequence[str]) -> str:
            return "  ".join(
                v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, self.numeric, strict=True)
            ).rstrip()

        return "\n".join(line(r) for r in (self.headings, *self.rows))


def long(column: Sequence[str]) -> str:
    """The class of the cells of a column whose texts may wrap."""
    return ' class="long"' if max(map(len, column)) > 40 else ""


def text(column: str, value: Any) -> str:
    """One value as the table writes it."""
    if isinstance(value, (list, tuple)):
        return "; ".join(str(v) for v in value) or "–"
    if isinstance(value, str):
        return engine_name(value) if column == "engine" else value
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if value is None or pd.isna(value):
        return "–"
    if column == "request_rate":
        return "all at once" if float(value) == float("inf") else f"{float(value):g} req/s"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if column in EXACT or isinstance(value, (int, np.integer)):
        return whole(value)
    return number(value) if isinstance(value, (float, np.floating)) else str(value)


def heading(column: str) -> str:
    """A metric's words and unit; any other column's own name, since those are what a person types."""
    words, unit = metric_words(column)
    return f"{words} ({unit})" if unit else words


def table(
    frame: pd.DataFrame,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    empty: str = "Nothing to show.",
) -> Table:
    """The frame's columns (all, a list, or {column: heading}) as a Table, in the frame's order.

    Before a list's own columns stand those that tell its series apart: engine, evidence, transport.
    """
    chosen = list(frame.columns if columns is None else columns)
    names = dict(columns) if isinstance(columns, Mapping) else {c: heading(c) for c in chosen}
    if columns is not None:
        apart = [c for c in told_apart(frame) if c not in chosen]
        chosen, names = apart + chosen, {c: heading(c) for c in apart} | names
    numeric = tuple(not frame[c].map(lambda v: isinstance(v, (str, list))).any() for c in chosen)
    rows = tuple(tuple(text(c, row[c]) for c in chosen) for _, row in frame.iterrows())
    return Table(tuple(names[c] for c in chosen), rows, numeric, empty)


def with_range(value: float, low: float, high: float) -> str:
    """A value with its range in brackets, as tables write it."""
    return f"{number(value)} ({number(low)} to {number(high)})"


def told_apart(frame: pd.DataFrame) -> list[str]:
    """Those of engine, evidence and transport in which the frame's rows differ."""
    differ = [c for c in SERIES if c in frame and frame[c].nunique(dropna=False) > 1]
    if "transport" in differ and "evidence" in frame:
        real = frame["evidence"] != "simulated"  # simulated cells have a transport of their own
        differ = [c for c in differ if c != "transport" or frame.loc[real, c].nunique() > 1]
    return differ


def invalid_table(cells: pd.DataFrame) -> Table:
    """Recorded but invalid cells with their reasons: the check that comes before every figure."""
    cells = cells.drop_duplicates("cell")
    bad = cells[recorded(cells) & ~valid(cells)]
    columns = ["engine", "dataset", "max_batch_size", "max_num_tokens", "request_rate", "repeat"]
    headings = {c: c for c in columns if c in bad} | {"invalid_reasons": "why it is invalid"}
    count = int(recorded(cells).sum())
    empty = f"All {count} recorded cells are valid." if count else "No cell is recorded yet."
    return table(bad, headings, empty=empty)
