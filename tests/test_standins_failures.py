"""Every way in which a stand-in engine can fail, through the adapters: an invalid cell with its reason, or a start-up
error with the engine's own last lines; the sweep goes on, nothing hangs, nothing is left behind.
"""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from standins import install
from standins.lab import VERSION, Lab, lab

# of a server with this limit: the failure, and where it shows: "start" (on standard error), "invalid" (the cell's
# reason), "valid" (nowhere)
FAILURES = {
    "tensorrt-llm": {
        1: ("oom", "start", "out of GPU memory"),
        2: ("die-loading", "start", "its executor died while it loaded"),
        3: ("never-ready", "start", r"was not ready after 6 s \(startup_timeout_s\)"),
        4: ("break-stream=3", "invalid", "2 of 8 requests failed: the stream broke after 3 tokens"),
        5: ("clamp=5", "invalid", "output length differs .* in 2 requests .* 5 instead of 12"),
        6: ("die=11", "invalid", "TensorRT-LLM failed while measuring"),
        7: ("refuse-field=ignore_eos", "invalid", "8 of 8 requests failed: .*Extra inputs are not permitted"),
        8: ("new-ids,merge=4", "valid", ""),
    },
    "tgi": {
        1: ("oom", "start", "out of GPU memory"),
        2: ("die-loading", "start", "its shard 0 failed to start"),
        3: ("overload", "invalid", "2 of 8 requests failed: .*Model is overloaded"),
        4: ("error-event=3", "invalid", "2 of 8 requests failed: .*Request failed during generation"),
        5: ("stop-early=5", "invalid", "output length differs .* in 2 requests .* 5 instead of 12"),
        6: ("", "valid", ""),
    },
    "sglang": {
        1: ("oom", "start", "no memory is left for the KV cache"),
        2: ("die-loading", "start", r"SGLang cannot start: its scheduler \(rank 0\) died"),
        3: ("stall=3", "invalid", "2 of 8 requests failed: not finished within the run's 3 s"),
        4: ("error-event=3", "invalid", "2 of 8 requests failed: .*illegal memory access"),
        5: ("slow-start=0.6", "valid", ""),
    },
}
NEWEST = "1.4.0"  # of TensorRT-LLM: answers 503 while it loads
RELEASES = VERSION | {"tensorrt-llm": NEWEST + install.LOCAL}
# SGLang's batch limit is warm: a start for each failure takes the other limit
AXIS = {"tensorrt-llm": "max_batch_size", "tgi": "max_batch_size", "sglang": "max_num_tokens"}
RUNTIMES = {"tensorrt-llm": "local", "tgi": "container", "sglang": "container"}
LAST_WORDS = {
    "tensorrt-llm": "Executor worker died during initialization",
    "tgi": "Error: ShardCannotStart",
    "sglang": "Rank 0 scheduler is dead",
}
SCENARIO = """
title: Stand-ins that fail
hardware: cpu
model: tiny-llama
engines:
  {engine}:
    version: {version}
    max_model_len: 64
    startup_timeout_s: 6
    runtime: {runtime}
    {image}
    env: {{STANDIN_FAULT: "{faults}"}}
datasets:
  short: {{input_len: 10, output_len: 12}}
defaults: {{max_batch_size: 4, max_num_tokens: 64}}
num_requests: 8
repeats: 1
cell_timeout_s: 3
sweeps:
  - {{name: throughput, {axis}: {limits}}}
"""
TIMING = ("sent late", "ms late", "too late to time", "busy")  # of a machine under load


def scenario(engine: str, runtime: str, faults: dict[int, str]) -> str:
    asked = ",".join(f"{kind}@{limit}" for limit, kinds in faults.items() for kind in kinds.split(",") if kind)
    image = f"image: {install.image(engine)}" if runtime == "container" else ""
    return SCENARIO.format(
        engine=engine,
        version=RELEASES[engine],
        runtime=runtime,
        image=image,
        faults=asked,
        axis=AXIS[engine],
        limits=list(faults),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines' failing sweeps, at the same time: (lab, scenario's file, what the command said) by engine."""

    def run(engine):
        home = lab(tmp_path_factory.mktemp(engine), "podman" if engine == "sglang" else "docker", NEWEST)
        # above every number that stands for something else
        base = 100 if AXIS[engine] == "max_num_tokens" else 0
        faults = {base + limit: fault for limit, (fault, _, _) in sorted(FAILURES[engine].items())}
        file = home.write("failing", scenario(engine, RUNTIMES[engine], faults))
        return home, file, home.run("batchlab", "run", file)

    with ThreadPoolExecutor(3) as three:
        return dict(zip(FAILURES, three.map(run, FAILURES), strict=True))


@pytest.mark.parametrize("engine", FAILURES)
def test_every_failure_says_what_it_was_and_the_sweep_goes_on(runs, engine):
    home, file, done = runs[engine]
    assert done.returncode == 1, done.stderr  # some cells measured, some engines could not start
    cells = {row[AXIS[engine]] % 100: row for row in home.frame(file).to_dict("records")}
    for limit, (fault, where, said) in FAILURES[engine].items():
        cell = cells[limit]
        reasons = [r for r in cell["invalid_reasons"] if not any(t in r for t in TIMING)]
        if where == "start":
            assert not cell["recorded"], (fault, reasons)
            assert re.search(said, done.stderr), (fault, done.stderr)
        elif where == "invalid":
            assert cell["recorded"] and any(re.search(said, r) for r in reasons), (fault, reasons, done.stderr)
        else:
            assert cell["recorded"] and reasons == [], (fault, reasons, done.stderr)


@pytest.mark.parametrize("engine", FAILURES)
def test_a_failed_start_shows_the_engines_own_last_lines(runs, engine):
    assert LAST_WORDS[engine] in runs[engine][2].stderr


def test_the_records_say_stand_in(runs):
    for home, file, _ in runs.values():
        assert home.frame(file)["engine_version"].str.endswith("+standin").all()


def test_nothing_is_left_behind(runs):
    assert [home.left() for home, _, _ in runs.values()] == [[], [], []]


def wait_gone(home: Lab, limit_s: float) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := home.left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill_in_the_middle(engine: str, runtime: str, limit: int, home: Lab) -> list[str]:
    """What is left when a run, whose engine ignores SIGTERM, is ended with SIGKILL."""
    file = home.write("stubborn", scenario(engine, runtime, {limit: "ignore-sigterm"}))
    with home.start("batchlab", "run", file) as child:
        deadline = time.monotonic() + 60
        while not re.search("Connected|ready to roll", log(home)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert home.left()
        child.send_signal(signal.SIGKILL)
    return wait_gone(home, 45)


def test_an_engine_that_ignores_sigterm_does_not_outlive_a_killed_run(tmp_path_factory):
    """TGI's router has a process group of its own; what runs in a container is nobody's child."""
    cases = [("tgi", "local", 16), ("sglang", "container", 64)]
    homes = [lab(tmp_path_factory.mktemp(engine)) for engine, _, _ in cases]
    with ThreadPoolExecutor(2) as two:
        left = list(two.map(kill_in_the_middle, *zip(*cases, strict=True), homes))
    assert left == [[], []]


def log(home: Lab) -> str:
    return "".join(file.read_text(errors="replace") for file in home.home.glob("data/results/cpu/.*.log"))
