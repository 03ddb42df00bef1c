"""The line under every figure: evidence, engine version, transport, machine, n; what is hollow or missing."""

from collections import Counter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from batchlab.plots.select import reasons, recorded, series, valid
from batchlab.plots.style import TRANSPORTS, engine_name


def span(values: Any) -> str:
    """ "64", or "64–1024" where the values differ; nothing where there are none."""
    known = sorted({int(v) for v in values if v is not None and not pd.isna(v)})
    if not known:
        return ""
    return str(known[0]) if len(known) == 1 else f"{known[0]}–{known[-1]}"


def texts(frame: pd.DataFrame, column: str) -> str:
    """The column's distinct values, joined."""
    if column not in frame:
        return ""
    return ", ".join(dict.fromkeys(str(v) for v in frame[column] if v is not None and not pd.isna(v)))


def sample(rows: pd.DataFrame) -> str:
    """ "n = 3 × 64 requests": repeats × requests, each a range where points differ."""
    requests = span(rows.get("num_requests", []))
    repeats = span(rows["n"]) if "n" in rows else (str(rows["repeat"].nunique()) if "repeat" in rows else "")
    if not requests:
        return f"n = {repeats}" if repeats else ""
    return f"n = {repeats} × {requests} requests" if repeats else f"n = {requests} requests"


def counted(found: list[str]) -> str:
    """ "late client ×2, wrong length ×1": the most frequent first, at most three."""
    common = Counter(found).most_common()
    shown = [f"{reason} ×{count}" for reason, count in common[:3]]
    return ", ".join(shown + ([f"{len(common) - 3} more reasons"] if len(common) > 3 else []))


def describe(rows: pd.DataFrame, engine: str, evidence: str, transport: Any) -> tuple[str, str, str]:
    """One series: evidence, engine with version, and the rest: ("measured", "vLLM 0.32.0", "HTTP, AMD EPYC, n = 3")."""
    done = rows[recorded(rows)]
    named = " ".join(filter(None, [engine_name(engine), texts(done, "engine_version")]))
    machine = texts(done, "machine") or texts(rows, "hardware")
    way = "" if transport == evidence else TRANSPORTS.get(transport, transport or "")
    return evidence, named, ", ".join(filter(None, [way, machine, sample(done)]))


def together(described: list[tuple[str, str, str]]) -> list[str]:
    """Series that differ in their engine only are told at once: "simulated, TensorRT-LLM 0.14.0, TGI 3.3.5, h100"."""
    engines: dict[tuple[str, str], list[str]] = {}
    for evidence, engine, rest in described:
        engines.setdefault((evidence, rest), []).append(engine)
    return [", ".join(filter(None, [evidence, *dict.fromkeys(who), rest])) for (evidence, rest), who in engines.items()]


def caption(frame: pd.DataFrame, note: str = "", invalid: str = "hollow") -> str:
    """One line from a frame of cells or points (at least the columns engine and evidence).

    Says for each series its evidence, engine version, transport, machine and n; then the number of invalid
    points with their reasons (`invalid` says how they are shown), the number that is not recorded, and
    `note`.
    """
    if frame.empty:
        return "nothing planned, nothing recorded" + (f"; {note}" if note else "")
    shown = []
    for (engine, evidence, transport), rows in series(frame):
        if recorded(rows).any():
            shown.append(describe(rows, engine, evidence, transport))
    parts = together(shown) or ["no cell recorded yet"]
    real = recorded(frame) & (frame["evidence"] != "simulated")
    if "n" in frame and real.any():
        parts.append(_bars(frame[real]))
    done, good = recorded(frame), valid(frame)
    bad = frame[done & ~good]
    if len(bad):
        parts.append(f"{invalid}: {len(bad)} invalid ({counted(reasons(bad))})")
    if "invalid" in frame and (dropped := int(frame.loc[good, "invalid"].fillna(0).sum())):
        repeats = f"{dropped} invalid repeat{'s' * (dropped != 1)}"
        parts.append(f"left out: {repeats} ({counted(reasons(frame[good]))})")
    missing = int((~recorded(frame)).sum())
    if missing:
        parts.append(f"{missing} of {len(frame)} not recorded")
    return "; ".join(parts + ([note] if note else []))


def _bars(rows: pd.DataFrame) -> str:
    """What an interval is made of: repeats, those of other points, or batches within the only run."""
    several = rows["n"] > 1
    if several.all():
        return "bars: 95% interval over repeats"
    pooled = "interval" in rows and (rows.loc[~several, "interval"] == "pooled").all()
    if pooled and "tpot_mean_ms_lo" in rows and rows["tpot_mean_ms_lo"].isna().all():
        return "single runs, no interval"
    alone = "by batch means within the run, where it has one"
    if pooled:
        alone = "as much as repeated points like them vary (engine, transport, front end)"
    if several.any():
        return f"bars: 95% interval over repeats, for single runs {alone}"
    return f"bars: 95% interval {alone}"


def attach(figure: Figure, frame: pd.DataFrame, note: str = "", invalid: str = "hollow") -> None:
    """Puts the caption on the figure, where `save` finds it (a second frame's caption is added, not lost)."""
    line = caption(frame, note, invalid)
    before = str(figure.get_label() or "")
    if line not in before:
        figure.set_label(f"{before} | {line}" if before else line)
