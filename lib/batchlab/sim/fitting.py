"""The machine's own constants, fitted on a few measured cells and tested on the others.

Which cells are for fitting is the caller's list, and stays in the result. They give the host's time
(`HostOverheads`) and what the card sustains at its power limit (`PowerLimit`): thirteen numbers, of which six are
fitted and seven are read off the cells' requests and iterations. Operator times and the policies are as they are.

How long a host takes to launch an iteration changes from second to second. Where a fit cell shows it, its own launches
are replayed while the rest is fitted, so that no constant has to stand for them.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from batchlab.errors import UsageError
from batchlab.sim.api import simulate
from batchlab.sim.host import HostOverheads, Launch, LaunchTrace
from batchlab.sim.power import PowerLimit

COMPARED = ("output_throughput_tok_s", "tpot_mean_ms", "ttft_mean_ms", "running_batch_mean")


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A measured cell beside the arguments of `simulate` that stand for it. `measured` holds keys of a cell's
    summary.
    """

    name: str
    call: dict[str, Any]
    measured: dict[str, float | None]
    request_us: float | None = None  # between one request sent and the next, where all were sent at once
    message_us: float | None = None  # of a first token from the engine to the client, where requests come over time
    launch: Launch | None = None  # where its iterations show it
    running: float | None = None  # requests that ran when those first tokens were made, a mean
    launches: LaunchTrace | None = None  # of this run, as far as they are known
    gather_us: float | None = None  # from the first request to the first plan, where all were sent at once

    @property
    def finite_rate(self) -> bool:
        """Whether requests arrive over time: only then does TTFT say something about the engine and not about the
        queue.
        """
        return len({at for at, *_ in self.call["requests"]}) > 1


@dataclass(frozen=True, slots=True)
class Fit:
    """The constants, the cells they were fitted on, those left for testing, and every cell's errors."""

    host: HostOverheads
    power: PowerLimit | None
    fit_cells: list[str]
    test_cells: list[str]
    errors: list[dict[str, Any]]  # see `compare_cells`


# Where the search starts, and its scale: step, token, prompt in us; seconds for 10^12 operations and bytes at the power
# limit, and for 10^12 operations as they are reached.
_START = (50.0, 2.0, 500.0, 1 / 600, 1 / 4, 1 / 650)
_HOST = 3  # of them are the host's


def fit_constants(cells: Items[MeasuredCell], fit_cells: Items[str], *, power: bool = True) -> Fit:
    """Fit three constants of the host, and the card's three unless `power` is false, on the named cells.

    Least squares over the logarithms of simulated over measured throughput, TPOT and, at finite rates, TTFT; no
    constant falls below 0. Not fitted but read off the fit cells: request_us, the median of the time between one
    request sent and the next, and gather_us, a median likewise; message_us and stream_us, a line through first tokens'
    ways to the client over requests that run; and the launches (`Launch`), means over the cells that show them. With an
    empty list there is no host time and no power limit. Raises UsageError when a name is not among the cells.
    """
    by_name = {cell.name: cell for cell in cells}
    if missing := [name for name in fit_cells if name not in by_name]:
        raise UsageError(f"fit cell '{missing[0]}' is not among the {len(by_name)} cells")
    chosen = [by_name[name] for name in fit_cells]
    host, limit = HostOverheads(), None
    if chosen:
        known = _read(chosen)
        start = np.array(_START if power else _START[:_HOST])
        # differences of a tenth move a cell by more than its rounding to whole iterations
        found = least_squares(
            lambda values: np.array([r for cell in chosen for r in _log_ratios(cell, *_constants(values, known))]),
            x0=start,
            bounds=(0, np.inf),
            x_scale=start,
            diff_step=0.1,
            max_nfev=20,
        )
        host, limit = _constants(found.x, known)
    tested = [name for name in by_name if name not in set(fit_cells)]
    return Fit(host, limit, list(fit_cells), tested, compare_cells(cells, host, limit, fit_cells))


