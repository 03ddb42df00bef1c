"""The three searches that a notebook calls."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from batchlab.cell import Cell
from batchlab.errors import UsageError
from batchlab.plots.style import engine_name
from batchlab.scenario import Sweep
from batchlab.search.answer import Answer, caveats, points_frame, told_limits
from batchlab.search.probes import Point, Probes
from batchlab.search.requirements import Goodput, requirements
from batchlab.search.strategy import Bracket, bisect_list, bisect_rate, bracket, scan
from batchlab.search.verdict import KEEPS, Rule
from batchlab.study import Study

RECORDED_ONLY = "only recorded cells were asked for"
OWN_PACE = ("infinite", "closed", "trace")  # arrivals that take no rate
START_RATE = 1.0  # req/s, where nothing recorded tells a better one


def highest_rate(
    study: Study,
    limits: Mapping[str, float] | Goodput,
    *,
    engine: str | None = None,
    dataset: str | None = None,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    sweep: str | None = None,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.05,
    rule: Rule | None = None,
    only_recorded: bool = False,
) -> Answer:
    """The highest request rate (requests a second) at which `limits` are kept.

    limits: {"ttft_p90_ms": 1000, "tpot_mean_ms": 20}, or Goodput(0.95, ttft_ms=1000); see `requirements`.
    engine, dataset: may be left out where the scenario has only one. max_batch_size, max_num_tokens: the scenario's
    defaults. sweep: whose transport, options, arrivals and number of requests the cells have; the first sweep at a
    finite rate, else the first. low, high: bounds of the search. tolerance: between the rate kept and the one not kept.
    rule: how a point is decided. only_recorded: measure nothing.

    Each point is an ordinary cell of the study: recorded ones are loaded, missing ones measured or simulated, on one
    warm engine. A machine that cannot measure searches what is recorded, and the answer says so. UsageError for a name
    that the scenario lacks, EngineError when the engine cannot start.
    """
    _bounds(low, high, tolerance)
    probes = _open(study, limits, engine, dataset, sweep, [max_batch_size], [max_num_tokens], rule, only_recorded, True)
    start = Point(probes.batches[0], probes.budgets[0], math.inf)
    found: list[Bracket] = []

    def strategy() -> Generator[Cell, None, None]:
        found.append((yield from _rate(probes, start, low, high, tolerance)))

    probes.run(strategy())
    (b,) = found
    best = None if b.kept is None else replace(start, request_rate=b.kept)
    asked = f"Highest request rate with {told_limits(probes)}"
    if best is None:
        lowest = min((p.request_rate for p in probes.judged), default=None)
        told = "nothing is recorded to tell it" if lowest is None else f"none; {lowest:g} req/s does not keep them"
    elif b.above is None:
        told = f"{b.kept:g} req/s at least: no higher rate was looked at"
    else:
        told = f"{b.kept:g} req/s, not {b.above:g}"
    return _answer(probes, f"{asked}: {told}", best, b, "request_rate")


def best_batch_size(
    study: Study,
    limits: Mapping[str, float] | Goodput,
    *,
    engine: str | None = None,
    dataset: str | None = None,
    request_rate: float = math.inf,
    max_batch_size: Sequence[int] | None = None,
    max_num_tokens: int | None = None,
    sweep: str | None = None,
    rule: Rule | None = None,
    only_recorded: bool = False,
) -> Answer:
    """The largest max_batch_size, of those given (the scenario's own otherwise), that keeps `limits` at one rate.

    TPOT is worse in a larger batch and TTFT better, so the batch sizes that keep both are a stretch: its upper end is
    bisected by the limits on TPOT, and must keep the others too. With limits on end-to-end latency or goodput, which
    neither ease nor harden all along, every batch size is looked at. Otherwise as `highest_rate`.
    """
    sizes = sorted(set(max_batch_size)) if max_batch_size else _sizes(study)
    finite = math.isfinite(request_rate)
    probes = _open(study, limits, engine, dataset, sweep, sizes, [max_num_tokens], rule, only_recorded, finite)
    start = Point(sizes[-1], probes.budgets[0], request_rate)
    if probes.only_recorded:
        sizes = sorted(int(x) for x in probes.recorded("max_batch_size", start))
    bisects = all(r.eases_with_batch is not None for r in probes.requirements)
    hardening = [r for r in probes.requirements if r.eases_with_batch is False]
    verdicts: dict[float, str] = {}

    def judge(size: float) -> Generator[Cell, None, str]:
        found = yield from probes.at(replace(start, max_batch_size=int(size)))
        return found.of(hardening) if bisects and hardening else found.verdict

    if sizes:
        look = bisect_list if bisects and hardening and not probes.only_recorded else scan
        probes.run(_discarding(look(judge, verdicts, sizes)))
    kept = [p for p, j in probes.judged.items() if j.verdict == KEEPS]
    best = max(kept, key=lambda p: p.max_batch_size, default=None)
    b = bracket(verdicts)
    b = replace(b, kept=None if best is None else best.max_batch_size)
    rate = f"at {request_rate:g} req/s" if finite else "with all requests at once"
    asked = f"Largest max_batch_size with {told_limits(probes)}, {rate}"
    if best is None:
        told = "none of those looked at" if sizes else "nothing is recorded to tell it"
    else:
        told = f"{best.max_batch_size}" + (f", not {b.above:g}" if b.above and b.above > best.max_batch_size else "")
    return _answer(probes, f"{asked}: {told}", best, b, "max_batch_size")


def best_settings(
    study: Study,
    limits: Mapping[str, float] | Goodput,
    *,
    engine: str | None = None,
    dataset: str | None = None,
    max_batch_size: Sequence[int] | None = None,
    max_num_tokens: Sequence[int] | None = None,
    sweep: str | None = None,
    low: float | None = None,
    high: float | None = None,
    tolerance: float = 0.05,
    rule: Rule | None = None,
    only_recorded: bool = False,
) -> Answer:
    """The max_batch_size and max_num_tokens at which the highest request rate keeps `limits`.

    Settings are challenged one after the other, the smallest first: one that does not keep the limits at a rate
    `tolerance` above the best so far is dropped at the price of that point alone, another is searched from there up.
    So the smallest of settings that are equally good wins. Otherwise as `highest_rate`.
    """
    _bounds(low, high, tolerance)
    sizes = sorted(set(max_batch_size)) if max_batch_size else _sizes(study)
    probes = _open(study, limits, engine, dataset, sweep, sizes, max_num_tokens or [None], rule, only_recorded, True)
    best: list[Point] = []
    last: list[Bracket] = []

    def strategy() -> Generator[Cell, None, None]:
        for tokens in probes.budgets:
            for size in (s for s in sizes if s <= tokens):
                start = Point(size, tokens, math.inf)
                beaten = best[-1].request_rate * (1 + tolerance) if best else low
                if high is not None and beaten is not None and beaten > high:
                    return
                found = yield from _rate(probes, start, beaten, high, tolerance, challenge=bool(best))
                if found.kept is not None and (not best or found.kept >= best[-1].request_rate * (1 + tolerance)):
                    best.append(replace(start, request_rate=found.kept))
                    last.append(found)

    probes.run(strategy())
    asked = f"Best limits with {told_limits(probes)}, by the highest request rate"
    if not best:
        return _answer(probes, f"{asked}: none of those looked at", None, Bracket(None, None, ()), "request_rate")
    p, b = best[-1], last[-1]
    told = f"max_batch_size {p.max_batch_size}, max_num_tokens {p.max_num_tokens}, {p.request_rate:g} req/s"
    return _answer(probes, f"{asked}: {told}" + (f", not {b.above:g}" if b.above else ""), p, b, "request_rate")


def _rate(
    probes: Probes, start: Point, low: float | None, high: float | None, tolerance: float, *, challenge: bool = False
) -> Generator[Cell, None, Bracket]:
    """The highest rate at the limits of `start`. `challenge`: give up when the lowest rate is not kept."""
    known = probes.recorded("request_rate", start)
    verdicts = {x: j.verdict for x, j in known.items() if (low or 0) <= x <= (high or math.inf)}
    if probes.only_recorded:
        return bracket(verdicts)

    def judge(rate: float) -> Generator[Cell, None, str]:
        return (yield from probes.at(replace(start, request_rate=rate))).verdict

    if challenge and low is not None and not any(x >= low and v == KEEPS for x, v in verdicts.items()):
        first = float(f"{low:.3g}")
        verdicts[first] = yield from judge(first)
        if verdicts[first] != KEEPS:
            return bracket(verdicts)
    # half of what the engine does when it has everything at once: waiting begins somewhere above
    guess = low or (probes.capacity(start) or 2 * START_RATE) / 2
    return (yield from bisect_rate(judge, verdicts, start=guess, low=low, high=high, tolerance=tolerance))


def _discarding(strategy: Generator[Cell, None, object]) -> Generator[Cell, None, None]:
    yield from strategy


def _answer(probes: Probes, text: str, best: Point | None, b: Bracket, axis: str) -> Answer:
    frame = probes.frame()
    where = f"{engine_name(probes.engine)}, {probes.dataset}"
    if best and axis == "request_rate":
        where += f", max_batch_size {best.max_batch_size}, max_num_tokens {best.max_num_tokens}"
    told = " ".join([f"{text} ({where}).", *caveats(probes, b.violations, axis)])
    rule, points = probes.rule, points_frame(probes.judged)
    return Answer(told, best, b.kept, b.above, b.violations, rule.confidence, points, frame, probes.only_recorded)


def _open(
    study: Study,
    limits: Mapping[str, float] | Goodput,
    engine: str | None,
    dataset: str | None,
    sweep: str | None,
    batches: Sequence[int | None],
    budgets: Sequence[int | None],
    rule: Rule | None,
    only_recorded: bool,
    finite_rate: bool,
) -> Probes:
    scenario = study.scenario
    dataset = _one("dataset", dataset, scenario.datasets, scenario)
    template = _template(study, sweep, engine, dataset, finite_rate)
    engine = _one("engine", engine, scenario.engines_of(template), scenario)
    defaults = scenario.defaults
    probes = Probes(
        study,
        engine,
        dataset,
        template,
        requirements(limits, finite_rate=finite_rate),
        rule or Rule(),
        [b or defaults.max_batch_size for b in batches],
        sorted({t or defaults.max_num_tokens for t in budgets}),
    )
    first = Point(probes.batches[0], max(probes.budgets), 1.0 if finite_rate else math.inf)
    here = replace(study, planned=probes.cells(first, 1)).can_measure()
    probes.only_recorded = RECORDED_ONLY if only_recorded else here
    return probes


def _template(study: Study, sweep: str | None, engine: str | None, dataset: str, finite_rate: bool) -> Sweep:
    """The sweep whose ways a search follows: the one named, else the first that has this engine and dataset."""
    sweeps = study.scenario.sweeps
    if sweep is not None:
        study.cells(sweep)  # UsageError for one that there is not
        return next(s for s in sweeps if s.name == sweep)
    fitting = [
        s
        for s in sweeps
        if not (s.arrival and s.arrival.kind in OWN_PACE and finite_rate)
        and engine in (None, *study.scenario.engines_of(s))
        and dataset in (s.datasets or study.scenario.datasets)
    ]
    if not fitting:
        raise UsageError(f"{study.scenario.path}: no sweep has engine `{engine}` and dataset `{dataset}`; name others")
    at_rate = [s for s in fitting if any(map(math.isfinite, s.request_rate)) == finite_rate]
    return (at_rate or fitting)[0]


def _one(what: str, given: str | None, known: object, scenario: object) -> str:
    names = list(known)
    if given is None and len(names) == 1:
        return names[0]
    if given not in names:
        said = "is not given" if given is None else f"`{given}` is unknown"
        raise UsageError(f"{scenario.path}: {what} {said}; there are: {', '.join(names)}")
    return given


def _sizes(study: Study) -> list[int]:
    """Every batch size that the scenario's sweeps name."""
    return sorted(
        {b for s in study.scenario.sweeps for b in s.max_batch_size or [study.scenario.defaults.max_batch_size]}
    )


def _bounds(low: float | None, high: float | None, tolerance: float) -> None:
    if (low is not None and not low > 0) or (high is not None and not high > (low or 0)):
        raise UsageError(f"low {low} and high {high} must be rates above 0, low below high")
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance {tolerance} must be above 0 and below 1")
