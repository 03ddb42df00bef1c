"""What is left in time: cells, and the engine starts between them."""

import io
from dataclasses import replace

from batchlab import plan, scenario
from batchlab.estimate import Estimator
from batchlab.progress import Progress
from batchlab.scenario import Limits
from test_scenario import write

FREE = Estimator((0.0, 0.0, 0.0), 60.0, 0, {"tgi": 150.0})  # cells cost nothing, so that only starts count


def cells(tmp_path, engine, **sweep):
    def change(raw):
        raw.update(engines={engine: {"version": "1"}}, repeats=1, sweeps=[{"name": "x", **sweep}])

    return plan.unique(plan.expand(scenario.load(write(tmp_path, change))))


def test_an_engine_whose_limits_are_cold_is_started_for_each(tmp_path):
    mine = cells(tmp_path, "tgi", max_batch_size=[1, 2, 4])
    progress = Progress(total=3, estimator=FREE, left=mine, stream=io.StringIO())
    assert progress.remaining_s() == 3 * 150 == FREE.total(mine)
    progress.starting(mine[0], Limits(max_batch_size=1, max_num_tokens=64))
    progress.started(20.0)
    assert progress.remaining_s() == 2 * 20  # the one that runs is started, the others as fast as it was
    progress.begin(mine[0])
    progress.end(mine[0], [])
    assert progress.remaining_s() == 2 * 20


def test_a_warm_engine_is_started_once(tmp_path):
    mine = cells(tmp_path, "vllm", max_batch_size=[1, 2, 4])
    assert FREE.total(mine) == 60.0
    other = [replace(c, engine="sglang") for c in cells(tmp_path, "vllm", max_num_tokens=[32, 64])]
    assert len({c.launch_key() for c in other}) == 2  # SGLang's token limit is cold
    assert len({replace(c, engine="sglang").launch_key() for c in mine}) == 1  # its batch limit is not
