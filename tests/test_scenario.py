"""A scenario file is one person's question: mistakes in it are named, in one line, with the mend."""

import copy
import math

import pytest
import yaml

from batchlab import scenario
from batchlab.errors import UsageError

GOOD = {
    "title": "t",
    "hardware": "cpu",
    "model": "tiny-llama",
    "engines": {"vllm": {"version": "0.32.0"}},
    "datasets": {"short": {"input_len": 8, "output_len": 4}},
    "defaults": {"max_batch_size": 4, "max_num_tokens": 64},
    "num_requests": 8,
    "sweeps": [{"name": "throughput", "max_batch_size": [1, 2, 4]}],
}


def write(tmp_path, change=None, text=None):
    path = tmp_path / "mine.yml"
    raw = copy.deepcopy(GOOD)
    if change:
        change(raw)
    path.write_text(text if text is not None else yaml.safe_dump(raw))
    return path


def test_the_shipped_scenarios_are_valid():
    assert "cpu" in scenario.names()
    for name in scenario.names():
        assert scenario.load(name).name == name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.update(maxbatch=3), "maxbatch: unknown key"),
        (lambda s: s.update(repeat=3), "repeat: unknown key; did you mean `repeats`?"),
        (
            lambda s: s["sweeps"][0].update(max_batch_sizes=[1]),
            "sweeps.0.max_batch_sizes: unknown key; did you mean `max_batch_size`?",
        ),
        (lambda s: s.pop("model"), "model: missing; add this key"),
        (
            lambda s: s["defaults"].update(max_batch_size=0),
            "defaults.max_batch_size: Input should be greater than 0 (it is 0)",
        ),
        (
            lambda s: s["sweeps"][0].update(max_batch_size=[4, 0]),
            "sweeps.0.max_batch_size.1: Input should be greater than 0 (it is 0)",
        ),
        (lambda s: s["sweeps"][0].update(request_rate=-1), "greater than 0 (it is -1)"),
        (
            lambda s: s["datasets"]["short"].update(output_len=0),
            "datasets.short.output_len: Input should be greater than 0 (it is 0)",
        ),
        (lambda s: s.update(engines={"vlm": {"version": "1"}}), "engines: unknown name `vlm`; did you mean `vllm`?"),
        (
            lambda s: s["sweeps"][0].update(datasets=["shrt"]),
            "sweeps.throughput.datasets: unknown name `shrt`; did you mean `short`?",
        ),
        (lambda s: s["sweeps"].append(s["sweeps"][0]), "two are named `throughput`"),
        (lambda s: s["sweeps"][0].update(arrival={"kind": "gamma"}), "`burstiness` is needed by kind `gamma`"),
        (lambda s: s["engines"]["vllm"].update(version=0.1), "engines.vllm.version"),
        (lambda s: s.update(name="x"), "name: unknown key; a scenario's name is its file's name"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(tmp_path, change, expected):
    path = write(tmp_path, change)
    with pytest.raises(UsageError) as error:
        scenario.load(path)
    assert str(error.value).startswith(str(path)) and expected in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_name_lists_what_there_is():
    with pytest.raises(UsageError, match="did you mean `cpu`"):
        scenario.load("cpuu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("title: [", "not valid YAML"), ("", "holds no keys"), ("title: a\ntitle: b\n", "key `title` is given twice")],
)
def test_broken_yaml(tmp_path, text, expected):
    with pytest.raises(UsageError, match=expected):
        scenario.load(write(tmp_path, text=text))


@pytest.mark.parametrize("spelling", ["inf", ".inf", "null", "infinite"])
def test_every_spelling_of_an_infinite_rate(tmp_path, spelling):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("- max_batch_size:", f"- request_rate: {spelling}\n  max_batch_size:"))
    assert scenario.load(path).sweeps[0].request_rate == [math.inf]


def test_number_of_requests_follows_the_batch():
    rule = scenario.NumRequests(waves=2, min=16, max=1024)
    assert [rule.of(b) for b in (1, 8, 64, 512, 1024)] == [16, 16, 128, 1024, 1024]
    assert scenario.NumRequests.model_validate(7).of(100) == 7


def test_sweep_options_override_the_engines():
    spec = scenario.EngineSpec(version="1", kv_cache_gib=4, args={"a": 1})
    override = scenario.EngineOptions(kv_cache_gib=2, args={"b": True})
    assert spec.options() == {"kv_cache_gib": 4, "args": {"a": 1}}
    assert spec.options(override) == {"kv_cache_gib": 2, "args": {"a": 1, "b": True}}
