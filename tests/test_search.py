"""Searches: verdicts by hand, strategies against known thresholds, and whole searches over cells of a study."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic_store
from batchlab import cell, measure, metrics, models, plan, records, scenario, search
from batchlab.client import Replay
from batchlab.engines.trace import Traced
from batchlab.errors import EngineError, UsageError
from batchlab.search import strategy
from batchlab.search.requirements import requirements
from batchlab.search.verdict import KEEPS, MISSES, UNDECIDED, Rule, judge
from batchlab.store import Store
from batchlab.study import Study
from test_metrics import frame, request

# verdicts --------------------------------------------------------------------------------------------------------


def run(*tpots_ms, ttft_ms=100.0):
    """Requests one after the other, each with this TPOT over ten tokens after the first."""
    rows = []
    for i, tpot in enumerate(tpots_ms):
        first = i + ttft_ms / 1000
        rows.append(request(i, scheduled=float(i), sent=float(i), first=first, last=first + tpot / 100))
    return frame(*rows)


TPOT = requirements({"tpot_mean_ms": 20}, finite_rate=False)


def verdict(*runs, wanted=TPOT, rule=None, last=False):
    return judge(runs, wanted, rule or Rule(), last=last)


def test_one_run_decides_far_from_the_limit_only():
    assert verdict(run(10.0)).verdict == KEEPS and verdict(run(30.0)).verdict == MISSES
    assert verdict(run(10.0)).sure and "50%" in verdict(run(10.0)).how
    assert verdict(run(19.0)) is None and verdict(run(21.0)) is None
    assert verdict(run(10.0), rule=Rule(clear=0)) is None


def test_repeats_decide_by_their_interval():
    near = [run(18.9), run(19.0), run(19.1)]
    found = verdict(*near)
    (estimate,) = found.estimates
    # mean 19, standard deviation 0.1; four looks share 5%, so t(2) at 1 - 0.0125/2 is 8.860
    assert estimate.high - estimate.value == pytest.approx(8.860 * 0.1 / math.sqrt(3), rel=1e-3)
    assert (found.verdict, found.how) == (KEEPS, "interval over 3 runs")
    assert verdict(run(20.9), run(21.0), run(21.1)).verdict == MISSES


def test_a_straddling_interval_asks_for_more_and_then_says_undecided():
    wide = [run(v) for v in (19.0, 20.5, 18.5, 21.0, 19.5, 20.6)]
    assert all(verdict(*wide[:n]) is None for n in (1, 2, 3, 4, 5))
    assert verdict(*wide, last=True).verdict == UNDECIDED
    assert verdict(*[run(19.99)] * 3).verdict == KEEPS  # close, but without any spread


def test_a_single_run_has_batch_means_where_the_limit_is_on_a_mean():
    rng = np.random.default_rng(3)
    steady = run(*(19.0 + rng.normal(0, 0.2, 200)))
    found = verdict(steady, last=True)
    assert found.verdict == KEEPS and found.sure and "batch means" in found.how
    worst = requirements({"tpot_p99_ms": 20}, finite_rate=False)
    bare = verdict(steady, wanted=worst, last=True)
    assert bare.verdict == KEEPS and not bare.sure and "by its value alone" in bare.how


def test_several_requirements_share_the_error_and_one_miss_misses():
    both = requirements({"tpot_mean_ms": 20, "ttft_p90_ms": 90}, finite_rate=False)
    assert Rule().error(2) == pytest.approx(Rule().error(1) / 2)
    found = verdict(*[run(18.9 + d, ttft_ms=100 + d) for d in (0, 0.1, 0.2)], wanted=both)
    assert found.verdict == MISSES and [e.verdict() for e in found.estimates] == [KEEPS, MISSES]
    assert found.of(both[:1]) == KEEPS


def test_goodput_is_a_share_of_all_requests_and_failures_are_misses():
    (share,) = requirements(search.Goodput(0.75, tpot_ms=20), finite_rate=False)
    rows = [request(i, tokens=11, first=1.0, last=1.1 + 0.2 * (i == 0)) for i in range(3)]
    mixed = frame(*rows, request(3, error="broken", first=None, last=None))
    assert share.of(mixed) == pytest.approx(2 / 4) and not share.holds(share.of(mixed))
    assert share.told() == "TPOT ≤ 20 ms for at least 75% of the requests"


def test_an_engine_that_falls_behind_does_not_keep_up():
    limits = requirements({"tpot_mean_ms": 20}, finite_rate=True)
    assert [r.name for r in limits] == ["tpot_mean_ms", "keeps_up"]
    behind = frame(*[request(i, scheduled=float(i), first=1 + 2.0 * i, last=2 + 2.0 * i) for i in range(10)])
    assert limits[1].of(behind) == pytest.approx(0.5)
    assert limits[1].of(run(10.0, 10.0, 10.0)) == pytest.approx(1.0)


def test_a_run_without_a_completed_request_keeps_nothing():
    nothing = frame(request(error="no", first=None, last=None, tokens=0))
    assert TPOT[0].of(nothing) == math.inf and verdict(nothing).verdict == MISSES


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "no limit is given"),
        ({"ttft_ms": 5}, "limit 'ttft_ms' is unknown; write ttft, tpot or e2e"),
        ({"itl_p99_ms": 5}, "unknown"),
        ({"ttft_p90_ms": 0}, "not a number of milliseconds above 0"),
        ({"ttft_p90_ms": True}, "not a number"),
    ],
)
def test_a_wrong_limit_is_named(limits, expected):
    with pytest.raises(UsageError, match=expected):
        requirements(limits, finite_rate=False)


@pytest.mark.parametrize(
    "wrong", [{"confidence": 1.0}, {"repeats": 4, "max_repeats": 3}, {"clear": -1}, {"load_s": -1}]
)
def test_a_wrong_rule_is_named(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Rule(**wrong)


@pytest.mark.parametrize("wrong", [{"share": 0, "ttft_ms": 1}, {"share": 0.9}, {"share": 0.9, "ttft_ms": -1}])
def test_a_wrong_goodput_is_named(wrong):
    with pytest.raises(UsageError, match="goodput"):
        search.Goodput(**wrong)


# strategies ------------------------------------------------------------------------------------------------------


def finish(generator):
    """A strategy whose judge needs no cell: its return value."""
    with pytest.raises(StopIteration) as end:
        next(generator)
    return end.value.value


def judging(tell, asked):
    def judge_at(x):
        asked.append(x)
        return tell(x)
        yield

    return judge_at


@given(st.floats(0.05, 500), st.floats(0.1, 100), st.sampled_from([0.02, 0.05, 0.2]))
def test_bisection_brackets_any_threshold(threshold, start, tolerance):
    asked = []
    tell = judging(lambda x: KEEPS if x <= threshold else MISSES, asked)
    found = finish(strategy.bisect_rate(tell, {}, start=start, low=None, high=None, tolerance=tolerance))
    assert found.kept <= threshold < found.above <= found.kept * (1 + tolerance) * 1.01
    assert len(asked) == len(set(asked)) and found.violations == ()


@given(st.floats(1, 50), st.floats(0.05, 0.5))
def test_what_is_undecided_counts_as_not_kept(threshold, band):
    def tell(x):
        return KEEPS if x <= threshold else UNDECIDED if x <= threshold * (1 + band) else MISSES

    found = finish(strategy.bisect_rate(judging(tell, []), {}, start=2, low=None, high=None, tolerance=0.05))
    assert found.kept <= threshold < found.above


def test_bounds_are_respected_and_open_ends_said():
    asked = []
    found = finish(strategy.bisect_rate(judging(lambda x: KEEPS, asked), {}, start=3, low=2, high=10, tolerance=0.1))
    assert max(asked) == 10 and (found.kept, found.above) == (10, None)
    found = finish(strategy.bisect_rate(judging(lambda x: MISSES, asked), {}, start=3, low=2, high=10, tolerance=0.1))
    assert min(asked) == 2 and (found.kept, found.above) == (None, 2)


def test_known_points_are_not_asked_again():
    asked = []
    known = {4.0: KEEPS, 8.0: MISSES}
    tell = judging(lambda x: KEEPS if x < 5 else MISSES, asked)
    finish(strategy.bisect_rate(tell, known, start=1, low=None, high=None, tolerance=0.3))
    assert asked and all(4 < x < 8 for x in asked)


def test_a_contradiction_is_reported_and_the_answer_stays_below_it():
    found = strategy.bracket({1: KEEPS, 2: MISSES, 3: KEEPS, 4: MISSES})
    assert (found.kept, found.above, found.violations) == (1, 2, ((2, 3),))


@given(st.lists(st.integers(1, 512), min_size=1, max_size=12, unique=True), st.integers(0, 600))
def test_list_bisection_finds_the_largest_that_keeps(sizes, threshold):
    asked = []
    tell = judging(lambda x: KEEPS if x <= threshold else MISSES, asked)
    found = finish(strategy.bisect_list(tell, {}, sorted(sizes)))
    assert found.kept == max((s for s in sizes if s <= threshold), default=None)
    assert len(asked) <= 2 + math.ceil(math.log2(max(2, len(sizes))))


# searches over a study -------------------------------------------------------------------------------------------

SCENARIO = {
    "title": "t",
    "hardware": "cpu",
    "model": "tiny-llama",
    "engines": {"vllm": {"version": "0.0.test"}},
    "datasets": {"short": {"input_len": 32, "output_len": 16}},
    "defaults": {"max_batch_size": 8, "max_num_tokens": 128},
    "num_requests": {"waves": 2, "min": 48, "max": 200},
    "sweeps": [
        {"name": "throughput", "max_batch_size": [1, 2, 4, 8, 16], "repeats": 1},
        {"name": "latency", "request_rate": 8, "max_batch_size": [1, 2, 4, 8, 16], "repeats": 1},
    ],
}


class Toy:
    """An engine that answers by the toy scheduler, at once; counts what is asked of it."""

    name, starts, cells = "toy", 0, 0
    text_prompts = False
    dies_at = None

    def __init__(self, spec, options, model, transport, *, log):
        self.running, self.start_s = False, 0.1

    find = staticmethod(lambda spec: "python")

    def start(self, limits, tick=None):
        Toy.starts, self.running, self.largest = Toy.starts + 1, True, limits

    def alive(self):
        return self.running

    def stop(self):
        self.running = False

    def reconfigure(self, limits):
        assert limits.max_batch_size <= self.largest.max_batch_size
        assert limits.max_num_tokens <= self.largest.max_num_tokens
        self.limits = limits

    def replay(self, workload, *, timeout_s, keep_chunks, progress=None):
        if len(workload.requests) == measure.WARM_UP_REQUESTS:
            return Replay(0, [], {})
        Toy.cells += 1
        if Toy.cells == Toy.dies_at:
            raise EngineError("out of memory")
        due = [r.scheduled_s for r in workload.requests]
        rate = (len(due) - 1) / due[-1] if due[-1] else None
        first = plan.unique(plan.expand(load()))[0]
        asked = replace(first, num_requests=len(due), request_rate=rate, **self.limits.model_dump())
        rows, self.trace = synthetic_store.simulate(asked)
        return Replay(0, [row | {"error": None} for row in rows], {})

    def take_trace(self, t0_ns, finished):
        return Traced(getattr(self, "trace", []), {}, [])

    def describe(self):
        return {"name": self.name, "start_s": self.start_s}


def load(**changes):
    return scenario.Scenario(name="x", path="x.yml", **SCENARIO | changes)


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setitem(measure.ENGINES, "vllm", Toy)
    models.materialize("tiny-llama")
    Toy.starts = Toy.cells = 0
    Toy.dies_at = None
    loaded = load()
    return Study(loaded, plan.expand(loaded), Store(tmp_path))


def truth(rate, batch=8):
    """Mean TTFT of the toy engine at a rate, evenly spread arrivals."""
    first = plan.unique(plan.expand(load()))[0]
    sent = max(48, math.ceil(10 * rate), 2 * batch)
    rows, _ = synthetic_store.simulate(replace(first, max_batch_size=batch, num_requests=sent, request_rate=rate))
    return metrics.ttft_ms(records.table(rows, records.REQUESTS).to_pandas()).mean()


LIMITS = {"ttft_mean_ms": 40}


@pytest.mark.parametrize(
    ("rate", "rule", "sent"),
    [
        (2, Rule(), 48),
        (30, Rule(), 300),
        (30, Rule(load_s=1), 48),
        (4.05, Rule(load_s=20), 81),
        (30, Rule(load_s=0), 48),
    ],
)
def test_a_probe_at_a_rate_lasts(study, rate, rule, sent):
    found = search.highest_rate(study, {"ttft_mean_ms": 1e9}, low=rate, high=rate * 1.001, rule=rule)
    assert set(found.frame["num_requests"][found.frame["request_rate"] == rate]) == {sent}


@pytest.mark.parametrize(("batch", "rate", "sent"), [(60, 50, 120), (60, 30, 90), (60, 1, 10), (16, 50, 50)])
def test_a_probe_fills_the_batch_twice_where_that_does_not_take_long(study, batch, rate, sent):
    loaded = load(num_requests=10)
    few = replace(study, scenario=loaded, planned=plan.expand(loaded))
    search.highest_rate(
        few, {"ttft_mean_ms": 1e9}, low=rate, high=rate * 1.001, max_batch_size=batch, rule=Rule(load_s=1)
    )
    cells = [study.store.meta(name)["cell"] for name in study.store.ids()]
    assert {c["num_requests"] for c in cells if c["request_rate"] == rate} == {sent}


def test_the_highest_rate_is_found_measured_and_loaded_again(study, capsys):
    found = search.highest_rate(study, LIMITS, tolerance=0.1)
    assert Toy.starts == 1  # one warm engine for all points
    assert truth(found.kept) <= 40 < truth(found.not_kept) and found.not_kept <= 1.1 * found.kept * 1.01
    assert found.best.request_rate == found.kept and found.best.max_batch_size == 8
    assert set(found.points["verdict"]) == {KEEPS, MISSES} and found.frame["recorded"].all()
    assert f"{found.kept:g} req/s, not {found.not_kept:g}" in found.text and "Confidence 95%" in found.text
    measured = Toy.cells
    again = search.highest_rate(study, LIMITS, tolerance=0.1)
    assert Toy.cells == measured and Toy.starts == 1
    assert (again.kept, again.not_kept) == (found.kept, found.not_kept)


def test_a_search_that_was_cut_short_goes_on(study, monkeypatch):
    whole, calls = Store.save, []

    def stops(self, *arguments, **more):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(self, *arguments, **more)

    monkeypatch.setattr(Store, "save", stops)
    with pytest.raises(KeyboardInterrupt):
        search.highest_rate(study, LIMITS, tolerance=0.1)
    kept = len(study.store.ids())
    monkeypatch.setattr(Store, "save", whole)
    before = Toy.cells
    found = search.highest_rate(study, LIMITS, tolerance=0.1)
    assert kept == 3 and truth(found.kept) <= 40 < truth(found.not_kept)
    assert len(study.store.ids()) == kept + Toy.cells - before


def test_a_point_in_which_the_engine_dies_is_not_kept(study):
    Toy.dies_at = 1
    found = search.highest_rate(study, LIMITS, tolerance=0.3, rule=Rule(repeats=1, max_repeats=1))
    dead = found.points[found.points["verdict"] == "invalid"]
    assert dead["how"].tolist() == ["out of memory"] and Toy.starts == 2
    assert found.kept is not None and found.kept < dead["request_rate"].iloc[0]


def test_the_largest_batch_size_under_a_limit_on_tpot(study):
    found = search.best_batch_size(study, {"tpot_mean_ms": 5.5})
    assert (found.kept, found.not_kept) == (4, 8), found.points.to_string()
    assert found.text.startswith("Largest max_batch_size with mean TPOT ≤ 5.5 ms, with all requests at once: 4, not 8")
    asked = found.points["max_batch_size"].tolist()
    assert asked == [1, 4, 8, 16]  # both ends, then the middles


def test_an_engine_whose_limits_are_cold_is_started_for_each(study, monkeypatch):
    monkeypatch.setitem(cell.WARM_LIMITS, "vllm", ())
    found = search.best_batch_size(study, {"tpot_mean_ms": 5.5})
    assert (found.kept, found.not_kept, Toy.starts) == (4, 8, 4)


def test_limits_on_both_leave_a_stretch_of_batch_sizes(study):
    found = search.best_batch_size(study, {"tpot_mean_ms": 9.0, "ttft_mean_ms": 60}, request_rate=20)
    assert found.best is not None and found.best.max_batch_size == found.kept
    none = search.best_batch_size(study, {"tpot_mean_ms": 4.0, "ttft_mean_ms": 60}, request_rate=20)
    assert none.best is None and "none of those looked at" in none.text


def test_the_best_settings_are_the_smallest_of_the_equally_good(study):
    found = search.best_settings(study, LIMITS, max_batch_size=[1, 4, 8, 16], max_num_tokens=[128], tolerance=0.1)
    alone = {b: search.highest_rate(study, LIMITS, max_batch_size=b, tolerance=0.1).kept for b in (1, 4, 8, 16)}
    best = max(alone.values())
    assert found.best.request_rate >= best / 1.11
    assert all(rate < found.best.request_rate * 1.1 for b, rate in alone.items() if b < found.best.max_batch_size)


def test_a_machine_that_cannot_measure_searches_what_is_recorded(study, monkeypatch):
    search.highest_rate(study, LIMITS, tolerance=0.1)
    measured = Toy.cells
    monkeypatch.setattr(Study, "can_measure", lambda self: "x.yml: asks for h200_sxm, this machine is cpu")
    found = search.highest_rate(study, LIMITS, tolerance=0.1)
    assert Toy.cells == measured and truth(found.kept) <= 40 < truth(found.not_kept)
    assert "Nothing was measured for this: x.yml: asks for h200_sxm" in found.text
    nothing = search.highest_rate(study, LIMITS, max_batch_size=4)
    assert nothing.best is None and "nothing is recorded to tell it" in nothing.text
    batch = search.best_batch_size(study, {"tpot_mean_ms": 5.5}, max_batch_size=[1, 4])
    assert batch.best is None and "nothing is recorded" in batch.text


def test_names_that_the_scenario_lacks_are_refused(study):
    with pytest.raises(UsageError, match="dataset `long` is unknown; there are: short"):
        search.highest_rate(study, LIMITS, dataset="long")
    with pytest.raises(UsageError, match="no sweep `late`"):
        search.highest_rate(study, LIMITS, sweep="late")
    with pytest.raises(UsageError, match="low 5 and high 2"):
        search.highest_rate(study, LIMITS, low=5, high=2)
    with pytest.raises(UsageError, match="tolerance"):
        search.highest_rate(study, LIMITS, tolerance=0)


def test_simulated_engines_are_searched_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("batchlab.paths.BUILD", tmp_path)
    loaded = scenario.Scenario(
        name="x",
        path="x.yml",
        **SCENARIO
        | {
            "hardware": "h200_sxm",
            "model": "llama-3-8b",
            "engines": {"vllm-v1": {"version": "0.26"}},
            "num_requests": 32,
            "sweeps": [{"name": "latency", "request_rate": 4, "transport": "simulated", "repeats": 1}],
        },
    )
    study = Study(loaded, plan.expand(loaded), Store(tmp_path))
    found = search.highest_rate(study, {"tpot_mean_ms": 8}, max_batch_size=64, max_num_tokens=2048, tolerance=0.2)
    assert found.kept and found.only_recorded is None
    assert set(found.frame["evidence"]) == {"simulated"} and not study.store.ids()
