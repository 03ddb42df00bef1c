"""How far machines alone move a figure: a load simulated on the fastest and on the slowest of the recorded ones.

Equal iterations take cards of one kind unequally long, and equal launches their hosts. A load close to what a machine
just sustains makes much of that little, and no simulation that does not know its machine can be nearer than that.
"""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from batchlab import host_times, simulated
from batchlab.cell import Cell
from batchlab.sim import simulate
from batchlab.sim.host import Launch, overheads_of
from batchlab.sim.models import load_model
from batchlab.sim.power import PowerLimit
from batchlab.study import Study
from batchlab.validation import AGAIN, FITTED, OUTSIDE, WORST, pairs

COLUMNS = ["fastest", "slowest", "inside", "others"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How far recorded machines of one kind lie apart."""

    card: float  # how much longer the slowest card takes for equal iterations of decodes than the fastest
    shortest: dict[str, float]  # launches, by name of `sim.host.Launch`, in us: the shortest median of an engine start
    longest: dict[str, float]


def spread(cells: pd.DataFrame) -> Spread | None:
    """The spread of the recorded engine starts (`host_times.by_cell`); None where fewer than two show machines."""
    same, starts = host_times.same_iteration(cells), host_times.by_start(cells)
    if same.empty or len(starts) < 2:
        return None
    shown = starts[list(host_times.LAUNCHES)]
    card = float((same["highest_us"] / same["lowest_us"] - 1).max())
    return Spread(card, shown.min().dropna().to_dict(), shown.max().dropna().to_dict())


def missed(study: Study, compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The tested rows of `compared` (`validation.compare`) that are off by more than WORST, and what machines make of
    them.

    Columns besides: fastest and slowest (the figure simulated with every card time shortened and lengthened by half of
    the recorded cards' spread, and with the shortest and the longest recorded launches), inside (whether the measured
    value lies between them), others (errors of other runs of the load, measured with another seed or on another day; a
    list). Empty where the recorded machines show no spread.
    """
    known = spread(cells)
    tested = ~compared["set"].isin((FITTED, AGAIN, *OUTSIDE)) & (compared["error"].abs() > WORST)
    if known is None or not tested.any():
        return compared.iloc[:0].reindex(columns=[*compared.columns, *COLUMNS])
    found, twins = compared[tested].copy(), {cell.id: other for cell, other in pairs(study)}
    fast, slow = {}, {}
    for cell in found["cell"].unique():
        call = simulated.arguments(twins[cell])
        fast[cell] = simulate(**on_machine(call, 1 - known.card / 2, known.shortest)).figures()
        slow[cell] = simulate(**on_machine(call, 1 + known.card / 2, known.longest)).figures()
    for column, figures in (("fastest", fast), ("slowest", slow)):
        found[column] = [figures[r.cell][r.figure] for r in found.itertuples()]
    low, high = found[["fastest", "slowest"]].min(axis=1), found[["fastest", "slowest"]].max(axis=1)
    found["inside"] = found["measured"].between(low, high)
    found["others"] = _others(compared, found, twins)
    return found


def on_machine(call: dict[str, Any], card: float, launches: dict[str, float]) -> dict[str, Any]:
    """Arguments of `simulate` for a machine whose card takes `card` times as long, at its power limit too, and whose
    host launches in so many microseconds.
    """
    layers, host, power = load_model(call["model"]).layers, call["host"], call["power"]
    launch = Launch(layers, **{name: launches.get(name) for name in host_times.LAUNCHES})
    limit = PowerLimit(power.tflops / card, power.tbytes / card)
    return call | {"card_factor": card, "power": limit, "host": replace(host, **overheads_of(launch, host))}


def _others(compared: pd.DataFrame, found: pd.DataFrame, twins: dict[str, Cell]) -> list[list[float]]:
    """Runs of one load are told by their twins, which leave out what the simulation cannot see; seeds may differ."""
    load = {cell: replace(other, seed=0).id for cell, other in twins.items()}
    runs = compared.assign(load=compared["cell"].map(load))
    of = {key: group for key, group in runs.groupby(["load", "transport", "figure"], sort=False)}
    rows = [(r.cell, of[load[r.cell], r.transport, r.figure]) for r in found.itertuples()]
    return [group.loc[group["cell"] != cell, "error"].tolist() for cell, group in rows]
