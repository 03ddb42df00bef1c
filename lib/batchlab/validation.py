"""Simulated against measured: each measured cell beside its twin, the same point on the policy that stands for its
engine, and TensorRT-LLM against NVIDIA's published throughput.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from batchlab import simulated
from batchlab.cell import SIMULATED, Cell
from batchlab.errors import UsageError
from batchlab.study import Study, by_outcome

# figure → the error that the project set itself as a goal, on average over cells that nothing was fitted on
GOALS = {"output_throughput_tok_s": 0.03, "tpot_mean_ms": 0.04, "running_batch_mean": 0.01, "ttft_mean_ms": 0.10}
WORST = 0.08  # goal for any cell
FITTED = "fitted on"
AGAIN = "missed, once more"
BLIND = "blind"  # measured after the constants had been fixed, in sweeps whose names begin so
# what the constants are not of: a server and its client, and the host of an engine that nothing was fitted on
OUTSIDE = ("over HTTP", "another engine")
TEST_SETS = (BLIND, "same shapes", "other shapes", "another model", "KV memory held", AGAIN, *OUTSIDE)
OPTIONS = ("max_model_len", "kv_cache_gib", "gpu_memory_utilization", "dtype", "quantization", "tensor_parallel_size")
COLUMNS = (
    "cell", "twin", "set", "engine", "dataset", "transport", "max_batch_size", "max_num_tokens", "request_rate",
    "measured_preemptions", "simulated_preemptions", "figure", "measured", "simulated", "error",
)  # fmt: skip


def twin(cell: Cell) -> Cell | None:
    """The simulated cell that stands for a measured one; None where no policy, card or rule for it can be simulated."""
    from batchlab.sim.measured import simulated_engine

    try:
        policy = simulated_engine(cell.engine, cell.engine_version)
        options = {key: cell.engine_options[key] for key in OPTIONS if key in cell.engine_options}
        made = replace(cell, engine=policy, transport=SIMULATED, engine_options=options)
        simulated.check([made])
    except UsageError:
        return None
    return made if cell.token_rule is None else None


def pairs(study: Study) -> list[tuple[Cell, Cell]]:
    """The measured, valid cells that can be simulated, each with its twin."""
    frame = study.frame().drop_duplicates("cell").set_index("cell")
    known: dict[tuple[str, ...], bool] = {}
    found = []
    for cell in study.cells():
        if cell.transport == SIMULATED or not frame.at[cell.id, "valid"]:
            continue
        other = twin(cell)
        if known.setdefault((*cell.launch_key(), str(cell.token_rule is None)), other is not None):
            found.append((cell, other))
    return found


def compare(study: Study) -> pd.DataFrame:
    """A row a measured, valid cell and figure of GOALS: COLUMNS. Twins that are missing are simulated.

    `error` is simulated / measured - 1. TTFT is there at finite rates only: with all requests sent at once it is the
    makespan in another form. Empty where the study holds no measured cell that can be simulated.
    """
    frame = study.frame().drop_duplicates("cell").set_index("cell")
    beside = pairs(study)
    study.simulate([t for _, t in beside])
    rows = []
    where_from = sets([c for c, _ in beside], measured_again(study), measured_blind(study))
    for (cell, other), where in zip(beside, where_from, strict=True):
        mine, theirs = frame.loc[cell.id], simulated.store(other.hardware).meta(other.id)["summary"]
        common = {
            "cell": cell.id,
            "twin": other.id,
            "set": where,
            "engine": cell.engine,
            **{k: mine[k] for k in ("dataset", "transport", "max_batch_size", "max_num_tokens", "request_rate")},
            "measured_preemptions": mine["preemptions"],
            "simulated_preemptions": theirs["preemptions"],
        }
        for figure in GOALS:
            if figure == "ttft_mean_ms" and cell.request_rate is None:
                continue
            if mine[figure] and theirs[figure]:
                error = theirs[figure] / mine[figure] - 1
                rows.append(
                    common | {"figure": figure, "measured": mine[figure], "simulated": theirs[figure], "error": error}
                )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def measured_again(study: Study) -> set[str]:
    """The ids of cells that were measured because another run of their point had been missed."""
    return {p.cell.id for p in study.planned if by_outcome(p.sweep, p.cell.seed)}


def measured_blind(study: Study) -> set[str]:
    """The ids of cells that were measured after the constants had been fixed, for nothing but to test them."""
    return {p.cell.id for p in study.planned if p.sweep.startswith(BLIND)}


def sets(cells: list[Cell], again: Collection[str] = (), blind: Collection[str] = ()) -> list[str]:
    """For each measured cell: whether the constants were fitted on it, else in what it differs from those that were.

    `again` are the ids of cells that were measured because another run of their point had been missed, `blind` of those
    that were measured after the constants had been fixed.
    """
    from batchlab.sim.fitted import fitted
    from batchlab.sim.measured import simulated_engine

    known = {hardware: fitted(hardware) for hardware in {c.hardware for c in cells}}
    fit = {hardware: set((entry or {"fit_cells": []})["fit_cells"]) for hardware, entry in known.items()}
    mine = [c for c in cells if c.id in fit[c.hardware]]
    shapes, models = [c.dataset for c in mine], {c.model for c in mine}

    def of(cell: Cell) -> str:
        if cell.id in fit[cell.hardware]:
            return FITTED
        if cell.id in again:
            return AGAIN
        if cell.id in blind:
            return BLIND
        entry = known[cell.hardware]
        if entry and entry["engine"] != simulated_engine(cell.engine, cell.engine_version):
            return "another engine"
        if cell.transport == "http":
            return "over HTTP"
        if mine and cell.model not in models:
            return "another model"
        if "kv_cache_gib" in cell.engine_options:
            return "KV memory held"
        return "other shapes" if mine and cell.dataset not in shapes else "same shapes"

    return [of(c) for c in cells]


def errors(compared: pd.DataFrame, by: Iterable[str] = ("figure", "set")) -> pd.DataFrame:
    """A row a group, FITTED first: cells, mean_abs, max_abs, mean (signed), worst (the row's index)."""
    rows = []
    for key, group in compared.groupby(list(by), sort=False):
        size = group["error"].abs()
        rows.append(
            dict(zip(by, key, strict=True))
            | {
                "cells": len(group),
                "mean_abs": size.mean(),
                "max_abs": size.max(),
                "mean": group["error"].mean(),
                "worst": size.idxmax(),
            }
        )
    table = pd.DataFrame(rows, columns=[*by, "cells", "mean_abs", "max_abs", "mean", "worst"])
    order = {name: n for n, name in enumerate((*GOALS, FITTED, *TEST_SETS))}
    return table.sort_values(
        list(by), key=lambda s: s.map(lambda v: order.get(v, 99)), kind="stable", ignore_index=True
    )


def same_load(study: Study, compared: pd.DataFrame) -> pd.DataFrame:
    """How much the measured TTFT of one load differs from itself: a row a load.

    Cells of one dataset, rate and transport whose limits never bound (fewer requests ran, and iterations held fewer
    tokens, than allowed) sent the engine the same requests at the same times and gave it the same choices. Columns:
    dataset, request_rate, transport, cells, measured, lowest, highest, simulated (ms), error (of the mean). Loads with
    fewer than three such cells are left out.
    """
    ttft = compared[(compared["figure"] == "ttft_mean_ms")]
    free = []
    for row in ttft.to_dict("records"):
        seen = study.iterations(row["cell"])
        tokens = (seen["prefill_tokens"] + seen["decode_tokens"]).max()
        if seen["running"].max() < row["max_batch_size"] and tokens < row["max_num_tokens"]:
            free.append(row)
    rows = []
    by = ["dataset", "request_rate", "transport"]
    for key, group in pd.DataFrame(free, columns=ttft.columns).groupby(by, sort=False):
        if len(group) >= 3:
            measured, own = group["measured"].mean(), group["simulated"].mean()
            told = {"cells": len(group), "measured": measured, "lowest": group["measured"].min()}
            told |= {"highest": group["measured"].max(), "simulated": own, "error": own / measured - 1}
            rows.append(dict(zip(by, key, strict=True)) | told)
    return pd.DataFrame(rows, columns=[*by, "cells", "measured", "lowest", "highest", "simulated", "error"])


def published() -> pd.DataFrame:
    """sim.published.compare_published as a frame; kept beside the simulated cells, since it takes ten seconds."""
    from batchlab.sim.grid import over_cores
    from batchlab.sim.published import published_throughput

    file = simulated.store("published").folder.with_suffix(".json")
    if not file.is_file():
        rows = list(over_cores(_published_row, published_throughput()))
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.replace(file)
    return pd.DataFrame(json.loads(file.read_text()))


def _published_row(row: dict[str, Any]) -> dict[str, Any]:
    from batchlab.sim.published import compare_published

    (compared,) = compare_published([row])
    return {key: value.item() if hasattr(value, "item") else value for key, value in compared.items()}


def simulates(study: Study, engine: str | None = None) -> bool:
    """Whether the scenario plans cells of a simulated engine (of any, or of this policy)."""
    return any(c.transport == SIMULATED and engine in (None, c.engine) for c in study.cells())


def provenance(study: Study, compared: pd.DataFrame) -> dict[str, Any]:
    """What the simulations of `compared` stand on: the provenance of the first one's engine."""
    hardware = study.scenario.hardware
    return simulated.store(hardware).meta(compared["twin"].iloc[0])["provenance"]["engine"]
