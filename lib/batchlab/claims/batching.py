"""Tests of how the two limits move throughput, TPOT and the running batch. Each takes a body and its thresholds."""

import numpy as np

from batchlab.audit.roofs import Roofs
from batchlab.claims.body import AT_ONCE, Body, Line
from batchlab.claims.outcome import Missing, Outcome, apart, listed, value
from batchlab.errors import UsageError
from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.select import valid
from batchlab.plots.style import engine_name
from batchlab.report.readings import holds_from, times
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import load_quantization
from batchlab.sim.models import load_model

THROUGHPUT = "output_throughput_tok_s"
TPOT, TTFT, RUNNING = "tpot_mean_ms", "ttft_mean_ms", "running_batch_mean"
BATCH, TOKENS = "max_batch_size", "max_num_tokens"


def knee(values: np.ndarray, saturated: float) -> int:
    """Index from which on every value is at least `saturated` of the largest; the length where the last is not."""
    return holds_from(values >= saturated * values.max())


def percent(change: float) -> str:
    return f"{change:+.0%}" if abs(change) >= 0.095 else f"{change:+.1%}"


def moves(body: Body, *, dataset: str, axis: str, metric: str, by: float, direction: str) -> Outcome:
    """A metric from the smallest to the largest value of an axis, all at once: `rises` or `falls` by a share at
    least."""
    line = body.line(dataset, axis)
    y = line.y(metric)
    change = y[-1] / y[0] - 1
    holds = change >= by if direction == "rises" else change <= -by
    told = f"{dataset}: {metric_words(metric)[0]} is {line.ends(metric)} ({percent(change)})"
    return Outcome(
        bool(holds), told, line.cells, 1.0 if holds else apart(1 + change, 1 + by if direction == "rises" else 1 - by)
    )


def rises_and_saturates(body: Body, *, dataset: str, saturated: float, most_dip: float) -> Outcome:
    """Throughput along max_batch_size: it grows, is saturated before the largest value, and ends close to its best."""
    line = body.line(dataset, BATCH)
    y = line.y(THROUGHPUT)
    first, best, last = knee(y, saturated), int(y.argmax()), len(y) - 1
    dip = 1 - y[-1] / y.max()
    holds = y.max() > y[0] / saturated and first < last and dip <= most_dip
    ends = f"from {line.at(0, THROUGHPUT)} to {line.at(best, THROUGHPUT)}"
    told = f"{dataset}: throughput grows {times(y.max() / y[0])}, {ends}"
    if first < last:
        told += f"; from {whole(line.x[first])} on it stays within {1 - saturated:.0%} of the best"
    else:
        told += f"; from {whole(line.x[-2])} to {whole(line.x[-1])} it still moves by {percent(y[-1] / y[-2] - 1)}"
    return Outcome(bool(holds), told, line.cells, 1.0 if holds else apart(y[-1], y[-2]))


def keeps_growing(body: Body, *, dataset: str, from_batch: int, to_batch: int, within: float, by: float) -> Outcome:
    """Between two batch limits throughput stays, while running batch and TPOT grow."""
    line = body.line(dataset, BATCH)
    a, b = line.index(from_batch), line.index(to_batch)
    change = {m: line.y(m)[b] / line.y(m)[a] - 1 for m in (THROUGHPUT, RUNNING, TPOT)}
    holds = abs(change[THROUGHPUT]) <= within and change[RUNNING] >= by and change[TPOT] >= by
    told = (
        f"{dataset}, max_batch_size {from_batch} to {to_batch}: throughput {percent(change[THROUGHPUT])}, running "
        f"batch "
        f"{number(line.y(RUNNING)[a])} to {number(line.y(RUNNING)[b])}, TPOT {number(line.y(TPOT)[a])} to "
        f"{value(line.rows.iloc[b], TPOT)}"
    )
    return Outcome(bool(holds), told, line.cells, 1.0 if holds else apart(1 + change[TPOT], 1 + by))