def _read(cells: Items[MeasuredCell]) -> dict[str, float]:
    """The constants of the host that need no search."""
    between = [cell.request_us for cell in cells if cell.request_us is not None]
    known = {"request_us": float(np.median(between)) if between else 0.0}
    gathered = [cell.gather_us for cell in cells if cell.gather_us is not None]
    known["gather_us"] = float(np.median(gathered)) if gathered else 0.0
    known |= _messages([(cell.running, cell.message_us) for cell in cells if cell.message_us is not None])
    launches = [cell.launch for cell in cells if cell.launch]
    known["launch_us"] = _mean([launch.graph_us for launch in launches if launch.graph_us is not None])
    for name in ("pieces_us", "eager_us"):
        shown = [(us, launch.layers) for launch in launches if (us := getattr(launch, name)) is not None]
        known[name] = max(_mean([(us - known["launch_us"]) / layers for us, layers in shown]), 0.0)
    return {name: round(us, 3) for name, us in known.items()}


def _messages(shown: list[tuple[float | None, float]]) -> dict[str, float]:
    """message_us and stream_us from (requests that run, us a message takes); a mean where under three tell both."""
    both = [(running, us) for running, us in shown if running is not None]
    if len(both) < 3:
        return {"message_us": _mean([us for _, us in shown]), "stream_us": 0.0}
    running, us = np.array(both).T
    (each, first), _ = nnls(np.column_stack([running, np.ones_like(running)]), us)
    return {"message_us": float(first), "stream_us": float(each)}


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _constants(values: np.ndarray, known: dict[str, float]) -> tuple[HostOverheads, PowerLimit | None]:
    step_us, token_us, prompt_us = (round(float(v), 3) for v in values[:_HOST])
    host = HostOverheads(step_us, token_us, prompt_us=prompt_us, **known)
    if len(values) == _HOST:
        return host, None
    return host, PowerLimit(*(round(1 / max(float(v), 1e-6), 4) for v in values[_HOST:]))


def compare_cells(
    cells: Items[MeasuredCell],
    host: HostOverheads,
    power: PowerLimit | None = None,
    fit_cells: Items[str] = (),
    *,
    replay: bool = False,
) -> list[dict[str, Any]]:
    """A row a cell and figure: cell, fitted (whether the cell was fitted on), figure, measured, simulated, error
    (relative). With `replay` each run's own launches stand in place of the constants.

    TTFT is compared at finite rates only: with all requests sent at once it is the makespan in another form.
    """
    rows = []
    for cell in cells:
        figures = simulate(**cell.call, host=host, power=power, launches=cell.launches if replay else None).figures()
        for key in COMPARED:
            measured, simulated = cell.measured.get(key), figures[key]
            if not measured or simulated is None or (key == "ttft_mean_ms" and not cell.finite_rate):
                continue
            rows.append(
                {
                    "cell": cell.name,
                    "fitted": cell.name in set(fit_cells),
                    "figure": key,
                    "measured": measured,
                    "simulated": simulated,
                    "error": simulated / measured - 1,
                }
            )
    return rows


def error_table(errors: list[dict[str, Any]], *, fitted: bool = False) -> list[dict[str, Any]]:
    """By figure, over the cells that were (or were not) fitted on: cells, mean_abs, max_abs, mean, worst (the
    cell's name).
    """
    table = []
    for key in COMPARED:
        rows = [r for r in errors if r["figure"] == key and r["fitted"] == fitted]
        if rows:
            worst = max(rows, key=lambda r: abs(r["error"]))
            table.append(
                {
                    "figure": key,
                    "cells": len(rows),
                    "mean_abs": float(np.mean([abs(r["error"]) for r in rows])),
                    "max_abs": abs(worst["error"]),
                    "mean": float(np.mean([r["error"] for r in rows])),
                    "worst": worst["cell"],
                }
            )
    return table


def _log_ratios(cell: MeasuredCell, host: HostOverheads, power: PowerLimit | None) -> list[float]:
    figures = simulate(**cell.call, host=host, power=power, launches=cell.launches).figures()
    keys = ("output_throughput_tok_s", "tpot_mean_ms", *(["ttft_mean_ms"] if cell.finite_rate else []))
    return [float(np.log(figures[key] / cell.measured[key])) for key in keys if cell.measured.get(key) and figures[key]]
