"""From claims and bodies of evidence to verdicts: which test, which evidence, in which words.

* Arithmetic over printed values comes first: what cannot be is *inconsistent as printed*, whatever we measured.
* Else the cells decide, measured ones before simulated ones, and among those the scenario that is closest to the
study's own
  model and card. A claim that holds there is *reproduced*.
* One that does not hold *differs by setup* when a simulation of the study's own card and engine shows it, or, without
one,
  when its numbers belong to a machine and a release that ours are not; otherwise it is *not reproduced*.
* Without the cells, without any test, or where only a simulation speaks that leaves out what the claim may rest on,
it is
  *untestable here*, and what would be needed is said.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchlab import study
from batchlab.claims import batching, budget, data, engines, known, latency, printed, service, setups
from batchlab.claims.body import Body, bodies
from batchlab.claims.data import Check, Claim, Claims, Source
from batchlab.claims.outcome import Missing, Outcome, listed, sentence
from batchlab.errors import UsageError
from batchlab.plots.style import engine_name
from batchlab.scenario import names

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
DIFFERS, INCONSISTENT, UNTESTABLE = "differs by setup", "inconsistent as printed", "untestable here"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, DIFFERS, INCONSISTENT, UNTESTABLE)

CELL_TESTS: dict[str, Callable[..., Outcome]] = {
    f.__name__: f
    for f in (
        batching.bound_by, batching.gain, batching.keeps_growing, batching.limits_bind, batching.masked, batching.moves,
        batching.preemption_costs, batching.recipe, batching.rises_and_saturates, batching.same_trends, batching.spread,
        batching.starved_by_budget, batching.tpot_falls_with_budget, budget.dynamic_gain, budget.knees,
        budget.memory_rises, budget.tuning_gain,
        engines.crossover, engines.level_when_saturated, engines.lower_everywhere, engines.lower_until_saturation,
        latency.flat, latency.settles_at, latency.settles_by, latency.throughput_and_ttft_rise, service.as_printed,
        service.gpus_needed, service.highest_under_limit, service.largest_under_limit, service.mean_ttft_above,
        setups.budget_above_prompt, setups.datasets_replayed, setups.grid_covered, setups.rates_covered,
        setups.same_setup,
        setups.whole_prompts,
    )
}  # fmt: skip
PRINTED_TESTS: dict[str, Callable[..., Outcome]] = {
    f.__name__: f
    for f in (
        printed.agrees_with, printed.audited, printed.best_memory_share, printed.default_budget,
        printed.edge_without_lead,
        printed.fixed_lengths, printed.memory_level, printed.printed_gain, printed.understated,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, what came of it, and why.

    `evidence` is measured, simulated, published (arithmetic over printed values) or none; `scenario` is the one whose
    cells decided, if any did.
    """

    number: int
    source: str
    text: str
    theme: str
    kind: str
    how: str
    verdict: str
    evidence: str
    detail: str
    cells: tuple[str, ...]
    factor: float
    scenario: str | None
    figure: str | None


def load(path: data.Path | None = None) -> Claims:
    """The claims (`data.load`), each of whose tests exists and takes the arguments that it is given.

    UsageError as there.
    """
    claims = data.load(path)
    for claim in claims.claims:
        for key, check, tests, given in (
            ("printed", claim.printed, PRINTED_TESTS, (claims, claim)),
            ("cells", claim.cells, CELL_TESTS, (None,)),
        ):
            if check is None:
                continue
            where = f"{path or data.paths.PUBLISHED / 'claims.yml'}: claim {claim.number}, {key}"
            if check.test not in tests:
                raise UsageError(f"{where}.test: no test `{check.test}`; there are: {', '.join(sorted(tests))}")
            function = tests[check.test]
            extra = {"source": None} if "source" in inspect.signature(function).parameters else {}
            try:
                inspect.signature(function).bind(*given, **extra, **check.arguments)
            except TypeError as error:
                raise UsageError(f"{where}: test `{check.test}`: {error}") from None
    return claims


