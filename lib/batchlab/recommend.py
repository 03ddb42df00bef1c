"""The max_batch_size and max_num_tokens to use under a service's limits, from recorded cells.

Two candidates, of which the one with the higher throughput is recommended:

* the best setting under the limit on TPOT with all requests at once (service.py). It keeps that limit under any load.
  It is confirmed by a measured cell at exactly that setting, at a finite rate, that keeps both limits; without such a
  cell it is unconfirmed;
* the setting of the finite-rate cell with the highest throughput that keeps both limits. It keeps them up to that rate:
  beyond it the batch may grow until TPOT is above its limit. It is confirmed where that cell was measured.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from batchlab.plots.select import valid
from batchlab.service import (
    GROUP,
    SETTING,
    THROUGHPUT,
    ServiceLimits,
    groups,
    highest_kept,
    under_tpot,
    usable,
)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """For one engine, machine and dataset. Null (None) is what no recorded cell tells.

    max_batch_size, max_num_tokens: recommended. any_load: the limit on TPOT holds there whatever comes. tpot_ms,
    output_throughput_tok_s: there, with all requests at once if any_load, else at request_rate. throughput_left: over
    the best without limits. request_rate: highest recorded rate there that keeps both limits; request_rate_missed:
    lowest above it that does not. cells: those that confirm it.
    """

    engine: str
    engine_version: str
    evidence: str
    hardware: str
    transport: str | None
    engine_options: dict[str, Any]
    model: str
    dataset: str
    input_len: int | None
    output_len: int | None
    max_batch_size: int | None
    max_num_tokens: int | None
    any_load: bool
    tpot_ms: float | None
    output_throughput_tok_s: float | None
    throughput_left: float | None
    gpus_for_unlimited: float | None
    request_rate: float | None
    request_rate_missed: float | None
    confirmed: bool
    why: str
    cells: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the line that a scenario file takes."""
        defaults = None
        if self.max_batch_size is not None:
            defaults = f"defaults: {{max_batch_size: {self.max_batch_size}, max_num_tokens: {self.max_num_tokens}}}"
        return asdict(self) | {"cells": list(self.cells), "scenario_line": defaults}


def recommend(cells: pd.DataFrame, limits: ServiceLimits) -> list[Recommendation]:
    """A recommendation for each engine, machine and dataset of these cells (a study's frame, any number of sweeps)."""
    found = usable(cells)
    if found.empty:
        return []
    best = under_tpot(found, limits)
    made = []
    for key, _, finite in groups(found):
        row = {} if best.empty else _row_of(best, key)
        safe = None if not row or pd.isna(row[THROUGHPUT]) else pd.Series(row)
        tops = [top for _, rates in finite.groupby(SETTING, sort=True) if (top := highest_kept(rates, limits.kept))]
        fast = max(tops, key=lambda top: top[0][THROUGHPUT], default=None)
        if fast is not None and (safe is None or fast[0][THROUGHPUT] > safe[THROUGHPUT]):
            chosen, any_load = fast[0], False
        else:
            chosen, any_load = safe, safe is not None
        made.append(_recommendation(key, chosen, any_load, row, finite, cells, limits))
    return made


def _recommendation(
    key: dict[str, Any],
    chosen: pd.Series | None,
    any_load: bool,
    row: dict[str, Any],
    finite: pd.DataFrame,
    cells: pd.DataFrame,
    limits: ServiceLimits,
) -> Recommendation:
    rate = missed = setting = left = None
    confirming: tuple[str, ...] = ()
    if chosen is None:
        near = f"; the lowest TPOT is {row['lowest_tpot_ms']:.3g} ms" if row else ""
        why = f"no recorded setting keeps {limits.told()}{near}"
    else:
        setting = tuple(int(chosen[c]) for c in SETTING)
        here = finite[(finite["max_batch_size"] == setting[0]) & (finite["max_num_tokens"] == setting[1])]
        top = highest_kept(here, limits.kept) if len(here) else None
        if top is not None:
            rate, missed = float(top[0]["request_rate"]), top[1]
            confirming = tuple(_cells_at(cells, key, setting, rate))
        elif len(here):
            missed = float(here["request_rate"].min())
        at_once = float(chosen[THROUGHPUT]) if any_load else None
        why = _why(None if top is None else top[0], missed, len(here) > 0, key["evidence"], limits, at_once)
        left = float(chosen[THROUGHPUT]) / row["best_tok_s"] if row else None
    options = key.get("engine_options")
    return Recommendation(
        **{k: key.get(k) for k in GROUP if k not in ("engine_options", "input_len", "output_len")},
        engine_options=json.loads(options) if isinstance(options, str) else {},
        **{k: None if key.get(k) is None else int(key[k]) for k in ("input_len", "output_len")},
        max_batch_size=setting and setting[0],
        max_num_tokens=setting and setting[1],
        any_load=any_load,
        tpot_ms=None if chosen is None else float(chosen[limits.tpot]),
        output_throughput_tok_s=None if chosen is None else float(chosen[THROUGHPUT]),
        throughput_left=left,
        gpus_for_unlimited=1 / left if left else None,
        request_rate=rate,
        request_rate_missed=missed,
        confirmed=rate is not None and key["evidence"] == "measured",
        why=why,
        cells=confirming,
    )


def _why(
    top: pd.Series | None,
    missed: float | None,
    tried: bool,
    evidence: str,
    limits: ServiceLimits,
    at_once: float | None,
) -> str:
    """at_once: the setting's throughput with all requests at once, where it is recommended for any load."""
    if top is None and tried:
        return f"unconfirmed: the lowest rate recorded at this setting, {missed:g} req/s, does not keep {limits.told()}"
    if top is None:
        return "unconfirmed: no cell at this setting is recorded at a finite rate"
    share = f", {top[THROUGHPUT] / at_once:.0%} of its throughput with all requests at once" if at_once else ""
    beyond = f"; not at {missed:g} req/s" if missed is not None else "; no higher rate is recorded"
    found = f"keeps {limits.told()} at {top['request_rate']:g} req/s ({top[THROUGHPUT]:,.0f} tok/s{share}){beyond}"
    if not at_once:
        found += "; a higher load lets the batch grow past the limit on TPOT"
    return f"confirmed: a measured cell {found}" if evidence == "measured" else f"unconfirmed: only {evidence}: {found}"


def _row_of(rows: pd.DataFrame, key: dict[str, Any]) -> dict[str, Any]:
    for row in rows.to_dict("records"):
        if all(row[k] == v or (v is None and pd.isna(row[k])) for k, v in key.items()):
            return row
    return {}


def _cells_at(cells: pd.DataFrame, key: dict[str, Any], setting: tuple[int, int], rate: float) -> list[str]:
    at = valid(cells) & (cells["request_rate"].astype(float) == rate)
    for name, value in zip(SETTING, setting, strict=True):
        at &= cells[name] == value
    for name, value in key.items():
        at &= cells[name].isna() if value is None else cells[name] == value
    return list(dict.fromkeys(cells.loc[at, "cell"]))
