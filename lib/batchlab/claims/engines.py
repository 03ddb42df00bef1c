"""Tests of TensorRT-LLM against vLLM. A body without one of them has nothing to say."""

from collections.abc import Iterable

import numpy as np

from batchlab.claims.batching import BATCH, RUNNING, THROUGHPUT, TOKENS, TPOT, knee, percent
from batchlab.claims.body import AT_ONCE, Body, Dataset, Line, number_on
from batchlab.claims.outcome import Missing, Outcome, apart, listed, value
from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.select import valid

ROLES = ("vllm", "tensorrt-llm")


def pair(
    body: Body, dataset: Dataset, axis: str, sweeps: Iterable[str] = AT_ONCE, finite_rate: bool | None = False
) -> tuple[Line, Line]:
    """Both engines' lines at the axis values that both have."""
    for role in ROLES:
        body.engine(role)
    lines = [body.line(dataset, axis, engine=role, sweeps=sweeps, finite_rate=finite_rate) for role in ROLES]
    shared = np.intersect1d(lines[0].x, lines[1].x)
    if len(shared) < 2:
        raise Missing(f"fewer than two {axis} at which scenario {body.scenario} has both engines")
    vllm, trt = (Line(axis, line.rows[line.rows[axis].isin(shared)]) for line in lines)
    return vllm, trt


def undecided(body: Body, what: str, ratio: np.ndarray, margin: float) -> Missing:
    """Why nothing follows from ratios that a simulation cannot tell from 1, or a run from noise."""
    between = "and" if len(ratio) == 2 else "to"
    seen = f"{percent(ratio.min() - 1)} {between} {percent(ratio.max() - 1)}"
    why = "which the simulation cannot tell apart" if body.evidence == "simulated" else "which is within the noise"
    return Missing(
        f"scenario {body.scenario}: TensorRT-LLM's {what} is {seen} against vLLM's, {why} (±{margin:.0%})", planned=True
    )


def margin_of(body: Body, resolves: float) -> float:
    """Simulated engines closer than this are not told apart; measured ones are compared as they are."""
    return resolves if body.evidence == "simulated" else 0.0


