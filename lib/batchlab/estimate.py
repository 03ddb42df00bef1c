"""How long a cell will take, for people who wait and for planning an expensive machine.

A cell costs its engine steps and its tokens: seconds = a * steps + b * tokens + c. a, b and c are fitted by
non-negative least squares to the cells already recorded for this engine, model and hardware; before there are
any, stated guesses stand in.
"""

import os
from dataclasses import dataclass, field

import numpy as np

from batchlab.cell import SIMULATED, Cell, mean_lengths
from batchlab.store import Store

# seconds (a step, a token, a cell); CPU: tiny-llama on 2 cores of an EPYC; GPU: an 8B model in bf16 on one
# H100-class card
GUESSES = {"cpu": (0.004, 0.00008, 1.5), "gpu": (0.008, 0.00002, 1.5)}
SIMULATED_S = 0.25  # a core's time for a simulated cell of 1,024 requests
START_S = {"cpu": 60.0, "gpu": 100.0}  # an engine's start, before one has been seen
# other engines' on a GPU: guesses; SGLang's took 163 s the one time that it was seen, on an H200
STARTS_S = {"sglang": 125.0, "tensorrt-llm": 180.0, "tgi": 150.0, "attach": 0.0}


@dataclass(frozen=True, slots=True)
class Estimator:
    """Seconds for a cell, and for an engine's start. `fitted_on` counts the recorded cells behind it, 0 for a guess."""

    coefficients: tuple[float, float, float]
    start_s: float
    fitted_on: int
    starts_s: dict[str, float] = field(default_factory=dict)  # of engines that differ from `start_s`

    def start_of(self, engine: str) -> float:
        """Seconds that a start of this engine takes."""
        return self.starts_s.get(engine, self.start_s)

    def total(self, cells: list[Cell]) -> float:
        """Seconds for all of these cells, engine starts included."""
        starts = {c.launch_key() for c in cells if c.transport != SIMULATED}
        return sum(self.seconds(c) for c in cells) + sum(self.start_of(engine) for engine, *_ in starts)

    def seconds(self, cell: Cell) -> float:
        if cell.transport == SIMULATED:
            return SIMULATED_S / (os.cpu_count() or 1)
        steps, tokens = work(cell)
        a, b, c = self.coefficients
        busy = a * steps + b * tokens + c
        if cell.request_rate is None:
            return busy
        arriving = cell.num_requests / cell.request_rate
        return max(busy, arriving + a * mean_lengths(cell.dataset)[1] + c)


def work(cell: Cell) -> tuple[float, float]:
    """Engine steps and tokens of a cell, from its lengths and limits alone."""
    input_len, output_len = mean_lengths(cell.dataset)
    waves = max(1.0, cell.num_requests / cell.max_batch_size)
    tokens = cell.num_requests * (input_len + output_len)
    return max(waves * output_len, tokens / cell.max_num_tokens), tokens


def fit(store: Store, cells: list[Cell]) -> Estimator:
    """An estimator from what the store already holds of these cells (all at once only: finite rates wait for
    arrivals)."""
    kind = "cpu" if cells and cells[0].hardware == "cpu" else "gpu"
    rows, seconds, starts = [], [], {}
    recorded = store.ids()
    for cell in cells:
        if cell.id not in recorded:
            continue
        try:
            meta = store.meta(cell.id)
            starts.setdefault(cell.engine, []).append(meta["provenance"]["engine"]["start_s"])
            if cell.request_rate is None:
                seconds.append(meta["duration_s"])
                rows.append([*work(cell), 1.0])
        except (KeyError, TypeError):
            continue
    seen = {engine: float(np.median(values)) for engine, values in starts.items()}
    start_s, starts_s = seen.pop("vllm", START_S[kind]), STARTS_S | seen
    if len(rows) < 4:
        return Estimator(GUESSES[kind], start_s, 0, starts_s)
    from scipy.optimize import nnls  # half a second to import, and most notebooks never fit

    coefficients, _ = nnls(np.array(rows), np.array(seconds))
    return Estimator(tuple(float(x) for x in coefficients), start_s, len(rows), starts_s)


def clock(seconds: float) -> str:
    """Seconds as a person says them: 40 s, 3 min, 1 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
