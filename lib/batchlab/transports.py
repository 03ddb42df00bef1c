"""What serving costs: the same cells over HTTP and in process, side by side.

In process the engine's Python API is called without a server: no HTTP, no JSON, no other process between engine and
clock. What the HTTP cells are slower is the cost of the server and of a client that reads from it.
"""

from typing import Any

import numpy as np
import pandas as pd

from batchlab.plots.gather import key
from batchlab.plots.select import valid
from batchlab.study import POINT

COORDINATES = tuple(c for c in POINT if c not in ("evidence", "transport"))
FIGURES = ("output_throughput_tok_s", "tpot_mean_ms", "ttft_mean_ms")


def pairs(points: pd.DataFrame) -> pd.DataFrame:
    """A row a point that is valid over both transports, in the frame's order.

    Besides the coordinates: each of FIGURES with `_http` and `_inprocess`, `throughput_lost` (share of the throughput
    in process that is not reached over HTTP), `tpot_added_ms` and `ttft_added_ms`. `apart` is False where the intervals
    of the two throughputs touch, and null where one has none.
    """
    by = [c for c in COORDINATES if c in points]
    real = points[valid(points) & (points["evidence"] == "measured")] if len(points) else points
    rows: list[dict[str, Any]] = []
    for place, group in real.groupby(by, dropna=False, sort=False) if len(real) else ():
        ways = {row["transport"]: row for row in group.to_dict("records")}
        if {"http", "inprocess"} <= set(ways):
            rows.append(dict(zip(by, place, strict=True)) | _difference(ways["http"], ways["inprocess"]))
    columns = [*by, *(f"{f}_{way}" for f in FIGURES for way in ("http", "inprocess"))]
    return pd.DataFrame(rows, columns=[*columns, "throughput_lost", "tpot_added_ms", "ttft_added_ms", "apart"])


def halves(points: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """The measured points over either transport that the pairs were made from, and no other point."""
    by = [c for c in COORDINATES if c in points and c in pairs]
    known = {key(row, by) for row in pairs.to_dict("records")}
    ways = points["transport"].isin(("http", "inprocess"))
    wanted = [way and key(row, by) in known for way, row in zip(ways, points.to_dict("records"), strict=True)]
    return points[np.array(wanted, dtype=bool)]


def unpaired(points: pd.DataFrame, pairs: pd.DataFrame) -> int:
    """How many points are planned over both transports and are not valid over both."""
    by = [c for c in COORDINATES if c in points]
    real = points[points["evidence"] == "measured"]
    return int((real.groupby(by, dropna=False)["transport"].nunique() > 1).sum()) - len(pairs) if len(real) else 0


def _difference(http: dict[str, Any], inside: dict[str, Any]) -> dict[str, Any]:
    found = {f"{f}_{way}": row[f] for f in FIGURES for way, row in (("http", http), ("inprocess", inside))}
    first = FIGURES[0]
    bounds = [row.get(f"{first}_{end}") for row in (http, inside) for end in ("lo", "hi")]
    apart = None
    if not any(b is None or pd.isna(b) for b in bounds):
        apart = bool(bounds[1] < bounds[2] or bounds[3] < bounds[0])
    return found | {
        "throughput_lost": 1 - http[first] / inside[first],
        "tpot_added_ms": http["tpot_mean_ms"] - inside["tpot_mean_ms"],
        "ttft_added_ms": http["ttft_mean_ms"] - inside["ttft_mean_ms"],
        "apart": apart,
    }
