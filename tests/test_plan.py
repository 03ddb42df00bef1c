import pytest

from batchlab import plan, scenario
from batchlab.errors import UsageError
from test_scenario import GOOD, write


def load(tmp_path, **changes):
    return scenario.load(write(tmp_path, lambda raw: raw.update(changes)))


def test_a_cross_goes_through_the_defaults(tmp_path):
    s = load(tmp_path, sweeps=[{"name": "x", "max_batch_size": [1, 4], "max_num_tokens": [32, 64]}])
    assert plan.limits(s.sweeps[0], s.defaults) == [(1, 64), (4, 64), (4, 32)]


def test_a_grid_has_every_pair(tmp_path):
    s = load(tmp_path, sweeps=[{"name": "x", "combine": "grid", "max_batch_size": [1, 4], "max_num_tokens": [32, 64]}])
    assert plan.limits(s.sweeps[0], s.defaults) == [(1, 32), (1, 64), (4, 32), (4, 64)]


def test_one_axis_alone_and_none(tmp_path):
    s = load(
        tmp_path, sweeps=[{"name": "x", "max_num_tokens": [32, 64]}, {"name": "y"}, {"name": "z", "max_batch_size": 2}]
    )
    assert [plan.limits(w, s.defaults) for w in s.sweeps] == [[(4, 32), (4, 64)], [(4, 64)], [(2, 64)]]


def test_repeats_are_interleaved_and_differ_by_seed(tmp_path):
    cells = plan.unique(plan.expand(load(tmp_path, repeats=2)))
    assert [(c.max_batch_size, c.seed) for c in cells] == [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)]
    assert len({c.id for c in cells}) == 6


def test_adding_a_batch_size_leaves_the_other_cells_alone(tmp_path):
    before = {c.id for c in plan.unique(plan.expand(load(tmp_path)))}
    after = {
        c.id
        for c in plan.unique(
            plan.expand(load(tmp_path, sweeps=[{"name": "throughput", "max_batch_size": [1, 2, 3, 4]}]))
        )
    }
    assert before < after and len(after - before) == 3


def test_a_cell_in_two_sweeps_is_one_cell(tmp_path):
    planned = plan.expand(
        load(
            tmp_path,
            repeats=1,
            sweeps=[{"name": "x", "max_batch_size": [1, 2]}, {"name": "y", "max_batch_size": [2, 4]}],
        )
    )
    assert len(planned) == 4 and len(plan.unique(planned)) == 3


def test_an_identity_is_stable():
    """Recorded cells are found by this hash: a change of it orphans every committed record."""
    s = scenario.Scenario(name="x", path="x.yml", **GOOD)
    assert plan.unique(plan.expand(s))[0].id == "1345815012a7"


def test_a_budget_below_the_batch_is_refused(tmp_path):
    with pytest.raises(UsageError, match="max_num_tokens 2 is below max_batch_size 4"):
        plan.expand(load(tmp_path, sweeps=[{"name": "x", "max_num_tokens": [2]}]))


def test_engines_start_with_the_largest_limits(tmp_path):
    s = load(tmp_path, sweeps=[{"name": "x", "max_batch_size": [1, 4], "max_num_tokens": [32, 128]}])
    limits = plan.largest_limits(plan.unique(plan.expand(s)))
    assert (limits.max_batch_size, limits.max_num_tokens) == (4, 128)


def test_options_that_need_a_restart_split_the_engines(tmp_path):
    s = load(
        tmp_path,
        sweeps=[
            {"name": "x"},
            {"name": "y", "engine_options": {"kv_cache_gib": 1}},
            {"name": "z", "transport": "inprocess"},
        ],
    )
    assert len({c.launch_key() for c in plan.unique(plan.expand(s))}) == 3