def all_verdicts(*, simulate: bool = True) -> list[Verdict]:
    """Every claim over the cells of every scenario.

    Nothing is measured; missing simulated cells are made with `simulate`.
    """
    return verdicts(bodies((study.open_study(name) for name in names()), simulate=simulate))


def verdicts(evidence: Iterable[Body], claims: Claims | None = None) -> list[Verdict]:
    """Every claim over these bodies of evidence, in the order of their numbers."""
    claims, evidence = claims or load(), list(evidence)
    found = [judge(claims, claim, evidence) for claim in claims.claims]
    for body in evidence:
        known.save(body)
    return found


def judge(claims: Claims, claim: Claim, evidence: list[Body]) -> Verdict:
    """One claim's verdict."""
    source = claims.sources[claim.source]
    tried: list[tuple[Body, Outcome]] = []
    absent: list[Missing] = []
    for body in sorted(evidence, key=lambda b: rank(b, source)) if claim.cells else ():
        try:
            tried.append((body, run(claim.cells, body, source)))
        except Missing as missing:
            absent.append(missing)
    printed_detail = ""
    if claim.printed:
        outcome = PRINTED_TESTS[claim.printed.test](claims, claim, **claim.printed.arguments)
        printed_detail = sentence(outcome.detail) + " "
        if not outcome.holds:
            best = tried[0][0] if tried else None
            detail = printed_detail + " ".join(sentence(f"{name(b, o)}: {o.detail}") for b, o in tried)
            cells = tuple(cell for _, o in tried for cell in o.cells)
            return verdict(claim, INCONSISTENT, "published", detail, cells, outcome.factor, best)
    if not tried:
        planned = [str(m) for m in absent if m.planned] or ["no scenario here plans such cells"] * bool(claim.cells)
        detail = printed_detail + sentence(f"needs {claim.needs}") + f" {sentence('; '.join(dict.fromkeys(planned)))}"
        return verdict(claim, UNTESTABLE, "none", detail, (), 1.0, None)
    undecided = [str(m) for m in absent if m.planned] if tried[0][0].evidence != "measured" else []
    return decide(claims, claim, tried, printed_detail, "".join(f" {sentence(u)}" for u in undecided))


def decide(claims: Claims, claim: Claim, tried: list[tuple[Body, Outcome]], before: str, after: str) -> Verdict:
    """The verdict of the first body, with what the others say, `before` and `after` its detail."""
    source, (body, outcome), others = claims.sources[claim.source], tried[0], tried[1:]
    detail = before + sentence(f"{name(body, outcome)}: {outcome.detail}")
    more = ("" if claim.theme == "set-up" else also(claim, source, others)) + after
    if outcome.holds:
        return verdict(claim, REPRODUCED, body.evidence, detail + more, outcome.cells, outcome.factor, body)
    if claim.blind and body.evidence == "simulated":
        told = (
            f"{before}{sentence(f'needs {claim.needs}')} "
            f"{sentence(f'{name(body, outcome)} it does not hold: {outcome.detail}')}"
        )
        told += f" {sentence(f'That decides nothing: the simulation leaves out {claim.blind}')}{after}"
        return verdict(claim, UNTESTABLE, "none", told, outcome.cells, 1.0, body)
    simulated = [(b, o) for b, o in tried if b.evidence == "simulated" and is_own(b, source)]
    own = [o.holds for _, o in simulated if o.holds or not claim.blind]
    differ = list(outcome.differs) or differences(claim, source, body)
    explained = bool(outcome.differs) or (any(own) if own else claim.belongs_to_setup)
    word = DIFFERS if explained and differ else NOT_REPRODUCED
    if word == DIFFERS:
        detail += f" {sentence('What differs: ' + listed(differ))}"
    contrary = [c.number for c in claims.claims if c.source == claim.source and contradict(c.says, claim.says)]
    if contrary:
        detail += f" {sentence(f'claim {listed([str(n) for n in contrary])} of the same study says the contrary')}"
    return verdict(claim, word, body.evidence, detail + more, outcome.cells, outcome.factor, body)


