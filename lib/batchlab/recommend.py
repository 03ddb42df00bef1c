"""The max_batch_size and max_num_tokens to use under a service's limits, from recorded cells.

Two candidates, of which the one with the higher throughput is recommended:

* the best setting under the limit on TPOT with all requests at once (service.py). It should keep that limit under any
  load. It is confirmed by a measured cell at exactly that setting, at a finite rate, that keeps both limits, up to the
  highest such rate below the first that misses one; refuted where a measured one has a TPOT above its limit after all,
  or where the lowest measured rate keeps not both; and unconfirmed without such a cell;
* the setting of the finite-rate cell with the highest throughput that keeps both limits. It keeps them up to that rate:
  beyond it the batch may grow until TPOT is above its limit. It is confirmed where that cell was measured.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

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

Status = Literal["confirmed", "refuted", "unconfirmed"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """For one engine, machine and dataset. Null (None) is what no recorded cell tells.

    max_batch_size, max_num_tokens: recommended. any_load: chosen since the limit on TPOT holds there with all requests
    at once. tpot_ms, output_throughput_tok_s: there, with all requests at once if any_load, else at request_rate.
    throughput_left: over the best without limits. request_rate: highest recorded rate there up to which both limits
    are kept; request_rate_missed: lowest above it that does not. status: by measured cells; why: in words and numbers.
    cells: those at request_rate or, where it is refuted, at the rates that miss a limit.
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
    status: Status
    why: str
    cells: tuple[str, ...]

    @property
    def confirmed(self) -> bool:
        return self.status == "confirmed"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the line that a scenario file takes."""
        defaults = None
        if self.max_batch_size is not None:
            defaults = f"defaults: {{max_batch_size: {self.max_batch_size}, max_num_tokens: {self.max_num_tokens}}}"
        more = {"confirmed": self.confirmed, "cells": list(self.cells), "scenario_line": defaults}
        return asdict(self) | more


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
    status: Status = "unconfirmed"
    behind: tuple[str, ...] = ()
    if chosen is None:
        near = f"; the lowest TPOT is {row['lowest_tpot_ms']:.3g} ms" if row else ""
        why = f"no recorded setting keeps {limits.told()}{near}"
    else:
        setting = tuple(int(chosen[c]) for c in SETTING)
        here = finite[(finite["max_batch_size"] == setting[0]) & (finite["max_num_tokens"] == setting[1])]
        here = here.sort_values("request_rate", kind="stable")
        top = highest_kept(here, limits.kept) if len(here) else None
        if top is not None:
            rate, missed = float(top[0]["request_rate"]), top[1]
        elif len(here):
            missed = float(here["request_rate"].min())
        against = here[~limits.tpot_kept(here)] if any_load else here.iloc[0:0]
        if top is None and against.empty:
            against = here.iloc[:1]
        if key["evidence"] == "measured" and len(here):
            status = "confirmed" if against.empty else "refuted"
        behind_rates = [rate] if against.empty else [float(r) for r in against["request_rate"]]
        behind = tuple(_cells_at(cells, key, setting, behind_rates)) if len(here) else ()
        at_once = float(chosen[THROUGHPUT]) if any_load else None
        why = _why(here, None if top is None else top[0], missed, against, key["evidence"], limits, at_once)
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
        status=status,
        why=why,
        cells=behind,
    )


def _why(
    here: pd.DataFrame,
    top: pd.Series | None,
    missed: float | None,
    against: pd.DataFrame,
    evidence: str,
    limits: ServiceLimits,
    at_once: float | None,
) -> str:
    """The status and what it rests on.

    here: the points at this setting and a finite rate; top: the one of the highest rate up to which all are kept;
    against: those that refute it. at_once: the setting's throughput with all requests at once, where it is recommended
    for any load.
    """
    if here.empty:
        return "unconfirmed: no cell at this setting is recorded at a finite rate"
    status = "unconfirmed: only simulated" if evidence != "measured" else "confirmed" if against.empty else "refuted"
    if top is None:
        kept = f"none of the rates recorded at this setting keeps {limits.told()}"
    else:
        share = f", {top[THROUGHPUT] / at_once:.0%} of its throughput with all requests at once" if at_once else ""
        kept = f"keeps {limits.told()} at {top['request_rate']:g} req/s ({_figures(top, limits)}{share})"
    if len(against):
        first = against.iloc[0]
        found = f"at {first['request_rate']:g} req/s a cell has {_figures(first, limits)}; "
        if top is None:
            return f"{status}: {found}{kept}"
        return f"{status}: {found}the highest rate up to which it is kept: {kept}"
    over = here[here["request_rate"].astype(float) == missed] if missed is not None else here.iloc[0:0]
    beyond = f"; not at {missed:g} req/s ({_figures(over.iloc[0], limits)})" if len(over) else ""
    beyond = beyond or "; no higher rate is recorded"
    cap = "" if at_once else "; a higher load lets the batch grow past the limit on TPOT"
    return f"{status}: a {evidence} cell {kept}{beyond}{cap}"


def _figures(row: pd.Series, limits: ServiceLimits) -> str:
    """ "552 tok/s, mean TPOT 17.1 ms, mean TTFT 92 ms", of the limits that are given."""
    parts = [f"{row[THROUGHPUT]:,.0f} tok/s"]
    if limits.tpot_ms is not None:
        parts.append(f"{limits.statistic} TPOT {row[limits.tpot]:.1f} ms")
    if limits.ttft_ms is not None:
        parts.append(f"{limits.statistic} TTFT {row[limits.ttft]:,.0f} ms")
    return ", ".join(parts)


def _row_of(rows: pd.DataFrame, key: dict[str, Any]) -> dict[str, Any]:
    for row in rows.to_dict("records"):
        if all(row[k] == v or (v is None and pd.isna(row[k])) for k, v in key.items()):
            return row
    return {}


def _cells_at(cells: pd.DataFrame, key: dict[str, Any], setting: tuple[int, int], rates: list[float]) -> list[str]:
    at = valid(cells) & cells["request_rate"].astype(float).isin(rates)
    for name, value in zip(SETTING, setting, strict=True):
        at &= cells[name] == value
    for name, value in key.items():
        at &= cells[name].isna() if value is None else cells[name] == value
    return list(dict.fromkeys(cells.loc[at, "cell"]))