def recipe(body: Body, *, dataset: str, saturated: float, saves: float) -> Outcome:
    """The batch limit of the lowest TPOT among the saturated ones against the largest limit."""
    line = body.line(dataset, BATCH)
    throughput, tpot = line.y(THROUGHPUT), line.y(TPOT)
    good = np.flatnonzero(throughput >= saturated * throughput.max())
    chosen, last = int(good[np.argmin(tpot[good])]), len(tpot) - 1
    saved = 1 - tpot[chosen] / tpot[last]
    given_up = 1 - throughput[chosen] / throughput.max()
    told = (
        f"{dataset}: the rule chooses max_batch_size {whole(line.x[chosen])}, which gives up {given_up:.1%} of the "
        f"best throughput "
        f"and has {saved:.0%} less TPOT than {whole(line.x[last])} ({value(line.rows.iloc[chosen], TPOT)} against "
        f"{value(line.rows.iloc[last], TPOT)})"
    )
    return Outcome(bool(saved >= saves), told, line.cells)


def spread(body: Body, *, dataset: str, at_least: float) -> Outcome:
    """The slowest request's TPOT over the fastest one's, at the largest batch limit."""
    line = body.line(dataset, BATCH)
    ratios = line.y("tpot_max_ms") / line.y("tpot_min_ms")
    last = line.rows.iloc[-1]
    told = (
        f"{dataset}, max_batch_size {whole(line.x[-1])}: TPOT is {number(last['tpot_min_ms'])} ms for the fastest "
        f"request and "
        f"{number(last['tpot_max_ms'])} ms for the slowest, {times(ratios[-1])}; over all max_batch_size up to "
        f"{times(ratios.max())}"
    )
    return Outcome(
        bool(ratios[-1] >= at_least), told, line.cells, 1.0 if ratios[-1] >= at_least else at_least / ratios[-1]
    )


def tpot_falls_with_budget(body: Body, *, engines: list[str], dataset: str, from_tokens: int, by: float) -> Outcome:
    """TPOT from a budget to the largest one, for each of the engines that this body has."""
    parts, holds, cells = [], [], ()
    for role in engines:
        try:
            name = engine_name(body.engine(role))
        except Missing:
            continue
        line = body.line(dataset, TOKENS, engine=role)
        start = line.index(from_tokens)
        y = line.y(TPOT)
        change = y[-1] / y[start] - 1
        apart_by_more = line.resolved(start, len(y) - 1, TPOT)
        if not apart_by_more:
            told = f"{name}'s TPOT changes by {percent(change)} in scenario {body.scenario}, less than its interval"
            raise Missing(told, planned=True)
        holds.append(change <= -by)
        cells += line.cells
        below = (
            f" ({value(line.rows.iloc[0], TPOT)} at {whole(line.x[0])}, with {number(line.y(RUNNING)[0])} running)"
            if start
            else ""
        )
        parts.append(
            f"{name}: TPOT is {line.at(start, TPOT)} and {value(line.rows.iloc[-1], TPOT)} at {whole(line.x[-1])} "
            f"({percent(change)}){below}"
        )
    if not parts:
        raise Missing(f"scenario {body.scenario} has none of {listed(engines)}")
    return Outcome(all(holds), "; ".join(parts), cells)


def same_trends(body: Body, *, datasets: list[str], by: float, within: float) -> Outcome:
    """In each dataset throughput and TPOT grow with max_batch_size by a share at least, and TTFT falls and settles."""
    parts, holds, cells = [], [], ()
    for dataset in datasets:
        line = body.line(dataset, BATCH)
        waiting = body.line(dataset, BATCH, sweeps=("latency",), finite_rate=True)
        gains = {m: line.y(m)[-1] / line.y(m)[0] for m in (THROUGHPUT, TPOT)}
        ttft = waiting.y(TTFT)
        settled = holds_from(ttft <= (1 + within) * ttft.min())
        holds.append(min(gains.values()) >= 1 + by and 0 < settled < len(ttft))
        cells += line.cells + waiting.cells
        told = f"settles at max_batch_size {whole(waiting.x[settled])}" if settled < len(ttft) else "does not settle"
        parts.append(f"{dataset}: throughput grows {times(gains[THROUGHPUT])}, TPOT {times(gains[TPOT])}, TTFT {told}")
    return Outcome(all(holds), "; ".join(parts), cells)


