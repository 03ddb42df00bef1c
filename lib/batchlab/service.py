"""What a service promises, and what recorded cells leave under it.

For each engine, machine and dataset, as the studies argue it:

* **TPOT** is looked at with all requests at once. The batch is then as full as its limit lets it be, so a setting that
  keeps the limit there keeps it under any load. Of the settings that do, the one with the highest throughput is best;
  of those within 2% of it, the smallest.
* **TTFT** is looked at at finite request rates: the highest recorded one, at one setting, up to which it is kept.
* The **throughput left** is that of the best setting under the limit over the best without any. GPUs for equal work
  follow from it: their number is in inverse proportion to the throughput of one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchlab import paths
from batchlab.errors import UsageError
from batchlab.plots.gather import points
from batchlab.plots.select import valid
from batchlab.study import POINT

STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUT = "output_throughput_tok_s"
SETTING = ["max_batch_size", "max_num_tokens"]
GROUP = tuple(c for c in POINT if c not in (*SETTING, "request_rate", "token_rule"))
_SHAPE = ("model", "input_len", "output_len")
# Sweeps whose names begin so are for the simulator, or ask whether weights matter: settings that nobody would serve.
APART = ("held-out", "calibration", "blind", "weights-from-a-file")
ALIKE = 0.02  # of the best throughput: what counts as equal to it


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits in ms on TPOT and TTFT, by this statistic over a run's requests; at least one of them."""

    tpot_ms: float | None = 20.0
    ttft_ms: float | None = 1000.0
    statistic: str = "mean"

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise UsageError(f"statistic {self.statistic!r} is not one of {', '.join(STATISTICS)}")
        for name, value in (("tpot_ms", self.tpot_ms), ("ttft_ms", self.ttft_ms)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"limit {name} {value} is not a number of milliseconds above 0")
        if self.tpot_ms is None and self.ttft_ms is None:
            raise UsageError("give a limit on TPOT, on TTFT, or both")

    @property
    def tpot(self) -> str:
        return f"tpot_{self.statistic}_ms"

    @property
    def ttft(self) -> str:
        return f"ttft_{self.statistic}_ms"

    def told(self) -> str:
        """ "mean TPOT ≤ 20 ms and mean TTFT ≤ 1000 ms"."""
        given = (("TPOT", self.tpot_ms), ("TTFT", self.ttft_ms))
        return " and ".join(f"{self.statistic} {name} ≤ {value:g} ms" for name, value in given if value is not None)

    def tpot_kept(self, rows: pd.DataFrame) -> pd.Series:
        """Boolean per row: the limit on TPOT is kept, or there is none."""
        if self.tpot_ms is None:
            return pd.Series(True, index=rows.index)
        return rows[self.tpot].astype(float) <= self.tpot_ms

    def kept(self, rows: pd.DataFrame) -> pd.Series:
        """Boolean per row: both limits are kept. A figure that is missing keeps no limit."""
        good = pd.Series(True, index=rows.index)
        for column, limit in ((self.tpot, self.tpot_ms), (self.ttft, self.ttft_ms)):
            if limit is not None:
                good &= rows[column].astype(float) <= limit
        return good


def usable(cells: pd.DataFrame) -> pd.DataFrame:
    """The valid points of these cells whose limits stood still, without the sweeps that ask something else."""
    found = points(cells[~cells["sweep"].str.startswith(APART)] if "sweep" in cells else cells)
    good = found[valid(found)] if len(found) else found
    return good[good["token_rule"].isna()] if "token_rule" in good else good


def groups(found: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]]:
    """(coordinates, points with all requests at once, points at finite rates) for each engine, machine and dataset."""
    by = [c for c in GROUP if c in found]
    parts = []
    for key, rows in found.groupby(by, dropna=False, sort=False):
        finite = np.isfinite(rows["request_rate"].astype(float))
        plain = {k: None if pd.isna(v) else v for k, v in zip(by, key, strict=True)}
        parts.append((plain, rows[~finite], rows[finite]))
    return parts


def under_tpot(found: pd.DataFrame, limits: ServiceLimits) -> pd.DataFrame:
    """A row a group: the best setting with all requests at once under the limit on TPOT.

    Columns: the group's, SETTING, the TPOT and throughput there, best_tok_s (without limits), throughput_left. The
    setting is null where none keeps the limit, and `lowest_tpot_ms` says how near it comes.
    """
    rows = []
    for key, at_once, finite in groups(found):
        if at_once.empty:
            continue
        kept = at_once if limits.tpot_ms is None else at_once[at_once[limits.tpot].astype(float) <= limits.tpot_ms]
        best = _smallest_of_best(kept)
        row = key | dict.fromkeys((*SETTING, limits.tpot, THROUGHPUT)) | {"best_tok_s": _most(at_once, finite)}
        row["lowest_tpot_ms"] = at_once[limits.tpot].min()
        rows.append(row | ({} if best is None else best[[*SETTING, limits.tpot, THROUGHPUT]].to_dict()))
    return _with_cost(pd.DataFrame(rows))


