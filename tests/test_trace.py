"""Reading what the scheduler in the engine wrote. The scheduler itself is tested inside a real vLLM
(test_engine.py)."""

import json

import pytest

from batchlab.engines.trace import TraceReader, set_limits
from batchlab.scenario import Limits

LINES = """L,1000000000,8,64
I,1000000000,1010000000,2,2,1,40,0,0.25,0,8,64,1004000000
I,1010000000,1020000000,2,2,1,0,2,0.25,0,8,64,
R,cmpl-b0-0-1f3a9c2e,900000000,1010000000,1500000000,11,0,0
R,chatcmpl-b7-12345678,900000000,1010000000,1600000000,11,16,2
R,job3-b21,900000000,1010000000,1700000000,11,0,1
R,somebody-else,1,2,3,4,5,6
"""


def test_every_line_is_read_relative_to_the_cells_start(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(LINES)
    traced = TraceReader(path).take(1_000_000_000)
    assert traced.limits == [(8, 64)]
    assert len(traced.iterations) == 2 and traced.iterations[1]["launched_s"] is None
    assert traced.iterations[:1] == [
        {
            "scheduled_s": 0.0,
            "output_s": 0.01,
            "running": 2,
            "admitted": 2,
            "waiting": 1,
            "prefill_tokens": 40,
            "decode_tokens": 0,
            "kv_use": 0.25,
            "preemptions": 0,
            "max_batch_size": 8,
            "max_num_tokens": 64,
            "launched_s": 0.004,
        }
    ]
    assert sorted(traced.requests) == [0, 7, 21]  # by our own number, in each spelling of vLLM's ids
    assert traced.requests[7] == {
        "engine_queued_s": pytest.approx(-0.1),
        "engine_first_s": 0.01,
        "engine_last_s": 0.6,
        "cached_tokens": 16,
        "preemptions": 2,
    }


def test_a_mark_forgets_and_half_a_line_waits(tmp_path):
    path = tmp_path / "trace.csv"
    reader = TraceReader(path)
    reader.mark()
    assert reader.take(0).iterations == []
    path.write_text(LINES)
    reader.mark()
    with open(path, "a") as file:
        file.write("R,cmpl-b3-0-aa,1,2,3,4,0,0\nR,cmpl-b4-0-bb,1,2,")
    assert sorted(reader.take(0).requests) == [3]
    assert reader.wait_finished(1, 0.0) and not reader.wait_finished(2, 0.0)


def test_the_control_file_is_whole(tmp_path):
    set_limits(tmp_path / "control.json", Limits(max_batch_size=4, max_num_tokens=128))
    assert json.loads((tmp_path / "control.json").read_text()) == {"max_batch_size": 4, "max_num_tokens": 128}
    assert [p.name for p in tmp_path.iterdir()] == ["control.json"]
