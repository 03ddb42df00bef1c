"""How fast the host and the card of each measured engine start were, and what a simulation that knows it is off by.

In one engine start and in the next, in one second and in the next, the same iteration takes a host unequally long, and
cards of one kind differ. The constants of `sim.fitted` are of the cells that were fitted on. Here each cell is
simulated with what is known of its own machine as well: how long its host took to launch iterations, which is an input
of the simulation as the arrival of requests is, and how much longer than simulated the decodes of the other cells of
its engine start took, never its own.
"""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from batchlab import simulated
from batchlab.cell import Cell
from batchlab.sim.host import LaunchTrace
from batchlab.store import Recorded
from batchlab.study import WITHIN, Study

LAUNCHES = ("graph_us", "pieces_us", "eager_us")
SAME = ["dataset", "max_batch_size"]
STEADY = 100  # iterations
TOLD = 0.03  # a smaller difference of times is none worth telling
FEW = 0.02  # of a cell's iterations: fewer of a kind cannot move it by much
RECORDED, OWN, OTHERS, NOT_SHOWN = "recorded", "shown by the cell", "shown by its engine start", "not shown"


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
    from batchlab.sim.measured import engine_start, shown_launch

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
                "engine_start": engine_start(recorded),
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


def known(study: Study, compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The rows of `compared` (`validation.compare`) of cells in process and of the engine that host times are fitted
    for, that nothing was fitted on and whose launches are known (`shown`), each simulated with its machine as well.

    Columns besides: start, launches (`shown`), card (times as long as simulated the decodes of the other cells of the
    start took; 1 where none shows it), own and own_error (simulated so, and against the measured figure), low and high
    (of the measured figure: its 95% interval by batch means; NaN where it has none: all requests at once, or no such
    figure), why (`_differs`; empty where own_error is within validation.WORST).
    """
    from batchlab.sim.grid import over_cores
    from batchlab.sim.measured import known_launches
    from batchlab.validation import FITTED, WORST, twin

    mine = {cell.id: cell for cell in _cells(study, compared)}
    recorded = {cell: study.store.load(cell) for cell in mine}
    traces = known_launches(recorded.values())
    twins = {cell: twin(mine[cell]) for cell in mine}
    ratio = {cell: _decodes_ratio(recorded[cell], twins[cell]) for cell in mine}
    starts = cells.set_index("cell")["start"]
    found = compared[compared["cell"].isin(set(mine)) & (compared["set"] != FITTED)].copy()
    found["start"] = found["cell"].map(starts).astype(int)
    how = {cell: shown(recorded[cell], traces[cell]) for cell in found["cell"].unique()}
    found["launches"] = found["cell"].map(how)
    found = found[found["launches"] != NOT_SHOWN].copy()
    card = {cell: _others_median(ratio, starts, cell) for cell in found["cell"].unique()}
    found["card"] = found["cell"].map(card)
    calls = {
        cell: simulated.arguments(twins[cell]) | {"launches": traces[cell], "card_factor": card[cell]} for cell in card
    }
    figures = dict(zip(calls, over_cores(_figures, list(calls.values())), strict=True))
    found["own"] = [figures[row.cell][row.figure] for row in found.itertuples()]
    found["own_error"] = (found["own"] / found["measured"] - 1).astype(float)
    half = [_half(row, figure) for row, figure in zip(_measured(study, found), found["figure"], strict=True)]
    wide = found["own_error"].abs() > WORST
    why = {cell: _differs(recorded[cell], calls[cell]) for cell in found.loc[wide, "cell"].unique()}
    found["why"] = found["cell"].map(why).where(wide, "")
    return found.assign(low=found["measured"] - half, high=found["measured"] + half)


def shown(recorded: Recorded, trace: LaunchTrace) -> str:
    """How the launches of a cell are known: RECORDED, OWN (its iterations show them), OTHERS (other cells of its start
    show one of the two kinds), or NOT_SHOWN, where more than FEW of its iterations are of a kind of which nothing is.
    """
    from batchlab.sim.measured import RECORDED_TOKENS

    iterations = recorded.iterations
    if iterations["launched_s"].null_count == 0:
        return RECORDED
    prompts, decodes = (iterations[name].to_numpy() for name in ("prefill_tokens", "decode_tokens"))
    large = prompts + decodes > RECORDED_TOKENS
    kinds = (((prompts > 0) & ~large, trace.pieces), ((prompts > 0) & large, trace.eager))
    needed = [rows for of, rows in kinds if of.mean() > FEW]
    if any(len(rows) == 0 for rows in needed):
        return NOT_SHOWN
    return OTHERS if any(len(rows) == 1 for rows in needed) else OWN


def _decodes_ratio(recorded: Recorded, other: Cell) -> float | None:
    from batchlab.sim.calibration import decodes_ratio

    return decodes_ratio(recorded.iterations, simulated.store(other.hardware).load(other.id).iterations)


def _others_median(ratio: dict[str, float | None], starts: pd.Series, cell: str) -> float:
    others = [r for name, r in ratio.items() if r is not None and name != cell and starts[name] == starts[cell]]
    return float(np.median(others)) if others else 1.0


def _figures(call: dict[str, Any]) -> dict[str, float | None]:
    from batchlab.sim import simulate

    return simulate(**call).figures()


def _differs(recorded: Recorded, call: dict[str, Any]) -> str:
    """In what a cell's iterations differ from those simulated for it: its decodes, and its iterations with prompts
    (ratios over measured and simulated ones).
    """
    from batchlab.sim import simulate
    from batchlab.sim.calibration import decodes_ratio

    own, told = simulate(**call).iterations, []
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