def under_ttft(found: pd.DataFrame, limits: ServiceLimits) -> pd.DataFrame:
    """A row a group: the setting and the highest recorded rate that keep the limit on TTFT, and the throughput there.

    Columns as in `under_tpot`, with `request_rate` kept and `request_rate_missed`, the lowest one above that is not.
    Groups without a finite rate, or that keep the limit at none, are not in it.
    """
    rows = []
    for key, at_once, finite in groups(found):
        if limits.ttft_ms is None:
            continue
        kept = lambda rates: rates[limits.ttft].astype(float) <= limits.ttft_ms  # noqa: E731
        top = highest_of_all(finite, kept)
        if top is None:
            continue
        best, missed = top
        row = key | best[["request_rate", *SETTING, limits.ttft, THROUGHPUT]].to_dict()
        rows.append(row | {"request_rate_missed": missed, "best_tok_s": _most(at_once, finite)})
    return _with_cost(pd.DataFrame(rows))


Kept = Callable[[pd.DataFrame], pd.Series]


def highest_kept(rates: pd.DataFrame, kept: Kept) -> tuple[pd.Series, float | None] | None:
    """The row of the highest rate up to which every recorded one is kept, and the lowest rate that is not.

    `rates`: points of one setting. `kept`: which of them keep their limits. None when the lowest rate does not.
    """
    ordered = rates.sort_values("request_rate", kind="stable")
    missed = ordered[~kept(ordered)]
    first = None if missed.empty else float(missed["request_rate"].iloc[0])
    below = ordered if first is None else ordered[ordered["request_rate"] < first]
    return None if below.empty else (below.iloc[-1], first)


def highest_of_all(finite: pd.DataFrame, kept: Kept) -> tuple[pd.Series, float | None] | None:
    """`highest_kept` of the setting that carries the highest rate; of several, the smallest."""
    tops = [top for _, rates in finite.groupby(SETTING, sort=True, dropna=False) if (top := highest_kept(rates, kept))]
    return max(tops, key=lambda top: top[0]["request_rate"], default=None)


def _most(at_once: pd.DataFrame, finite: pd.DataFrame) -> float:
    """The highest throughput recorded, however the requests came."""
    return float(pd.concat([at_once[THROUGHPUT], finite[THROUGHPUT]]).astype(float).max())


def _smallest_of_best(rows: pd.DataFrame) -> pd.Series | None:
    known = rows[rows[THROUGHPUT].notna()]
    alike = known[known[THROUGHPUT] >= (1 - ALIKE) * known[THROUGHPUT].max()]
    return None if alike.empty else alike.sort_values(SETTING, kind="stable").iloc[0]


def _with_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """With `throughput_left`, `gpus_for_unlimited` (GPUs that do what one does without limits) and `gpus_relative`:
    GPUs for equal throughput, over the engine that needs fewest on the same machine, model and dataset, by the same
    evidence and transport; null where that has one engine only."""
    if rows.empty:
        return rows
    value = rows[THROUGHPUT].astype(float)
    rows["throughput_left"] = value / rows["best_tok_s"].astype(float)
    rows["gpus_for_unlimited"] = 1 / rows["throughput_left"]
    alike = rows.assign(value=value).groupby(["hardware", "model", "dataset", "evidence", "transport"], dropna=False)
    several = alike["engine"].transform("nunique") > 1
    rows["gpus_relative"] = (alike["value"].transform("max") / value).where(several)
    return rows


def at_once(found: pd.DataFrame) -> pd.DataFrame:
    """The points with all requests at once, of datasets with three max_batch_size at least: fewer show no trade-off.

    Where a dataset has several engine options, those of its first points.
    """
    rows = found[np.isinf(found["request_rate"].astype(float))]
    first = rows.groupby(["dataset", "engine", "evidence", "transport"], dropna=False)["engine_options"]
    rows = rows[rows["engine_options"].isna() | (rows["engine_options"] == first.transform("first"))]
    return rows[rows["dataset"].map(rows.groupby("dataset")["max_batch_size"].nunique()) >= 3]


def rate_lines(found: pd.DataFrame) -> pd.DataFrame:
    """The points of one setting a group, the one with the most finite rates (two at least; the smallest of several):
    what a figure against the request rate can show."""
    kept = []
    for _, _, finite in groups(found):
        lines = [rows for _, rows in finite.groupby(SETTING, sort=True, dropna=False)]
        longest = max(lines, key=len, default=None)
        if longest is not None and len(longest) > 1:
            kept.append(longest.sort_values("request_rate", kind="stable"))
    return pd.concat(kept) if kept else found.iloc[0:0]


def published(found: pd.DataFrame) -> pd.DataFrame:
    """S1's own tables 2 and 3 as points, for the datasets of `found` that have S1's lengths and model."""
    known = found.drop_duplicates(["dataset", "model", "input_len", "output_len"])
    rows = []
    for name in ("s1-table-2", "s1-table-3"):
        table = pd.read_csv(paths.PUBLISHED / f"{name}.csv", comment="#")
        table = table.assign(evidence="published", request_rate=table.get("request_rate_req_s", math.inf))
        for _, dataset in known.iterrows():
            alike = table[[*_SHAPE]].eq([dataset[c] for c in _SHAPE]).all(axis=1)
            rows.append(table[alike].assign(dataset=dataset["dataset"]))
    made = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()
    return made.reindex(columns=found.columns).assign(valid=True, recorded=True) if len(made) else found.iloc[0:0]
