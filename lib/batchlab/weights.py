"""Do the values of weights matter to speed? The same points with weights from a file and with the engine's dummy ones.

Cells use random weights, because every output has a fixed length and an iteration's work depends on shapes only.
That is an argument; this is its check.
"""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from batchlab import metrics
from batchlab.plots.select import valid
from batchlab.study import POINT

FIGURES = ("output_throughput_tok_s", "tpot_mean_ms")
DUMMY = "dummy"
FORMAT = "load_format"
PLACE = ("engine", "dataset", "max_batch_size", "max_num_tokens", "request_rate")
EACH = ("from_file", "dummy", "ratio", "ratio_lo", "ratio_hi", "differs")


def split(options: str) -> tuple[str, str]:
    """A cell's engine options (JSON) without its load format, and the load format ("dummy" where none is given)."""
    found = json.loads(options)
    args = dict(found.get("args", {}))
    given = args.pop(FORMAT, DUMMY)
    return json.dumps({k: v for k, v in found.items() if k != "args"} | ({"args": args} if args else {})), given


def compare(cells: pd.DataFrame) -> pd.DataFrame:
    """PLACE, `figure`, EACH, `n_file` and `n_dummy`: a row a point with both kinds of weights and figure of FIGURES.

    `ratio` is the mean from a file over the mean with dummy weights. Its 95% interval comes from how much a run varies
    by chance: t × s × sqrt(1/n_file + 1/n_dummy), s pooled over every point that was repeated (`metrics.repeat_noise`)
    with all requests at once on the same engine and transport. Null, like `differs`, where nothing was repeated.
    """
    good = cells[valid(cells) & (cells["evidence"] == "measured")].drop_duplicates("cell")
    columns = [*PLACE, "figure", *EACH, "n_file", "n_dummy"]
    if good.empty:
        return pd.DataFrame(columns=columns)
    told = good["engine_options"].map(split)
    good = good.assign(engine_options=told.str[0], weights=told.str[1])
    noise = {
        (engine, transport, figure): metrics.repeat_noise(
            group[figure].to_numpy(float)
            for _, group in rows[np.isinf(rows["request_rate"].astype(float))].groupby(
                [*POINT, "weights"], dropna=False
            )
        )
        for (engine, transport), rows in good.groupby(["engine", "transport"])
        for figure in FIGURES
    }
    found: list[dict[str, Any]] = []
    for _, point in good.groupby([c for c in POINT if c in good], dropna=False, sort=False):
        dummy, file = point[point["weights"] == DUMMY], point[point["weights"] != DUMMY]
        if dummy.empty or file.empty:
            continue
        first = point.iloc[0]
        for figure in FIGURES:
            place = {c: first[c] for c in PLACE} | {"figure": figure, "n_file": len(file), "n_dummy": len(dummy)}
            values = (rows[figure].astype(float).mean() for rows in (file, dummy))
            found.append(
                place | _ratio(*values, len(file), len(dummy), noise[first["engine"], first["transport"], figure])
            )
    return pd.DataFrame(found, columns=columns)


def _ratio(file: float, dummy: float, n_file: int, n_dummy: int, noise: tuple[float, int]) -> dict[str, Any]:
    spread, freedom = noise
    ratio = file / dummy
    half = (
        ratio * float(stdtrit(freedom, 0.975)) * spread * math.sqrt(1 / n_file + 1 / n_dummy) if freedom else math.nan
    )
    return dict(
        zip(
            EACH,
            (file, dummy, ratio, ratio - half, ratio + half, abs(ratio - 1) > half if freedom else None),
            strict=True,
        )
    )
