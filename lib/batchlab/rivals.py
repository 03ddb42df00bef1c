"""Two measured engines with the same client over the same transport, at the same points, and their ratios.

Engines are comparable only where nothing else differs: vLLM in process beside SGLang behind its HTTP server would count
the server as the engine's. So the points come from one sweep, which has one transport.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from batchlab.cell import SIMULATED
from batchlab.errors import UsageError
from batchlab.metrics import behind_s
from batchlab.noise import LATE
from batchlab.plots.gather import key, points
from batchlab.plots.select import along, valid
from batchlab.scenario import Scenario, Sweep
from batchlab.study import POINT, Study

PLACE = ["dataset", "max_batch_size", "max_num_tokens", "request_rate"]
RATIOS = ["dataset", "engine", "base", "axis", "at", "other", "ratio", "ratio_lo", "ratio_hi", "apart"]


def sweep_of(scenario: Scenario, *, at_once: bool) -> Sweep | None:
    """The first sweep that measures two engines or more and varies a limit, all requests at once or at finite rates."""
    for sweep in scenario.sweeps:
        rates = any(math.isinf(rate) == at_once for rate in sweep.request_rate)
        if sweep.transport != SIMULATED and rates and sweep.varies_a_limit and len(scenario.engines_of(sweep)) > 1:
            return sweep
    return None


def compared(scenario: Scenario, cells: pd.DataFrame, *, at_once: bool) -> pd.DataFrame:
    """The points (`plots.points`) of `sweep_of`, at one request rate, and the simulated ones that stand beside them.

    `cells` are all cells of the scenario: single runs with all requests at once take their interval from how much its
    repeated points vary (`study.aggregate`). Empty where no sweep measures two engines.
    """
    sweep, nothing = sweep_of(scenario, at_once=at_once), points(cells.iloc[0:0])
    if sweep is None:
        return nothing
    real = cells[(cells["sweep"] == sweep.name) & (cells["request_rate"].map(math.isinf) == at_once)]
    real = real[real["request_rate"] == real["request_rate"].min()]
    places = {key(row, PLACE) for row in real[PLACE].to_dict("records")}
    told = real[["engine", "engine_version"]].drop_duplicates().itertuples(index=False)
    policies = {policy for engine, version in told if (policy := _policy(engine, version))}
    simulated = cells[(cells["evidence"] == "simulated") & cells["model"].isin(real["model"])]
    beside = [
        (scenario.engines[row["engine"]].engine or row["engine"]) in policies and key(row, PLACE) in places
        for row in simulated[["engine", *PLACE]].to_dict("records")
    ]
    every = points(cells)
    if every.empty:
        return nothing
    by = [c for c in POINT if c in cells]
    chosen = (real, simulated[np.array(beside, dtype=bool)])
    wanted = {key(row, by) for rows in chosen for row in rows[by].to_dict("records")}
    return every[[key(row, by) in wanted for row in every[by].to_dict("records")]].reset_index(drop=True)


def cells_of(scenario: Scenario, cells: pd.DataFrame) -> pd.DataFrame:
    """The measured cells that `compared` looks at, of both kinds of load."""
    chosen = [sweep_of(scenario, at_once=way) for way in (True, False)]
    return cells[cells["sweep"].isin([sweep.name for sweep in chosen if sweep])]


def other_options(scenario: Scenario, cells: pd.DataFrame) -> pd.DataFrame:
    """The measured cells at places of `cells_of`, over its transport, of its engines with other options."""
    base = cells_of(scenario, cells)
    places = {key(row, [*PLACE, "transport"]) for row in base[[*PLACE, "transport"]].to_dict("records")}
    usual = {key(row, ["engine", "engine_options"]) for row in base[["engine", "engine_options"]].to_dict("records")}
    engines = {engine for engine, _ in usual}
    chosen = [
        row["engine"] in engines
        and key(row, ["engine", "engine_options"]) not in usual
        and key(row, [*PLACE, "transport"]) in places
        for row in cells[["engine", "engine_options", "transport", *PLACE]].to_dict("records")
    ]
    return cells[np.array(chosen, dtype=bool)].drop_duplicates("cell")


def _policy(engine: str, version: str) -> str | None:
    """The policy that stands for a measured engine, if there is one."""
    from batchlab.sim.measured import simulated_engine

    try:
        return simulated_engine(engine, version)
    except UsageError:
        return None


def measured(found: pd.DataFrame) -> pd.DataFrame:
    """The measured ones of the points."""
    return found[found["evidence"] == "measured"]


def recorded_engines(found: pd.DataFrame) -> list[str]:
    """The engines with a valid measured point, in the scenario's order."""
    real = measured(found)
    return list(dict.fromkeys(real.loc[valid(real), "engine"])) if len(real) else []


