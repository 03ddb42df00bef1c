"""What 01-setup tells: machine, engines, datasets, sweeps, and how long the missing cells will take."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from batchlab import estimate, paths
from batchlab.cell import SIMULATED
from batchlab.plots.labels import length
from batchlab.plots.select import recorded, valid
from batchlab.plots.style import engine_name
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, text
from batchlab.study import Study

# Sweeps that measure the same thing by name: the crosses, and more repeats of some of their points.
ALL_AT_ONCE = ("throughput", "repeats")
# sweeps that notebooks ask for by name: whether all their requests arrive at once
LOADS = {"throughput": True, "latency": False}
# where a cell's iterations come from (measure), in words
SOURCES = {
    "scheduler": "a trace inside its scheduler",
    "log": "its own log, iteration by iteration",
    "metrics": "its page of iterations",
    "polled": "a gauge that was polled",
    "none": "nowhere",
}
NEVER_RUN = ("tensorrt-llm", "tgi")


def where(study: Study) -> Reading:
    """Whether this machine can measure the scenario, and how much there is to measure."""
    cells = study.cells()
    absent = study.missing()
    sentences = [
        f"{len(cells)} cells are planned. When this notebook began, {len(cells) - len(absent)} were recorded and "
        f"{len(absent)} missing."
    ]
    if absent:
        real = [c for c in absent if c.transport != SIMULATED]
        reason = (study.can_measure() or "").replace(f"{paths.ROOT}/", "") if real else ""
        if len(real) < len(absent):
            sentences.append(f"{len(absent) - len(real)} of the missing ones are simulated, on any machine.")
        if reason:
            sentences.append(f"{len(real)} cannot be measured here: {reason}.")
        else:
            sentences.append(f"That takes about {clock(study, absent)} here, engine starts included.")
    return Reading(tuple(sentences))


def clock(study: Study, cells: list[Any]) -> str:
    """The estimated time for these cells, in words."""
    return estimate.clock(estimate.fit(study.store, study.cells()).total(cells))


def engines(study: Study) -> Table:
    """A row an engine: version, measured or simulated, model, what it is started with besides the limits."""
    rows, evidence = [], {p.engine: p.cell.evidence for p in study.planned}
    for name, spec in study.scenario.engines.items():
        options = {k: v for k, v in spec.options().items() if k != "args"} | dict(spec.args)
        rows.append(
            {
                "engine": engine_name(name),
                "version": spec.version,
                "evidence": evidence.get(name, "–"),
                "model": study.scenario.model,
                "hardware": study.scenario.hardware,
                "options": ", ".join(f"{k} {v}" for k, v in options.items()) or "defaults",
            }
        )
    return table(pd.DataFrame(rows))


def datasets(study: Study) -> Table:
    """A row a dataset: its kind and lengths in tokens."""
    rows = []
    for name, dataset in study.scenario.datasets.items():
        spelled = dataset.model_dump()
        lengths = [spelled.get("input_len"), spelled.get("output_len")]
        shown = [length(v) if v is not None else "see the scenario" for v in lengths]
        rows.append(
            {"dataset": name, "kind": spelled["kind"], "input tokens": shown[0], "output tokens": shown[1]}
        )
    return table(pd.DataFrame(rows))


def sweeps(study: Study) -> Table:
    """A row a sweep: its axes, its cells, those missing, and what it asks."""
    frame, rows = study.frame(), []
    for sweep in study.scenario.sweeps:
        mine = frame[frame["sweep"] == sweep.name].drop_duplicates("cell")
        rows.append(
            {
                "sweep": sweep.name,
                "max_batch_size": values(mine["max_batch_size"]),
                "max_num_tokens": values(mine["max_num_tokens"]),
                "request rate": rates(sweep.request_rate),
                "cells": f"{len(mine)} ({missing} missing)" if (missing := int((~recorded(mine)).sum())) else len(mine),
                "question": sweep.question or "–",
            }
        )
    return table(pd.DataFrame(rows))


def rates(asked: Sequence[float]) -> str:
    """The request rates of a sweep; only the ends of a long list, and the unit once."""
    finite = pd.Series([rate for rate in asked if math.isfinite(rate)], dtype=float)
    told = [text("request_rate", math.inf)] if len(finite) < len(asked) else []
    return ", ".join(told + ([f"{values(finite)} req/s"] if len(finite) else []))


def values(column: pd.Series) -> str:
    """The distinct values, in order; of a long list only the ends and how many there are."""
    found = [f"{v:g}" for v in sorted(column.dropna().unique())]
    return ", ".join(found) if len(found) <= 3 else f"{found[0]} to {found[-1]} ({len(found)})"


def provenance(study: Study, cells: pd.DataFrame) -> Table:
    """A row a way of measuring: engine version as the engine itself says it, machine, commit, days, cells.

    More than one row for an engine means that its cells do not all come from the same machine or commit.
    """
    done = cells[recorded(cells)].drop_duplicates("cell")
    by = ["engine", "engine_version", "transport", "machine", "commit"]
    rows = []
    for key, group in done.groupby(by, dropna=False, sort=False):
        days = sorted(str(v)[:10] for v in group["measured_at"].dropna())
        rows.append(
            dict(zip(by, key, strict=True))
            | {
                "recorded": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "–",
                "cells": len(group),
            }
        )
    return table(pd.DataFrame(rows, columns=[*by, "recorded", "cells"]), empty="No cell is recorded yet.")


def checks(study: Study, cells: pd.DataFrame) -> Reading:
    """What could not be checked where an engine keeps no trace of ours, and which engine was never run by us."""
    sentences = []
    real = cells[cells["transport"] != SIMULATED].drop_duplicates("cell")
    for name, group in real[recorded(real)].groupby("engine", sort=False):
        metas = [study.store.meta(cell) for cell in group["cell"]]
        missing = dict.fromkeys(line for meta in metas for line in meta.get("unchecked", ()))
        if missing:
            sources = dict.fromkeys(SOURCES[meta.get("iterations_from", "scheduler")] for meta in metas)
            sentences.append(
                f"{engine_name(name)} ({len(group)} cells) has its running batch from {' and '.join(sources)}. "
                f"What could not be checked: {'; '.join(missing)}."
            )
    for name in real["engine"].unique():
        mine = real[(real["engine"] == name) & recorded(real)]
        if name in NEVER_RUN and not (~mine["engine_version"].str.contains("standin")).any():
            sentences.append(
                f"We have never run {engine_name(name)} itself: its adapter is written after its sources and proved "
                "against a stand-in that follows them."
            )
    if not sentences:
        fine = "Every check of a cell's validity was possible in every measured cell."
        sentences.append(fine if recorded(real).any() else "No cell is measured, so there was none to check.")
    return Reading(tuple(sentences))


def _like(study: Study, sweep: str) -> list[str]:
    """The name of the first sweep of the load that `sweep` stands for in LOADS, in a list; else none."""
    for other in study.scenario.sweeps if sweep in LOADS else ():
        at_once = all(map(math.isinf, other.request_rate))
        if other.varies_a_limit and at_once == LOADS[sweep] and not (at_once and other.arrival):
            return [other.name]
    return []


def cells_of(study: Study, *sweeps: str) -> pd.DataFrame:
    """The cells of these sweeps, measured where that is possible; sweeps that the scenario lacks add no row.

    With each sweep comes NAME-simulated, its points on simulated engines, which belong into the same figures. A cell
    that several of them ask for appears once. A scenario that knows none of these names, because its sweeps have their
    own, gives its first sweep of that load that varies a limit (`LOADS`).
    """
    both = [name for sweep in sweeps for name in (sweep, f"{sweep}-simulated")]
    known = [name for name in both if study.has(name)] or _like(study, sweeps[0])
    found = [study.ensure(name) for name in known]
    return pd.concat(found, ignore_index=True).drop_duplicates("cell") if found else study.frame().iloc[0:0]


def lowest_rate(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of the lowest request rate in the frame: figures of one sweep show one rate."""
    return cells[cells["request_rate"] == cells["request_rate"].min()]


def representatives(cells: pd.DataFrame, defaults: Any) -> list[dict[str, Any]]:
    """One valid cell with a trace a dataset: at the defaults if it is there, else at the largest batch."""
    usable = cells[valid(cells) & cells["running_batch_mean"].notna()]
    chosen = []
    for _, rows in usable.groupby("dataset", sort=False):
        limits = dict(defaults)
        at = rows[
            (rows["max_batch_size"] == limits["max_batch_size"])
            & (rows["max_num_tokens"] == limits["max_num_tokens"])
        ]
        pool = at if len(at) else rows[rows["max_batch_size"] == rows["max_batch_size"].max()]
        chosen.append(pool.sort_values("repeat", kind="stable").iloc[0].to_dict())
    return chosen