def masked(body: Body, *, dataset: str, other: str, within: float) -> Outcome:
    """How much throughput varies along max_num_tokens, against another dataset."""
    lines = [body.line(d, TOKENS) for d in (dataset, other)]
    ranges = [line.y(THROUGHPUT).max() / line.y(THROUGHPUT).min() - 1 for line in lines]
    told = (
        f"along max_num_tokens throughput varies by {ranges[0]:.1%} ({dataset}, {lines[0].ends(THROUGHPUT)}) and by "
        f"{ranges[1]:.1%} ({other})"
    )
    holds = ranges[0] <= within and ranges[0] < ranges[1]
    return Outcome(
        bool(holds), told, lines[0].cells + lines[1].cells, 1.0 if holds else apart(1 + ranges[0], 1 + within)
    )


def gain(body: Body, *, from_batch: int, to_batch: int, ratios: dict[str, list[float]], within: float) -> Outcome:
    """Throughput at one batch limit over that at another, against a range for each dataset."""
    parts, holds, cells, factor = [], [], (), 1.0
    for dataset, (low, high) in ratios.items():
        line = body.line(dataset, BATCH)
        a, b = line.index(from_batch), line.index(to_batch)
        found = line.y(THROUGHPUT)[b] / line.y(THROUGHPUT)[a]
        inside = low * (1 - within) <= found <= high * (1 + within)
        holds.append(inside)
        factor = max(factor, 1.0 if inside else apart(found, low if found < low else high))
        stated = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        parts.append(
            f"{dataset}: {times(found)} (stated: {stated}), from {value(line.rows.iloc[a], THROUGHPUT)} to "
            f"{value(line.rows.iloc[b], THROUGHPUT)}"
        )
        cells += line.cells
    return Outcome(all(holds), "; ".join(parts), cells, factor)


def limits_bind(body: Body, *, decode: str, prefill: str, small: int, share: float, budget_share: float) -> Outcome:
    """Small batch limits are filled, none is passed; tokens an iteration never pass the budget and come near a small
    one."""
    line, budget = body.line(decode, BATCH), body.line(prefill, TOKENS)
    filled = line.y(RUNNING) / line.x
    rows = budget.rows
    mean_tokens = (rows["num_requests"] * (rows["input_len"] + rows["output_len"]) / rows["iterations"]).to_numpy(float)
    used = mean_tokens / budget.x
    low = filled[line.x <= small]
    holds = bool(
        len(low) and low.min() >= share and filled.max() <= 1.001 and used.max() <= 1.001 and used[0] >= budget_share
    )
    told = (
        f"{decode}: the running batch fills {span(tuple(low))} of each max_batch_size up to {small}, and never more "
        f"than the limit; {prefill}: an iteration carries {number(mean_tokens[0])} tokens on average of a budget of "
        f"{whole(budget.x[0])}, {number(mean_tokens[-1])} of {whole(budget.x[-1])}"
    )
    return Outcome(holds, told, line.cells + budget.cells)


def starved_by_budget(
    body: Body, *, engine: str, dataset: str, max_batch_size: int, low: int, high: int, by: float
) -> Outcome:
    """TPOT and running batch at a low token budget against a higher one."""
    rows = body.select(body.points(AT_ONCE), engine, dataset, finite_rate=False)
    line = Line(TOKENS, rows[(rows[BATCH] == max_batch_size) & valid(rows)].sort_values(TOKENS))
    a, b = line.index(low), line.index(high)
    tpot, running = line.y(TPOT), line.y(RUNNING)
    change = tpot[a] / tpot[b] - 1, running[a] / running[b] - 1
    told = (
        f"({max_batch_size}, {low}): TPOT {value(line.rows.iloc[a], TPOT)} with {number(running[a])} running, at "
        f"{high} {value(line.rows.iloc[b], TPOT)} with {number(running[b])} ({percent(change[0])} in TPOT, "
        f"{percent(change[1])} in requests)"
    )
    holds = max(change) <= -by
    return Outcome(bool(holds), told, line.cells, 1.0 if holds else apart(1 + max(change), 1 - by))


