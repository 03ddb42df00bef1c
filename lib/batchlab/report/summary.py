"""What stands on top of a report: machine, engines, evidence, counts, and the best settings found."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchlab.plots.captions import TRANSPORTS, texts
from batchlab.plots.labels import number
from batchlab.plots.select import SERIES, recorded, valid
from batchlab.plots.style import engine_name
from batchlab.report.readings import SATURATED
from batchlab.report.tables import Table, table

TIED = 0.02     # of the best value: what counts as equal to it where single runs leave no interval
BEST_NOTE = ("Where settings cannot be told apart from the best (inside its 95% interval, or within "
             f"{TIED:.0%} of it where it is a single run), the smallest limits are named. Only valid points count.")


@dataclass(frozen=True, slots=True)
class Counts:
    """Cells of a scenario, each counted once even where several sweeps use it."""

    valid: int
    invalid: int
    missing: int


def counts(cells: pd.DataFrame) -> Counts:
    """Valid, invalid and missing cells."""
    unique = cells.drop_duplicates("cell")
    done, good = recorded(unique), valid(unique)
    return Counts(int(good.sum()), int((done & ~good).sum()), int((~done).sum()))


def interval(row: pd.Series, metric: str) -> str:
    """ "1,240 ± 30", both to the value's last digit; the value alone where it has no interval."""
    value, reach = row[metric], (row.get(f"{metric}_hi", np.nan) - row.get(f"{metric}_lo", np.nan)) / 2
    if not np.isfinite(reach):
        return number(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    told = f"{reach:,.{digits}f}"
    return f"{number(value)} ± {told}" if float(told.replace(",", "")) else f"{number(value)} ± <{10**-digits:g}"


def frugal_best(rows: pd.DataFrame, metric: str, *, highest: bool) -> pd.Series | None:
    """The smallest limits whose value cannot be told from the best one; None without a valid point.

    Not told apart: inside the best point's 95% interval, or within TIED of it where it has no interval.
    """
    good = rows[rows[metric].notna()]
    if good.empty:
        return None
    best = good.loc[good[metric].idxmax() if highest else good[metric].idxmin()]
    bound = best.get(f"{metric}_{'lo' if highest else 'hi'}", np.nan)
    if not np.isfinite(bound):
        bound = best[metric] * (1 - TIED if highest else 1 + TIED)
    alike = good[good[metric] >= bound] if highest else good[good[metric] <= bound]
    return alike.sort_values(["max_batch_size", "max_num_tokens"], kind="stable").iloc[0]


def goals(rows: pd.DataFrame) -> list[tuple[str, str, pd.Series | None]]:
    """(goal, metric, the point that meets it best) for one dataset and series."""
    rates = rows["request_rate"].astype(float)
    at_once = rows[np.isinf(rates)]
    found = [
        (
            "highest output throughput",
            "output_throughput_tok_s",
            frugal_best(at_once, "output_throughput_tok_s", highest=True),
        )
    ]
    full = at_once[at_once["output_throughput_tok_s"] >= SATURATED * at_once["output_throughput_tok_s"].max()]
    found.append(
        (
            f"lowest mean TPOT with at least {SATURATED:.0%} of that throughput",
            "tpot_mean_ms",
            frugal_best(full, "tpot_mean_ms", highest=False),
        )
    )
    found.append(
        (
            "lowest mean TPOT at any throughput",
            "tpot_mean_ms",
            frugal_best(at_once, "tpot_mean_ms", highest=False),
        )
    )
    for rate in sorted(rates[np.isfinite(rates)].unique()):
        found.append(
            (
                f"lowest mean TTFT at {rate:g} req/s",
                "ttft_mean_ms",
                frugal_best(rows[rates == rate], "ttft_mean_ms", highest=False),
            )
        )
    return found


UNITS = {"output_throughput_tok_s": "tok/s", "tpot_mean_ms": "ms", "ttft_mean_ms": "ms"}


def best_settings(points: pd.DataFrame) -> Table:
    """The best settings a dataset and series, from aggregated points (valid ones only)."""
    good = points[valid(points)]
    lines: list[dict[str, Any]] = []
    by = ["dataset", *[c for c in SERIES if c in good]]
    for key, rows in good.groupby(by, dropna=False, sort=False):
        named = dict(zip(by, key, strict=True))
        for goal, metric, point in goals(rows):
            if point is not None:
                lines.append(
                    {
                        "dataset": named["dataset"],
                        "engine": f"{engine_name(named['engine'])}, {named['evidence']}",
                        "goal": goal,
                        "max_batch_size": point["max_batch_size"],
                        "max_num_tokens": point["max_num_tokens"],
                        "value": f"{interval(point, metric)} {UNITS[metric]}",
                    }
                )
    columns = ["dataset", "engine", "goal", "max_batch_size", "max_num_tokens", "value"]
    frame = pd.DataFrame(lines, columns=columns)
    if frame["engine"].nunique() <= 1:
        columns.remove("engine")
    headings = {c: {"value": "value, 95% interval"}.get(c, c) for c in columns}
    return table(frame, headings, empty="No valid cell is recorded, so there is no best setting yet.")


def facts(scenario: Any, cells: pd.DataFrame) -> list[tuple[str, str]]:
    """(what, value) lines: machine, model, engines, transport, evidence, cells, when, commit."""
    done = cells[recorded(cells)]
    versions = {name: texts(rows, "engine_version") for name, rows in done.groupby("engine", sort=False)}
    simulated = set(done.loc[done["evidence"] == "simulated", "engine"])
    engines = ", ".join(
        f"{engine_name(n)} {v}".strip() + " (simulated)" * (n in simulated) for n, v in versions.items()
    )
    asked = ", ".join(
        f"{engine_name(n)} {spec.version} (not recorded)"
        for n, spec in scenario.engines.items()
        if n not in versions
    )
    n = counts(cells)
    days = sorted(str(v)[:10] for v in done["measured_at"].dropna())
    lines = [
        ("Machine", texts(done, "machine") or f"{scenario.hardware} (not measured)"),
        ("Model", scenario.model),
        ("Engines", ", ".join(filter(None, [engines, asked]))),
        ("Transport", ", ".join(TRANSPORTS.get(t, t) for t in done["transport"].dropna().unique())),
        ("Evidence", texts(done, "evidence") or "none yet"),
        ("Cells", f"{n.valid} valid, {n.invalid} invalid, {n.missing} missing"),
        ("Recorded", " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""),
        ("Commit", texts(done, "commit")),
    ]
    return [(k, v) for k, v in lines if v]