def contradict(one: dict[str, str], other: dict[str, str]) -> bool:
    return any(other.get(key, value) != value for key, value in one.items())


def differences(claim: Claim, source: Source, body: Body) -> list[str]:
    """What differs between a study's set-up and a body's; that it is simulated only where the claim is the set-up
    itself."""
    found = setups.differences(source, body)
    if claim.cells and claim.cells.test == "same_setup":
        return found
    return [d for d in found if d != "simulated, not measured" and not d.startswith("no ")]


def run(check: Check, body: Body, source: Source) -> Outcome:
    """What a test says of a body, where it was made before from what is kept. Missing where it cannot be."""
    return known.outcome(body, check, source, lambda: tested(check, body, source))


def tested(check: Check, body: Body, source: Source) -> Outcome:
    function = CELL_TESTS[check.test]
    extra = {"source": source} if "source" in inspect.signature(function).parameters else {}
    return function(body, **extra, **check.arguments)


def rank(body: Body, source: Source) -> tuple[bool, bool, bool, str]:
    """Measured before simulated; then the study's model, its card, the scenario's name."""
    models, cards = set(body.frame["model"]), set(body.frame["hardware"])
    return body.evidence != "measured", source.model not in models, source.hardware not in cards, body.scenario


def is_own(body: Body, source: Source) -> bool:
    """Whether a body's card and model are the study's own."""
    return set(body.frame["hardware"]) == {source.hardware} and source.model in set(body.frame["model"])


def name(body: Body, outcome: Outcome) -> str:
    """ "measured on H200 (vLLM 0.26.0)", the engines behind an outcome; a simulation's are named where they are
    compared."""
    cards = listed([setups.card(c) for c in dict.fromkeys(body.frame["hardware"])])
    if body.evidence == "simulated":
        return f"simulated on {cards}"
    behind = body.frame[body.frame["cell"].isin(outcome.cells)]
    releases = behind[["engine", "engine_version"]].drop_duplicates().itertuples(index=False)
    return f"measured on {cards} ({listed([f'{engine_name(engine)} {version}' for engine, version in releases])})"


def also(claim: Claim, source: Source, others: list[tuple[Body, Outcome]]) -> str:
    """What further bodies say, with the numbers where the study's own card, simulated, says otherwise."""
    agree = [f"when {name(body, outcome)}" for body, outcome in others if outcome.holds]
    told = f" {sentence('It also holds ' + listed(agree))}" if agree else ""
    for body, outcome in others:
        if not outcome.holds:
            numbers = f": {outcome.detail}" if is_own(body, source) else ""
            told += f" {sentence(f'It does not hold when {name(body, outcome)}{numbers}')}"
            if claim.blind and body.evidence == "simulated":
                told += f" {sentence(f'The simulation leaves out {claim.blind}')}"
    return told


def verdict(
    claim: Claim, word: str, evidence: str, detail: str, cells: tuple[str, ...], factor: float, body: Body | None
) -> Verdict:
    return Verdict(
        claim.number, claim.source, claim.text, claim.theme, claim.kind, claim.how, word, evidence, detail.strip(),
        tuple(dict.fromkeys(cells)), float(factor), body.scenario if body else None, claim.figure if body else None,
    )  # fmt: skip


def surprising(found: list[Verdict]) -> list[Verdict]:
    """The most surprising claim of each study: of those that did not come out, the one furthest from what was found.

    Distance is the factor between what is claimed and what was measured, simulated or is possible. Set-up claims are
    left out:
    another machine is no surprise.
    """
    chosen = []
    for source in dict.fromkeys(v.source for v in found):
        mine = [
            v for v in found
            if v.source == source and v.verdict not in (REPRODUCED, UNTESTABLE) and v.theme != "set-up" and v.factor > 1
        ]  # fmt: skip
        chosen += sorted(mine, key=lambda v: (-v.factor, v.number))[:1]
    return sorted(chosen, key=lambda v: -v.factor)
