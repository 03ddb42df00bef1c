"""Tests of S1's tables on our cells: values as printed, and what stays under a limit."""

import math

import numpy as np
import pandas as pd

from batchlab.claims import data
from batchlab.claims.batching import BATCH, THROUGHPUT, TPOT, TTFT
from batchlab.claims.body import Body, Dataset, Line
from batchlab.claims.outcome import Missing, Outcome, apart, listed, value
from batchlab.plots.captions import span
from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.select import recorded, valid
from batchlab.plots.style import engine_name

RATE = "request_rate"
MATCHED = {BATCH: BATCH, "max_num_tokens": "max_num_tokens", "request_rate_req_s": RATE}


def as_printed(body: Body, *, table: str, metric: str, sweeps: list[str], within: float) -> Outcome:
    """Our value beside each printed one of the same engine, lengths, limits and rate, as far as the table prints
    those."""
    made, parts, ratios, cells = body.points(sweeps), [], [], ()
    printed = data.table(table)
    absent = 0
    for row in printed[printed[metric].notna()].to_dict("records"):
        try:
            points = body.select(made, row["engine"], [row["input_len"], row["output_len"]], finite_rate=None)
        except Missing:
            continue
        # a table at default settings names no limit that ours were set to
        same = pd.Series(True, index=points.index)
        for column, ours in MATCHED.items():
            if column in printed and printed[column].nunique() > 1:
                same &= points[ours].astype(float) == row[column]
        points = points[same]
        absent += not recorded(points).any()
        good = points[valid(points)]
        for _, point in good.iterrows():
            ratios.append(point[metric] / row[metric])
            cells += point["cells"]
            parts.append(
                f"{engine_name(row['engine'])} {where(row, printed)}: {value(point, metric)} against "
                f"{number(row[metric])}"
            )
    if absent or not ratios:
        told = f"scenario {body.scenario} has not recorded {absent or 'any'} of the {len(printed)} rows of {table}"
        raise Missing(told, planned=True)
    found = np.array(ratios)
    shown = (
        parts
        if len(parts) <= 4
        else [parts[i] for i in sorted({int(found.argmin()), int(found.argmax()), 0, len(parts) - 1})]
    )
    times = f"{found.min():.3g} to {found.max():.3g}" if len(found) > 1 else f"{found[0]:.3g}"
    rows = f"{len(found)} row{'s' * (len(found) > 1)}"
    told = f"{metric_words(metric)[0]} is {times} times what is printed in {rows}: {'; '.join(shown)}"
    far = float(np.exp(np.abs(np.log(found))).max())
    return Outcome(bool(far <= 1 + within), told, cells, far)


def where(row: dict, printed: pd.DataFrame) -> str:
    """The row's coordinates that vary in its table."""
    parts = (
        [f"({row['input_len']:g}, {row['output_len']:g})"]
        if printed["input_len"].nunique() > 1 or len(printed) < 3
        else []
    )
    names = {BATCH: BATCH, "max_num_tokens": "max_num_tokens", "request_rate_req_s": "req/s"}
    for column, word in names.items():
        if column in printed and printed[column].nunique() > 1:
            parts.append(f"{row[column]:g} {word}" if word == "req/s" else f"{word} {row[column]:g}")
    return ", ".join(parts) or f"({row['input_len']:g}, {row['output_len']:g})"


def rates(body: Body, engine: str, dataset: Dataset, sweeps: list[str]) -> Line:
    """TTFT and throughput against the request rate."""
    return body.line(dataset, RATE, engine=engine, sweeps=sweeps, finite_rate=True)


def carried(line: Line, limit_ms: float) -> int:
    """Index of the highest rate up to which mean TTFT stays under a limit; -1 for none."""
    over = np.flatnonzero(line.y(TTFT) >= limit_ms)
    return int(over[0]) - 1 if len(over) else len(line.x) - 1


def engines_here(body: Body, roles: list[str]) -> list[str]:
    """Those of a study's engines that this body has; Missing for none."""
    here = []
    for role in roles:
        try:
            body.engine(role)
        except Missing:
            continue
        here.append(role)
    if not here:
        raise Missing(f"scenario {body.scenario} has none of {listed([engine_name(r) for r in roles])}")
    return here


