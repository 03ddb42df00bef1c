"""How fast the host of each measured engine start was, and what a simulation is off by once it knows that.

One start after the other, and one second after the other, the same iteration takes a host unequally long. The constants
of `sim.fitted` are of the cells that were fitted on; where another cell's host was slower or faster, its error is the
host's and not the model's. Nothing here is fitted, and nothing here counts as a test: a cell's own times are read from
the very cell that is compared.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from batchlab.cell import Cell
from batchlab.study import Study

LAUNCHES = ("graph_us", "pieces_us", "eager_us")
SAME = ["dataset", "max_batch_size"]
STEADY = 100  # iterations


def _cells(study: Study, compared: pd.DataFrame) -> list[Cell]:
    """The compared cells of the engine that host times are fitted for, in process."""
    from batchlab.sim.fitted import fitted
    from batchlab.sim.measured import simulated_engine

    known, shown = fitted(study.scenario.hardware), set(compared["cell"]) if len(compared) else set()
    if known is None:
        return []
    mine = [c for c in {c.id: c for c in study.cells()}.values() if c.id in shown and c.transport == "inprocess"]
    return [c for c in mine if simulated_engine(c.engine, c.engine_version) == known["engine"]]


def by_cell(study: Study, compared: pd.DataFrame) -> pd.DataFrame:
    """A row a cell: cell, dataset, max_batch_size, model, at_once, start (of its engine: a number), cores, started (of
    the start's first cell), graph_us, pieces_us, eager_us (see `sim.host.Launch`), and decode_us: the median of its
    iterations in which max_batch_size requests decode, with no prompt around; NaN where too few show them.
    """
    from batchlab.sim.measured import shown_launch

    rows = []
    for cell in _cells(study, compared):
        recorded = study.store.load(cell.id)
        made, launch = recorded.meta["provenance"], shown_launch(recorded)
        rows.append(
            {
                "cell": cell.id,
                "dataset": compared.loc[compared["cell"] == cell.id, "dataset"].iloc[0],
                "max_batch_size": cell.max_batch_size,
                "model": cell.model,
                "at_once": cell.request_rate is None,
                "engine_start": (made["machine"]["name"], made["machine"]["cores"], made["engine"].get("start_s")),
                "cores": made["machine"]["cores"],
                "started": str(made["started"]),
                **{name: getattr(launch, name) for name in LAUNCHES},
                "decode_us": _steady_us(recorded.iterations.to_pandas(), cell.max_batch_size),
            }
        )
    columns = [*SAME, "cell", "model", "at_once", "engine_start", "cores", "started", *LAUNCHES, "decode_us"]
    frame = pd.DataFrame(rows, columns=columns).sort_values("started", ignore_index=True)
    frame["start"] = pd.factorize(frame["engine_start"])[0] + 1 if len(frame) else []
    frame["started"] = frame.groupby("start")["started"].transform("min") if len(frame) else []
    return frame.astype({name: float for name in (*LAUNCHES, "decode_us")})


def _steady_us(iterations: pd.DataFrame, batch: int) -> float:
    took = iterations["output_s"].diff()
    full = (iterations["prefill_tokens"] == 0) & (iterations["decode_tokens"] == batch)
    steady = full & full.shift(1, fill_value=False) & full.shift(2, fill_value=False)
    return float(1e6 * took[steady].median()) if steady.sum() >= STEADY else np.nan


def by_start(cells: pd.DataFrame) -> pd.DataFrame:
    """A row an engine start: start, started, cores, cells (that show a launch), and of each launch the median over its
    cells, the lowest and the highest: `<name>`, `<name>_low`, `<name>_high`.
    """
    shown = cells[cells[list(LAUNCHES)].notna().any(axis=1)]
    rows: list[dict[str, Any]] = []
    for start, group in shown.groupby("start", sort=True):
        row = {"start": start, "started": group["started"].iloc[0], "cores": group["cores"].iloc[0]}
        row["cells"] = len(group)
        for name in LAUNCHES:
            row |= {name: group[name].median(), f"{name}_low": group[name].min(), f"{name}_high": group[name].max()}
        rows.append(row)
    return pd.DataFrame(rows)


def same_iteration(cells: pd.DataFrame) -> pd.DataFrame:
    """How long one and the same decode iteration takes in different engine starts: a row a dataset and batch, all
    requests at once. Columns: dataset, max_batch_size, starts, lowest_us, highest_us (medians of a start), within (the
    widest relative spread of the cells of one start).
    """
    rows = []
    for key, group in cells[cells["at_once"] & cells["decode_us"].notna()].groupby(SAME, sort=False):
        each = group.groupby("start")["decode_us"]
        if each.ngroups < 2:
            continue
        starts = each.median()
        told = {"starts": len(starts), "lowest_us": starts.min(), "highest_us": starts.max()}
        told["within"] = float((each.max() / each.min() - 1).max())
        rows.append(dict(zip(SAME, key, strict=True)) | told)
    return pd.DataFrame(rows, columns=[*SAME, "starts", "lowest_us", "highest_us", "within"])


def with_own_host(study: Study, compared: pd.DataFrame, above: float) -> pd.DataFrame:
    """The rows of `compared` of this engine whose error is above `above`, with `own_error` beside: that of a simulation
    whose host launches and sends messages as fast as this very cell's did; NaN where the cell does not show it.
    """
    from batchlab.sim.fitted import fitted_constants
    from batchlab.sim.fitting import compare_cells
    from batchlab.sim.measured import measured_cell, shown_launch

    mine = {c.id: c for c in _cells(study, compared)}
    wide = compared[compared["cell"].isin(mine) & (compared["error"].abs() > above)].copy()
    own: dict[tuple[str, str], float] = {}
    for name in wide["cell"].unique():
        cell, recorded = mine[name], study.store.load(name)
        constants = fitted_constants("vllm-v1", cell.hardware)
        launch, made, host = shown_launch(recorded), measured_cell(recorded), constants["host"]
        if launch.pieces_us is None and launch.eager_us is None:
            continue
        known = {"launch_us": launch.graph_us or host.launch_us, "message_us": made.message_us or host.message_us}
        for kind in ("pieces_us", "eager_us"):
            if (us := getattr(launch, kind)) is not None:
                known[kind] = max((us - known["launch_us"]) / launch.layers, 0.0)
        for row in compare_cells([made], replace(host, **known), constants["power"]):
            own[name, row["figure"]] = row["error"]
    wide["own_error"] = [own.get(key, np.nan) for key in zip(wide["cell"], wide["figure"], strict=True)]
    return wide.sort_values("error", key=abs, ascending=False, kind="stable")