def ratios(found: pd.DataFrame, axis: str, metric: str, defaults: Any = None) -> pd.DataFrame:
    """RATIOS: each further engine's `metric` over the first one's, a row a dataset and value of `axis`.

    The other limit is at its default (`other`). The interval is the first-order one of a quotient of independent means
    on a logarithmic scale: relative half-widths add as squares, and the ratio is divided and multiplied by e to that
    power, so that it stays above 0; null where a point has none. `apart`: the interval leaves 1 out.
    """
    other = "max_num_tokens" if axis == "max_batch_size" else "max_batch_size"
    line = along(measured(found), axis, defaults)
    good = line[valid(line) & line[metric].notna()] if len(line) else line
    good = good[[c for c in ("dataset", "engine", axis, other, metric, f"{metric}_hi") if c in good]]
    rows: list[dict[str, Any]] = []
    engines = recorded_engines(found)
    for dataset, mine in good.groupby("dataset", sort=False) if len(engines) > 1 else ():
        for (at, beside), place in mine.groupby([axis, other]):
            values = {row["engine"]: row for row in place.to_dict("records")}
            base = values.get(engines[0])
            for engine in engines[1:]:
                if base and engine in values and base[metric] > 0:
                    told = {"dataset": dataset, "engine": engine, "base": engines[0], "axis": axis, "at": at}
                    rows.append(told | {"other": beside} | quotient(values[engine], base, metric))
    return pd.DataFrame(rows, columns=RATIOS).sort_values(["engine", "dataset", "at"], key=_order, kind="stable")


def _order(column: pd.Series) -> pd.Series:
    """Names as they first appear, numbers as they are."""
    return column if column.name == "at" else column.map({v: n for n, v in enumerate(dict.fromkeys(column))})


def quotient(over: dict[str, Any], under: dict[str, Any], metric: str) -> dict[str, Any]:
    """ratio, ratio_lo, ratio_hi and apart of two points' means."""
    ratio = over[metric] / under[metric]
    halves = [(row.get(f"{metric}_hi", math.nan) - row[metric]) / row[metric] for row in (over, under)]
    half = math.hypot(*halves)
    known = not math.isnan(half)
    return {
        "ratio": ratio,
        "ratio_lo": ratio * math.exp(-half),
        "ratio_hi": ratio * math.exp(half),
        "apart": abs(math.log(ratio)) > half if known else None,
    }


def front_ends(study: Study, cells: pd.DataFrame) -> pd.DataFrame:
    """How far each engine's front end is behind it, a row a measured cell with all requests at once and iterations.

    `inside_s` is when the engine's last iteration was done, `client_s` when the client had the last token, both from
    the first request's time; `behind_s` the difference; `inside_tok_s` and `client_tok_s` all output tokens over each;
    `limits` whether the difference is more than LATE of the run; `cores` those of the host.
    """
    rows: list[dict[str, Any]] = []
    known = ["engine", "engine_options", "dataset", "max_batch_size", "max_num_tokens"]
    good = cells[valid(cells) & cells["request_rate"].map(math.isinf)] if len(cells) else cells
    for row in good.to_dict("records"):
        recorded = study.record(row["cell"])
        requests, iterations = recorded.requests.to_pandas(), recorded.iterations.to_pandas()
        if iterations.empty or requests["last_s"].isna().all():
            continue
        client, tokens, behind = requests["last_s"].max(), requests["tokens"].sum(), behind_s(requests, iterations)
        told = {"inside_s": client - behind, "client_s": client, "behind_s": behind}
        speeds = {"inside_tok_s": tokens / (client - behind), "client_tok_s": tokens / client}
        limits = {"limits": behind > LATE * client}
        cores = {"cores": recorded.meta["provenance"]["machine"]["cores"]}
        rows.append({name: row[name] for name in known} | told | speeds | limits | cores)
    columns = [*known, "inside_s", "client_s", "behind_s", "inside_tok_s", "client_tok_s", "limits", "cores"]
    return pd.DataFrame(rows, columns=columns)