def highest_under_limit(
    body: Body, *, dataset: list[int], sweeps: list[str], limit_ms: float, stated: dict[str, float]
) -> Outcome:
    """The highest request rate of the recorded ones whose mean TTFT is under a limit, for each engine that is here."""
    parts, holds, cells, factor = [], [], (), 1.0
    for role in engines_here(body, list(stated)):
        line = rates(body, role, dataset, sweeps)
        at = carried(line, limit_ms)
        found = line.x[at] if at >= 0 else 0.0
        holds.append(found == stated[role])
        factor = max(factor, apart(found, stated[role]))
        cells += line.cells
        last = at == len(line.x) - 1
        told = f"{found:g} req/s" + (", the highest tried" if last else "") if at >= 0 else "none of the rates tried"
        row = line.rows.iloc[max(at, 0)]
        parts.append(
            f"{engine_name(line.rows['engine'].iloc[0])} carries {told} (stated: {stated[role]:g}) at "
            f"{value(row, THROUGHPUT)} and TTFT {value(row, TTFT)}"
        )
    return Outcome(all(holds), "; ".join(parts), cells, factor)


def gpus_needed(
    body: Body, *, dataset: list[int], sweeps: list[str], limit_ms: float, low: float, high: float
) -> Outcome:
    """TensorRT-LLM's throughput over vLLM's, each at its highest rate under a TTFT limit."""
    lines = {role: rates(body, role, dataset, sweeps) for role in ("vllm", "tensorrt-llm")}
    at = {role: carried(line, limit_ms) for role, line in lines.items()}
    cells = lines["vllm"].cells + lines["tensorrt-llm"].cells
    if min(at.values()) < 0:
        return Outcome(False, f"no rate tried stays under {limit_ms:g} ms for both engines", cells)
    if any(at[role] == len(line.x) - 1 for role, line in lines.items()):
        told = f"TTFT stays under {limit_ms:g} ms at every rate that scenario {body.scenario} has recorded"
        raise Missing(told, planned=True)
    throughput = {role: float(line.y(THROUGHPUT)[at[role]]) for role, line in lines.items()}
    ratio = throughput["tensorrt-llm"] / throughput["vllm"]
    told = (
        f"under {limit_ms:g} ms TensorRT-LLM delivers {number(throughput['tensorrt-llm'])} tok/s at "
        f"{lines['tensorrt-llm'].x[at['tensorrt-llm']]:g} req/s, vLLM {number(throughput['vllm'])} at "
        f"{lines['vllm'].x[at['vllm']]:g}: {ratio - 1:+.0%} GPUs for vLLM (stated: {low - 1:.0%} to {high - 1:.0%})"
    )
    holds = low <= ratio <= high
    return Outcome(bool(holds), told, cells, 1.0 if holds else apart(ratio, low if ratio < low else high))


def largest_under_limit(
    body: Body, *, dataset: list[int], sweeps: list[str], limit_ms: float, stated: dict[str, int]
) -> Outcome:
    """The largest recorded max_batch_size whose mean TPOT is under a limit, for each engine that is here."""
    parts, holds, cells, factor = [], [], (), 1.0
    for role in engines_here(body, list(stated)):
        line = body.line(dataset, BATCH, engine=role, sweeps=sweeps)
        under = np.flatnonzero(line.y(TPOT) < limit_ms)
        found = line.x[under[-1]] if len(under) else math.nan
        last = len(under) and under[-1] == len(line.x) - 1
        holds.append(found == stated[role])
        factor = max(factor, apart(found, stated[role])) if len(under) else factor
        cells += line.cells
        told = (whole(found) + (", the largest tried" if last else "")) if len(under) else "none"
        row = line.rows.iloc[under[-1] if len(under) else 0]
        parts.append(
            f"{engine_name(line.rows['engine'].iloc[0])}: {told} (stated: {stated[role]}), TPOT {value(row, TPOT)}, "
            f"{value(row, THROUGHPUT)}"
        )
    return Outcome(all(holds), "largest max_batch_size under the limit: " + "; ".join(parts), cells, factor)


def mean_ttft_above(body: Body, *, sweeps: list[str], limit_ms: float) -> Outcome:
    """Mean TTFT of every recorded point of the studies' engines is above a limit."""
    made = body.studied(body.whole(sweeps))
    good = made[valid(made)]
    ttft = good[TTFT].to_numpy(float)
    told = (
        f"mean TTFT is {number(ttft.min() / 1000)} to {number(ttft.max() / 1000)} s in {len(ttft)} runs of "
        f"{span(good['num_requests'])} requests"
    )
    cells = tuple(c for cells in good["cells"] for c in cells)
    return Outcome(bool((ttft > limit_ms).all()), told, cells, apart(float(np.median(ttft)), limit_ms))
