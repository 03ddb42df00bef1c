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
    seen = f"{percent(ratio.min() - 1)} to {percent(ratio.max() - 1)}" if len(ratio) > 1 else percent(ratio[0] - 1)
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


def lower_until_saturation(body: Body, *, dataset: str, saturated: float, steps: int, resolves: float) -> Outcome:
    """vLLM's TPOT is the lower one below TensorRT-LLM's saturation; that engine's two saturation points are close."""
    vllm, trt = pair(body, dataset, BATCH)
    tpot_knee, throughput_knee = knee(trt.y(TPOT), saturated), knee(trt.y(THROUGHPUT), saturated)
    ratio = (vllm.y(TPOT) / trt.y(TPOT))[: max(1, tpot_knee)]
    margin = margin_of(body, resolves)
    before = ratio < 1 + margin  # lower, or too close to tell
    close = abs(tpot_knee - throughput_knee) <= steps
    if before.all() and close and not (ratio < 1 - margin).any():
        raise undecided(body, "TPOT below its saturation", 1 / ratio, margin)
    settled = whole(trt.x[tpot_knee]) if tpot_knee < len(trt.x) else f"none up to {whole(trt.x[-1])}"
    higher = [whole(x) for x, lower in zip(vllm.x, before, strict=False) if not lower]
    told = (
        f"{dataset}: TensorRT-LLM's TPOT saturates at max_batch_size {settled}, its throughput at "
        f"{whole(trt.x[throughput_knee])}; "
        f"below, vLLM's TPOT is " + (f"not the lower one at {listed(higher)}" if higher else "the lower one throughout")
    )
    told += f" ({percent(ratio.min() - 1)} to {percent(ratio.max() - 1)} of TensorRT-LLM's)"
    holds = bool(before.all() and close)
    return Outcome(holds, told, vllm.cells + trt.cells, 1.0 if holds else max(1.0, float(ratio.max())))


def level_when_saturated(body: Body, *, engine: str, dataset: str, saturated: float, within: float) -> Outcome:
    """An engine's running batch over the batch limits at which its throughput is saturated, at each token budget."""
    rows = body.select(body.points(AT_ONCE), engine, dataset, finite_rate=False)
    level, parts, cells, ratios = [], [], (), []
    for tokens, group in rows[valid(rows)].groupby(TOKENS):
        line = Line(BATCH, group.sort_values(BATCH))
        y = line.y(THROUGHPUT)
        good = y >= saturated * y.max()
        if len(y) < 3 or good.sum() < 2:
            continue
        running = line.y(RUNNING)[good]
        ratios.append(float(running.max() / running.min()))
        level.append(ratios[-1] <= 1 + within)
        cells += line.cells
        at = f"{whole(line.x[good][0])} to {whole(line.x[good][-1])}"
        parts.append(
            (whole(tokens), f"{number(running.min())} to {number(running.max())} run over max_batch_size {at}")
        )
    if not parts:
        raise Missing(f"scenario {body.scenario} has no budget at which several max_batch_size are saturated")
    told = f"{dataset}: " + "; ".join(f"at max_num_tokens {tokens} {what}" for tokens, what in parts)
    if all(level) or not any(level):
        return Outcome(all(level), told, cells, 1.0 if all(level) else min(ratios))
    yes = listed([tokens for (tokens, _), good in zip(parts, level, strict=True) if good])
    no = listed([tokens for (tokens, _), good in zip(parts, level, strict=True) if not good])
    told += f". It holds at max_num_tokens {yes} and not at {no}"
    return Outcome(False, told, cells, max(ratios), ("max_num_tokens, which the article does not say it held at",))
