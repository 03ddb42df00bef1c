"""From a scenario to its cells, in the order in which they are measured."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from batchlab.cell import Cell
from batchlab.errors import UsageError
from batchlab.scenario import Dataset, Limits, Scenario, Sweep


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell with the names it has in its scenario. One cell may be planned by several sweeps."""

    cell: Cell
    sweep: str
    dataset: str
    repeat: int
    engine: str


def limits(sweep: Sweep, defaults: Limits) -> list[tuple[int, int]]:
    """The (max_batch_size, max_num_tokens) points of a sweep: a full grid, or a cross through the defaults."""
    batch = sweep.max_batch_size or [defaults.max_batch_size]
    tokens = sweep.max_num_tokens or [defaults.max_num_tokens]
    if sweep.combine == "grid":
        return list(product(batch, tokens))
    fixed_tokens = defaults.max_num_tokens if sweep.max_num_tokens is None or len(tokens) > 1 else tokens[0]
    fixed_batch = defaults.max_batch_size if sweep.max_batch_size is None or len(batch) > 1 else batch[0]
    points = [(b, fixed_tokens) for b in batch] if len(batch) > 1 or len(tokens) == 1 else []
    points += [(fixed_batch, t) for t in tokens] if len(tokens) > 1 else []
    return list(dict.fromkeys(points))


def expand(scenario: Scenario) -> list[Planned]:
    """Every cell of every sweep; the same cell appears once for each sweep that wants it.

    Order: repeats outermost, so that the repeats of a point are spread over the whole run and a drift of the machine
    does not pass for an effect of a limit; sweeps as the file lists them, the most telling first.
    """
    planned = []
    for repeat in range(max(s.repeats or scenario.repeats for s in scenario.sweeps)):
        for sweep in scenario.sweeps:
            if repeat < (sweep.repeats or scenario.repeats):
                planned += _cells(scenario, sweep, repeat)
    return planned


def _cells(scenario: Scenario, sweep: Sweep, repeat: int) -> Iterable[Planned]:
    rule = sweep.num_requests or scenario.num_requests
    for engine, dataset, rate, (batch, tokens) in product(
        scenario.engines_of(sweep),
        sweep.datasets or scenario.datasets,
        sweep.request_rate,
        limits(sweep, scenario.defaults),
    ):
        if tokens < batch:
            raise UsageError(
                f"{scenario.path}: sweeps.{sweep.name}: max_num_tokens {tokens} is below max_batch_size {batch}, "
                "which engines refuse; raise the one or lower the other"
            )
        if sweep.token_rule and (engine != "vllm" or sweep.transport == "simulated"):
            raise UsageError(
                f"{scenario.path}: sweeps.{sweep.name}.token_rule: only a measured vllm can change its token budget "
                "while it runs; remove the key"
            )
        spec = scenario.engines[engine]
        cell = Cell(
            engine=spec.engine or engine,
            engine_version=spec.version,
            model=sweep.model or scenario.model,
            hardware=scenario.hardware,
            transport=sweep.transport,
            max_batch_size=batch,
            max_num_tokens=tokens,
            dataset=spelled_out(scenario.datasets[dataset]),
            num_requests=rule.of(batch, rate),
            request_rate=None if math.isinf(rate) else rate,
            arrival=sweep.arrival.model_dump(exclude_none=True) if sweep.arrival else None,
            engine_options=spec.options(sweep.engine_options),
            seed=scenario.seed + repeat,
            token_rule=sweep.token_rule.model_dump() if sweep.token_rule else None,
        )
        yield Planned(cell, sweep.name, dataset, repeat, engine)


def spelled_out(dataset: Dataset) -> dict[str, Any]:
    """The dataset without keys at their default, so that a key added to the schema later renames no recorded cell."""
    return {"kind": dataset.kind, **dataset.model_dump(exclude_defaults=True)}


def unique(planned: Iterable[Planned]) -> list[Cell]:
    """The cells without repetition, in order."""
    return list({p.cell.id: p.cell for p in planned}.values())


def largest_limits(cells: Iterable[Cell]) -> Limits:
    """The limits that an engine for these cells is started with: they can be lowered while it is warm, never raised."""
    cells = list(cells)
    return Limits(
        max_batch_size=max(c.max_batch_size for c in cells), max_num_tokens=max(most_tokens(c) for c in cells)
    )


def most_tokens(cell: Cell) -> int:
    """The largest token budget that may be in force during a cell."""
    return max(cell.max_num_tokens, cell.token_rule["most"]) if cell.token_rule else cell.max_num_tokens