def preemption_costs(body: Body, *, sweeps: list[str], by: float) -> Outcome:
    """Cells that preempted against the same limits with more KV memory: throughput."""
    held, free = body.studied(body.whole(sweeps)), body.points(AT_ONCE)
    hit = held[valid(held) & (held["preemptions"] > 0)]
    on = ["engine", "engine_version", "transport", "model", "dataset", BATCH, TOKENS]
    pairs = hit.merge(free[valid(free)], on=on, suffixes=("", "_free"))
    if pairs.empty:
        told = f"no cell of {' and '.join(sweeps)} in scenario {body.scenario} saw a preemption beside one that did not"
        raise Missing(told, planned=True)
    change = (pairs[THROUGHPUT] / pairs[f"{THROUGHPUT}_free"] - 1).to_numpy(float)
    worst = pairs.iloc[int(change.argmin())]
    told = (
        f"{len(pairs)} points preempted (up to {pairs['preemptions'].max():,.0f} times); their throughput is "
        f"{percent(change.min())} "
        f"to {percent(change.max())} of the same limits with more KV memory; at worst {value(worst, THROUGHPUT)} "
        f"against "
        f"{number(worst[f'{THROUGHPUT}_free'])} ({worst['dataset']}, {whole(worst[BATCH])}, {whole(worst[TOKENS])}). "
        "The smaller memory's own share of that loss is in it"
    )
    cells = tuple(c for cells in (*pairs["cells"], *pairs["cells_free"]) for c in cells)
    holds = change.mean() <= -by
    return Outcome(bool(holds), told, cells, 1.0 if holds else apart(1 + change.mean(), 1 - by))


def bound_by(body: Body, *, prefill: str, decode: str) -> Outcome:
    """Seconds that a run's operations take at the peak against those that its bytes take at full bandwidth."""
    parts, cells, sides = [], (), []
    for dataset in (prefill, decode):
        line = body.line(dataset, BATCH)
        rows = line.rows[line.x >= line.x.max()] if dataset == prefill else line.rows
        compute, memory = zip(*(shares(row) for row in rows.to_dict("records")), strict=True)
        more = [c > m for c, m in zip(compute, memory, strict=True)]
        sides.append(all(more) if dataset == prefill else not any(more))
        cells += line.cells
        low, high = (f"{whole(rows[BATCH].iloc[i])}" for i in (0, -1))
        limits = f"max_batch_size {low}" if low == high else f"max_batch_size {low} to {high}"
        parts.append(
            f"{dataset} at {limits}: operations take {span(compute)} of the run at the card's peak, bytes "
            f"{span(memory)} at its "
            "bandwidth"
        )
    return Outcome(all(sides), "; ".join(parts), cells)


def span(shares_found: tuple[float, ...]) -> str:
    first, last = f"{min(shares_found):.0%}", f"{max(shares_found):.0%}"
    return first if first == last else f"{first.rstrip('%')} to {last}"


def shares(row: dict) -> tuple[float, float]:
    """Of a run's duration: its operations at the card's peak, and its bytes at full bandwidth.

    Weights are read once an iteration, keys and values once a decode step.
    """
    try:
        card = load_card(row["hardware"])
    except UsageError:
        raise Missing(f"the peaks of {row['hardware']} are not known") from None
    roofs = Roofs(card, load_model(row["model"]), load_quantization("none", card))
    input_len, output_len, count = row["input_len"], row["output_len"], row["num_requests"]
    operations = count * roofs.request_flops(input_len, output_len)
    kv = count * output_len * (input_len + output_len / 2) * roofs.kv_token_bytes
    moved = row["iterations"] * roofs.step_weight_bytes + kv
    return operations / roofs.peak_flops / row["duration_s"], moved / card.bandwidth / row["duration_s"]