def crossover(body: Body, *, dataset: str, by: float, resolves: float) -> Outcome:
    """TensorRT-LLM's throughput over vLLM's at the smallest and at the largest batch limit."""
    vllm, trt = pair(body, dataset, BATCH)
    ratio = trt.y(THROUGHPUT) / vllm.y(THROUGHPUT)
    told = listed([f"{percent(ratio[i] - 1)} at {whole(trt.x[i])}" for i in (0, len(ratio) // 2, -1)])
    ends = (
        f"{dataset}: TensorRT-LLM's throughput against vLLM's is {told}; at max_batch_size {whole(trt.x[-1])} "
        f"{value(trt.rows.iloc[-1], THROUGHPUT)} against {value(vllm.rows.iloc[-1], THROUGHPUT)}"
    )
    margin = max(by, margin_of(body, resolves))
    holds = ratio[0] <= 1 - margin and ratio[-1] >= 1 + margin
    if not holds and ratio[0] <= 1 + margin and ratio[-1] >= 1 - margin:
        raise undecided(
            body, f"throughput at max_batch_size {whole(trt.x[0])} and {whole(trt.x[-1])}", ratio[[0, -1]], margin
        )
    factor = 1.0 if holds else max(apart(ratio[0], 1 - by), apart(ratio[-1], 1 + by))
    return Outcome(bool(holds), ends, vllm.cells + trt.cells, factor)


def lower_everywhere(
    body: Body, *, dataset: Dataset, axis: str, metric: str, sweeps: list[str], resolves: float
) -> Outcome:
    """TensorRT-LLM's value is below vLLM's at every value of an axis."""
    finite = None if axis == "request_rate" else metric.startswith("ttft")
    vllm, trt = pair(body, dataset, axis, sweeps, finite)
    ratio = trt.y(metric) / vllm.y(metric)
    words, margin = metric_words(metric)[0], margin_of(body, resolves)
    higher = [number_on(axis, x) for x, r in zip(trt.x, ratio, strict=True) if r >= 1 + margin]
    if not higher and not (ratio < 1 - margin).all():
        raise undecided(body, f"{words} along {axis}", ratio, margin)
    told = (
        f"TensorRT-LLM's {words} is {percent(ratio.min() - 1)} to {percent(ratio.max() - 1)} against vLLM's over "
        f"{axis} "
        f"{number_on(axis, trt.x[0])} to {number_on(axis, trt.x[-1])} ({value(trt.rows.iloc[0], metric)} against "
        f"{value(vllm.rows.iloc[0], metric)} at {number_on(axis, trt.x[0])})"
    )
    told += f"; it is not lower at {listed(higher)}" if higher else ""
    return Outcome(not higher, told, vllm.cells + trt.cells, 1.0 if not higher else float(ratio.max()))


def by_budget(body: Body, role: str, dataset: str) -> dict[float, Line]:
    """An engine's lines along max_batch_size, all at once, at each token budget that has three valid points or more."""
    rows = body.select(body.points(AT_ONCE), role, dataset, finite_rate=False)
    groups = rows[valid(rows)].groupby(TOKENS)
    return {t: Line(BATCH, g.sort_values(BATCH)) for t, g in groups if g[BATCH].nunique() >= 3}


def over_budgets(dataset: str, told: dict[float, tuple[bool, str, float]], cells: tuple[str, ...]) -> Outcome:
    """One outcome of those at each token budget: (whether it holds, what was found, how far off)."""
    detail = f"{dataset}: " + "; ".join(f"at max_num_tokens {whole(t)} {what}" for t, (_, what, _) in told.items())
    yes = [whole(t) for t, (holds, _, _) in told.items() if holds]
    no = [whole(t) for t, (holds, _, _) in told.items() if not holds]
    factor = max((f for holds, _, f in told.values() if not holds), default=1.0)
    if not yes or not no:
        return Outcome(not no, detail, cells, factor)
    detail += f". It holds at max_num_tokens {listed(yes)} and not at {listed(no)}"
    return Outcome(False, detail, cells, factor, ("max_num_tokens, of which the article does not say what it was",))


def lower_until_saturation(body: Body, *, dataset: str, saturated: float, steps: int, resolves: float) -> Outcome:
    """vLLM's TPOT is the lower one until TensorRT-LLM's saturates, which it does close to that engine's throughput.

    At each token budget, since where TPOT saturates depends on it.
    """
    vllm, trt = (by_budget(body, role, dataset) for role in ROLES)
    told, cells, margin = {}, (), margin_of(body, resolves)
    for tokens in sorted(set(vllm) & set(trt)):
        ours, theirs = vllm[tokens], trt[tokens]
        shared = np.intersect1d(ours.x, theirs.x)
        ours, theirs = (Line(BATCH, line.rows[line.rows[BATCH].isin(shared)]) for line in (ours, theirs))
        tpot_knee, throughput_knee = knee(theirs.y(TPOT), saturated), knee(theirs.y(THROUGHPUT), saturated)
        reached = tpot_knee < len(shared) - 1  # at the last point it has only just got there
        ratio = (ours.y(TPOT) / theirs.y(TPOT))[: max(1, tpot_knee)]
        holds = bool(reached and abs(tpot_knee - throughput_knee) <= steps and (ratio < 1 + margin).all())
        where = f"saturates at {theirs.told(tpot_knee)}" if reached else f"does not saturate up to {whole(shared[-1])}"
        what = (
            f"its TPOT {where}, its throughput at {theirs.told(throughput_knee)}, and vLLM's TPOT until then is "
            f"{percent(ratio.min() - 1)} to {percent(ratio.max() - 1)} of its"
        )
        told[tokens] = (holds, what, max(1.0, float(ratio.max())))
        cells += ours.cells + theirs.cells
    if not told:
        raise Missing(f"scenario {body.scenario} has no budget at which both engines were run over max_batch_size")
    return over_budgets(f"{dataset}, TensorRT-LLM", told, cells)


def level_when_saturated(body: Body, *, engine: str, dataset: str, saturated: float, within: float) -> Outcome:
    """An engine's running batch over the batch limits at which its throughput is saturated, at each token budget."""
    told, cells = {}, ()
    for tokens, line in by_budget(body, engine, dataset).items():
        y = line.y(THROUGHPUT)
        good = y >= saturated * y.max()
        if good.sum() < 2:
            continue
        running = line.y(RUNNING)[good]
        ratio = float(running.max() / running.min())
        low, high = number(running.min()), number(running.max())
        at = f"{whole(line.x[good][0])} to {whole(line.x[good][-1])}"
        what = f"{low if low == high else f'{low} to {high}'} run over max_batch_size {at}"
        told[tokens] = (ratio <= 1 + within, what, ratio)
        cells += line.cells
    if not told:
        raise Missing(f"scenario {body.scenario} has no budget at which several max_batch_size are saturated")
    return over_budgets(dataset, told, cells)
