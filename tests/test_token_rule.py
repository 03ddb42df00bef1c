"""A token budget that follows the load: the rule by hand, and the loop against an invented trace."""

import json
import time

import pytest

from batchlab import plan, scenario
from batchlab.engines.token_rule import adjusting, next_budget
from batchlab.errors import UsageError
from batchlab.scenario import Limits

RULE = {"waiting_above": 20, "grow": 1.2, "most": 16384, "kv_use_above": 0.9, "shrink": 0.9, "every_s": 0.01}
SCENARIO = """
title: budgets
hardware: cpu
model: tiny-llama
engines: {{vllm: {{version: "0.32.0"}}, sglang: {{version: "0.5.13"}}}}
datasets: {{short: {{input_len: 24, output_len: 16}}}}
defaults: {{max_batch_size: 8, max_num_tokens: 64}}
num_requests: 8
repeats: 1
sweeps:
  - name: moving
    engines: [{engine}]
    token_rule: {{waiting_above: 20, grow: 1.2, most: 512, kv_use_above: 0.9, shrink: {shrink}, every_s: 1}}
"""


@pytest.mark.parametrize(
    ("budget", "waiting", "kv_use", "expected"),
    [
        (2048, 21, 0.5, 2458),  # grows by a fifth
        (2048, 20, 0.5, 2048),  # more than 20 is not 20
        (15000, 21, 0.5, 16384),  # no further than this
        (2048, 21, 0.99, 2458),  # waiting comes first, as the study writes it
        (2048, 3, 0.91, 1843),  # shrinks by a tenth
        (2048, 3, 0.9, 2048),
        (260, 3, 1.0, 256),  # never below what an engine accepts
    ],
)
def test_the_rule_by_hand(budget, waiting, kv_use, expected):
    assert next_budget(RULE, budget, waiting=waiting, kv_use=kv_use, least=256) == expected


def test_the_control_file_follows_the_trace_and_is_put_back(tmp_path):
    trace, control = tmp_path / "trace.csv", tmp_path / "control.json"
    line = "I,1,2,8,8,30,100,8,0.5,0,256,2048\n"
    trace.write_text("A,\n" + line.replace(",30,", ",99,"))  # before the block: not looked at
    start = Limits(max_batch_size=256, max_num_tokens=2048)
    with adjusting(trace, control, start, RULE) as budgets:
        time.sleep(0.1)
        assert budgets == [2048]
        with trace.open("a") as file:
            file.write(line)
        deadline = time.monotonic() + 5
        while len(budgets) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)  # one new iteration is one look's news, however many looks follow
        assert budgets == [2048, 2458]
        assert json.loads(control.read_text()) == {"max_batch_size": 256, "max_num_tokens": 2458}
    assert json.loads(control.read_text()) == {"max_batch_size": 256, "max_num_tokens": 2048}


def test_a_cell_knows_its_rule_and_the_engine_starts_with_room_for_it(tmp_path):
    file = tmp_path / "budgets.yml"
    file.write_text(SCENARIO.format(engine="vllm", shrink=0.9))
    (cell,) = plan.unique(plan.expand(scenario.load(file)))
    assert cell.token_rule["most"] == 512
    assert "tokens from 64" in cell.describe()
    assert plan.largest_limits([cell]).max_num_tokens == 512


@pytest.mark.parametrize(
    ("engine", "shrink", "told"),
    [("sglang", 0.9, r"budgets\.yml: sweeps\.moving\.token_rule: only a measured vllm"), ("vllm", 1.5, "shrink")],
)
def test_what_no_engine_can_do_is_refused(tmp_path, engine, shrink, told):
    file = tmp_path / "budgets.yml"
    file.write_text(SCENARIO.format(engine=engine, shrink=shrink))
    with pytest.raises(UsageError, match=told):
        plan.expand(scenario.load(file))
