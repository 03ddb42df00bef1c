"""Tests of S2's claims on our cells: requests a second against the token budget, fixed and moving."""

import numpy as np
import pandas as pd

from batchlab.claims.batching import TOKENS, knee, percent
from batchlab.claims.body import Body
from batchlab.claims.outcome import Missing, Outcome, apart, value
from batchlab.plots.labels import number, whole
from batchlab.plots.select import valid

REQUESTS = "request_throughput_req_s"


def knees(body: Body, *, sweeps: list[str], short: str, long: str, at: int, saturated: float, by: float) -> Outcome:
    """Short requests are saturated from a budget on and not before; long ones still gain above it."""
    first, second = (body.line(d, TOKENS, sweeps=sweeps) for d in (short, long))
    a = knee(first.y(REQUESTS), saturated)
    b = second.index(at)
    gain = second.y(REQUESTS)[-1] / second.y(REQUESTS)[b] - 1
    from_there = f"within {1 - saturated:.0%} of the best from {first.told(a)} on"
    if a == len(first.x):
        from_there = f"the largest more than {1 - saturated:.0%} below the best"
    told = f"{short}: {first.ends(REQUESTS)}, {from_there}; {long}: {second.ends(REQUESTS)}, {percent(gain)} above {at}"
    found = first.x[a] if a < len(first.x) else np.inf
    holds = bool(found == at and gain >= by)
    factor = 1.0 if holds or not np.isfinite(found) else apart(found, at)
    return Outcome(holds, told, first.cells + second.cells, factor)


def tuning_gain(
    body: Body, *, engine: str, datasets: list[str], sweeps: list[str], stated: dict[str, float], within: float
) -> Outcome:
    """Requests a second at an engine's best token budget over those at its worst, against a stated gain a load."""
    parts, holds, cells = [], [], ()
    for dataset in datasets:
        line = body.line(dataset, TOKENS, engine=engine, sweeps=sweeps)
        y = line.y(REQUESTS)
        gain = y.max() / y.min() - 1
        holds.append(abs(gain - stated[dataset]) <= within)
        cells += line.cells
        parts.append(f"{dataset}: {line.ends(REQUESTS)}, {percent(gain)} from the worst budget to the best")
    return Outcome(all(holds), "; ".join(parts), cells)


def dynamic_gain(
    body: Body, *, sweeps: list[str], dynamic: list[str], low: float, high: float, within: float
) -> Outcome:
    """Requests a second under a moving budget over the fixed budget it starts from, and over the best fixed one."""
    moving, fixed = body.whole(dynamic), body.whole(sweeps)
    parts, gains, cells = [], [], ()
    for _, point in moving[valid(moving)].iterrows():
        rows = fixed[valid(fixed) & (fixed["dataset"] == point["dataset"]) & (fixed["engine"] == point["engine"])]
        start = rows[rows[TOKENS] == point[TOKENS]]
        if start.empty:
            continue
        best = rows.loc[rows[REQUESTS].idxmax()]
        gains.append(point[REQUESTS] / start[REQUESTS].iloc[0] - 1)
        over_best = point[REQUESTS] / best[REQUESTS] - 1
        cells += point["cells"] + tuple(c for some in rows["cells"] for c in some)
        parts.append(
            f"{point['dataset']}: {value(point, REQUESTS)}, {percent(gains[-1])} over the fixed "
            f"{whole(point[TOKENS])} it starts "
            f"from, {percent(over_best)} over the best fixed budget ({whole(best[TOKENS])})"
        )
    if not gains:
        raise Missing(f"no moving budget in scenario {body.scenario} has its fixed counterpart", planned=True)
    found = np.array(gains)
    holds = bool((found >= low - within).all() and (found <= high + within).all())
    return Outcome(
        holds, "; ".join(parts), cells, 1.0 if holds else apart(1 + float(found.mean()), 1 + (low + high) / 2)
    )


def memory_rises(body: Body, *, sweeps: list[str], by: float) -> Outcome:
    """vLLM's peak GPU memory from the smallest to the largest budget."""
    made = body.whole(sweeps)
    made = made[made["engine"] == body.engine("vllm")]
    rows = made[valid(made) & pd.to_numeric(made["gpu_memory_peak_gib"]).notna()]
    if rows[TOKENS].nunique() < 2:
        raise Missing(f"scenario {body.scenario} recorded no GPU memory along max_num_tokens", planned=True)
    peaks = rows.groupby(TOKENS)["gpu_memory_peak_gib"].max()
    change = peaks.iloc[-1] / peaks.iloc[0] - 1
    told = (
        f"GPU memory peaks at {number(peaks.iloc[0])} GiB with max_num_tokens {whole(peaks.index[0])} and at "
        f"{number(peaks.iloc[-1])} with {whole(peaks.index[-1])} ({percent(change)}), on one engine whose largest "
        f"budget was set at "
        "its start"
    )
    cells = tuple(c for some in rows["cells"] for c in some)
    return Outcome(bool(change >= by), told, cells, 1.0 if change >= by else apart(1 + change, 1 + by))
