"""How fast the host of each measured engine start was, and what a simulation is off by once it knows that.

In one engine start and in the next, in one second and in the next, the same iteration takes a host unequally long. The
constants of `sim.fitted` are of the cells that were fitted on. Here one cell of each start tells that start's host and
card (`sim.calibration`), and the others of the start are simulated with them: measure one cell, simulate the rest.
"""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from batchlab import simulated
from batchlab.cell import Cell
from batchlab.sim.host import HostOverheads
from batchlab.store import Recorded
from batchlab.study import WITHIN, Study

LAUNCHES = ("graph_us", "pieces_us", "eager_us")
SAME = ["dataset", "max_batch_size"]
STEADY = 100  # iterations
TOLD = 0.03  # a smaller difference of times is none worth telling


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


def calibrating(cells: pd.DataFrame) -> dict[int, str]:
    """start → the one cell that tells its host: the first in time, of those at a finite rate, that shows a launch;
    where none of them does, the first of all that shows one. Starts that show none are left out.

    The rule was written down before any error with it was known, and knows no error. `cells` is what `by_cell` returns.
    """
    shown = cells[cells[list(LAUNCHES)].notna().any(axis=1)]
    first = shown.sort_values("at_once", kind="stable").groupby("start")["cell"].first()  # `cells` is in order of time
    return {int(start): cell for start, cell in first.items()}


def calibrated(study: Study, compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The tested rows of `compared` (`validation.compare`) in process and of the engine that host times are fitted for,
    without the calibrating cells, each simulated with the host and card of its engine start as well.

    Columns besides: start, calibrated_on (a cell; None where its start shows no launch, which keeps the fitted
    constants), own and own_error (simulated so, and against the measured figure), low and high (of the measured
    figure: its 95% interval by batch means; NaN where it has none: all requests at once, or no such figure), why
    (`_differs`; empty where own_error is within validation.WORST).
    """
    from batchlab.sim import simulate
    from batchlab.sim.calibration import calibrate
    from batchlab.validation import AGAIN, FITTED, WORST, twin

    chosen = calibrating(cells)
    known = {start: calibrate(study.store.load(cell)).constants() for start, cell in chosen.items()}
    starts = cells.set_index("cell")["start"]
    tested = compared["cell"].isin(set(starts.index) - set(chosen.values())) & ~compared["set"].isin((FITTED, AGAIN))
    found = compared[tested].copy()
    found["start"] = found["cell"].map(starts).astype(int)
    found["calibrated_on"] = [chosen.get(start) for start in found["start"]]
    own, why = {}, {}
    for cell in _cells(study, found):
        call = simulated.arguments(twin(cell)) | known.get(int(starts[cell.id]), {})
        rows, result = found[found["cell"] == cell.id], None
        if int(starts[cell.id]) in known:
            result = simulate(**call)
            own |= {(cell.id, name): value for name, value in result.figures().items()}
        ours = [own.get((cell.id, row.figure), row.simulated) / row.measured - 1 for row in rows.itertuples()]
        if max(map(abs, ours)) > WORST:
            result = result or simulate(**call)
            why[cell.id] = _differs(study.store.load(cell.id), result.iterations, call["host"])
    keys = zip(found["cell"], found["figure"], found["simulated"], strict=True)
    found["own"] = [own.get((cell, figure), value) for cell, figure, value in keys]
    found["own_error"] = found["own"] / found["measured"] - 1
    half = [_half(row, figure) for row, figure in zip(_measured(study, found), found["figure"], strict=True)]
    found["why"] = found["cell"].map(why).where(found["own_error"].abs() > WORST, "")
    return found.assign(low=found["measured"] - half, high=found["measured"] + half)


def _differs(recorded: Recorded, own: pa.Table, host: HostOverheads) -> str:
    """In what a cell's iterations differ from those simulated for it: its launches (quartiles, beside the simulated
    one), its decodes, and its iterations with prompts (ratios of means over measured and simulated ones).
    """
    from batchlab.sim.calibration import decodes_ratio
    from batchlab.sim.measured import cell_launches, shown_launch

    launch, each, told = shown_launch(recorded), cell_launches(recorded), []
    for name, words in (("pieces_us", "in pieces"), ("eager_us", "kernel by kernel")):
        simulated_us = host.launch_us + launch.layers * getattr(host, name)
        if getattr(launch, name) and abs(getattr(launch, name) / simulated_us - 1) > TOLD:
            low, high = np.percentile(each[name], (25, 75)) / 1e3
            told.append(
                f"half of its launches {words} took {low:.0f} to {high:.0f} ms, simulated {simulated_us / 1e3:.0f}"
            )
    ratio = decodes_ratio(recorded.iterations, own)
    if ratio and abs(ratio - 1) > TOLD:
        told.append(f"its decodes took {ratio:.2f} times as long")
    mine, theirs = (_with_prompts_us(table) for table in (recorded.iterations, own))
    if mine and theirs and abs(mine / theirs - 1) > TOLD:
        told.append(f"its iterations with prompts took {mine / theirs:.2f} times as long")
    return "; ".join(told) or f"no kind of iteration differs by more than {TOLD:.0%}"


def _with_prompts_us(iterations: pa.Table) -> float | None:
    """Mean time from the output before to that of an iteration with prompts."""
    took, mixed = np.diff(iterations["output_s"].to_numpy()), iterations["prefill_tokens"].to_numpy()[1:] > 0
    return 1e6 * float(took[mixed].mean()) if mixed.any() else None


def _measured(study: Study, rows: pd.DataFrame) -> list[dict[str, Any]]:
    frame = study.frame().drop_duplicates("cell").set_index("cell")
    return frame.loc[rows["cell"]].to_dict("records")


def _half(cell: dict[str, Any], figure: str) -> float:
    """Half of the interval within a run. All at once, a run is no stationary process and has none."""
    known = cell[WITHIN[figure]] if figure in WITHIN and np.isfinite(cell["request_rate"]) else None
    return np.nan if known is None else float(known)
