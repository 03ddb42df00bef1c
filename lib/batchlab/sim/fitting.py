"""The host's own time, fitted on a few measured cells and tested on the others.

Which cells are for fitting is the caller's list, and stays in the result. Nothing but the three constants of
`HostOverheads` is fitted: operator times and the policies are as they are.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from batchlab.errors import UsageError
from batchlab.sim.api import simulate
from batchlab.sim.core import HostOverheads

COMPARED = ("output_throughput_tok_s", "tpot_mean_ms", "ttft_mean_ms", "running_batch_mean")


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A measured cell beside the arguments of `simulate` that stand for it. `measured` holds keys of a cell's
    summary.
    """

    name: str
    call: dict[str, Any]
    measured: dict[str, float | None]

    @property
    def finite_rate(self) -> bool:
        """Whether requests arrive over time: only then does TTFT say something about the engine and not about the
        queue.
        """
        return len({at for at, *_ in self.call["requests"]}) > 1


@dataclass(frozen=True, slots=True)
class HostFit:
    """The constants, the cells they were fitted on, those left for testing, and every cell's errors."""

    host: HostOverheads
    fit_cells: list[str]
    test_cells: list[str]
    errors: list[dict[str, Any]]  # see `compare_cells`


def fit_host(cells: Items[MeasuredCell], fit_cells: Items[str]) -> HostFit:
    """Fit step_us, token_us and request_us (none below 0) on the named cells.

    Least squares over the logarithms of simulated over measured throughput and TPOT, and of TTFT at finite rates.
    With an empty list nothing is fitted and all three stay 0. Raises UsageError when a name is not among the cells.
    """
    by_name = {cell.name: cell for cell in cells}
    if missing := [name for name in fit_cells if name not in by_name]:
        raise UsageError(f"fit cell '{missing[0]}' is not among the {len(by_name)} cells")
    chosen = [by_name[name] for name in fit_cells]
    host = HostOverheads()
    if chosen:

        def residuals(constants: np.ndarray) -> np.ndarray:
            trial = HostOverheads(*constants)
            return np.array([r for cell in chosen for r in _log_ratios(cell, trial)])

        # a difference of 20 us moves a cell by more than its rounding to whole iterations
        found = least_squares(
            residuals, x0=(100.0, 1.0, 100.0), bounds=(0, np.inf), x_scale=(100.0, 1.0, 100.0), diff_step=0.2
        )
        host = HostOverheads(*(round(float(v), 3) for v in found.x))
    tested = [name for name in by_name if name not in set(fit_cells)]
    return HostFit(host, list(fit_cells), tested, compare_cells(cells, host, fit_cells))


def compare_cells(cells: Items[MeasuredCell], host: HostOverheads, fit_cells: Items[str] = ()) -> list[dict[str, Any]]:
    """A row a cell and figure: cell, fitted (whether the cell was fitted on), figure, measured, simulated, error
    (relative).

    TTFT is compared at finite rates only: with all requests sent at once it is the makespan in another form.
    """
    rows = []
    for cell in cells:
        figures = simulate(**cell.call, host=host).figures()
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


def _log_ratios(cell: MeasuredCell, host: HostOverheads) -> list[float]:
    figures = simulate(**cell.call, host=host).figures()
    keys = ["output_throughput_tok_s", "tpot_mean_ms", *(["ttft_mean_ms"] if cell.finite_rate else [])]
    return [float(np.log(figures[key] / cell.measured[key])) for key in keys if cell.measured.get(key) and figures[key]]
