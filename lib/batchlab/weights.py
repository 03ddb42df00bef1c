"""Do the values of weights matter to speed? The same points with weights from a file and with the engine's dummy ones.

Cells use random weights, because every output has a fixed length and an iteration's work depends on shapes only.
That is an argument; this is its check.
"""

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from batchlab import noise
from batchlab.plots.select import valid
from batchlab.study import POINT, fair

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
    by chance: t × s × sqrt(1/n_file + 1/n_dummy), s pooled over every point of its kind that was repeated (noise.py)
    with all requests at once. Null, like `differs`, where nothing was repeated.
    """
    cells = fair(cells)
    good = cells[valid(cells) & (cells["evidence"] == "measured")].drop_duplicates("cell")
    columns = [*PLACE, "figure", *EACH, "n_file", "n_dummy"]
    if good.empty:
        return pd.DataFrame(columns=columns)
    told = good["engine_options"].map(split)
    good = good.assign(engine_options=told.str[0], weights=told.str[1])
    at_once = good[np.isinf(good["request_rate"].astype(float))]
    runs = at_once.groupby([*POINT, "weights"], dropna=False).ngroup().to_numpy()
    alike = noise.kinds(at_once)
    known = {figure: noise.pooled(at_once[figure].to_numpy(float), runs, alike) for figure in FIGURES}
    found: list[dict[str, Any]] = []
    for _, point in good.groupby([c for c in POINT if c in good], dropna=False, sort=False):
        dummy, file = point[point["weights"] == DUMMY], point[point["weights"] != DUMMY]
        if dummy.empty or file.empty:
            continue
        first, kind = point.iloc[0], noise.kinds(point)[0]
        for figure in FIGURES:
            place = {c: first[c] for c in PLACE} | {"figure": figure, "n_file": len(file), "n_dummy": len(dummy)}
            values = (rows[figure].astype(float).mean() for rows in (file, dummy))
            found.append(place | _ratio(*values, len(file), len(dummy), known[figure].get(kind)))
    return pd.DataFrame(found, columns=columns)


def _ratio(file: float, dummy: float, n_file: int, n_dummy: int, known: tuple[float, int] | None) -> dict[str, Any]:
    ratio = file / dummy
    half = ratio * noise.half(known) * math.sqrt(1 / n_file + 1 / n_dummy)
    return dict(
        zip(
            EACH,
            (file, dummy, ratio, ratio - half, ratio + half, abs(ratio - 1) > half if known else None),
            strict=True,
        )
    )
