"""A full small sweep and its report on stand-ins of three engines side by side: no number here is of an engine."""

import json
import re
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from bs4 import BeautifulSoup

from batchlab.engines.process import free_port, healthy
from batchlab.models import materialize
from batchlab.plots.style import COLOURS
from standins import install
from standins.lab import VERSION, lab

ENGINES = ("tensorrt-llm", "tgi", "sglang")
NOTEBOOKS = ("02", "03", "04", "05")
SCENARIO = f"""
title: Stand-ins side by side
question: Does the report show three engines on the same axes?
hardware: cpu
model: tiny-llama
engines:
  tensorrt-llm: {{version: {VERSION["tensorrt-llm"]}, max_model_len: 64}}
  tgi: {{version: {VERSION["tgi"]}, max_model_len: 64, runtime: container, image: "{install.image("tgi")}"}}
  sglang: {{version: {VERSION["sglang"]}, max_model_len: 64}}
datasets:
  prefill-heavy: {{input_len: 24, output_len: 8}}
  decode-heavy: {{input_len: 8, output_len: 24}}
defaults: {{max_batch_size: 8, max_num_tokens: 64}}
num_requests: {{waves: 2, min: 6, max: 16}}
repeats: 1
keep_chunks: true
sweeps:
  - {{name: throughput, max_batch_size: [2, 8], max_num_tokens: [32, 64]}}
  - {{name: latency, datasets: [decode-heavy], request_rate: 40, max_batch_size: [2, 8], num_requests: 12}}
"""
TIMING = ("sent late", "ms late", "too late to time", "busy", "arrivals took")  # of a machine under load


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    """The sweep measured and its report rendered, in a repository of its own.

    The engines are measured at the same time, each into a store of its own, for stand-ins mostly sleep.
    """
    home = lab(tmp_path_factory.mktemp("side"))
    file = home.write("side-by-side", SCENARIO)
    stores = {engine: home.home / f"store-{engine}" for engine in ENGINES}

    def measure(engine):
        return home.run("batchlab", "run", file, "--engine", engine, BATCHLAB_RESULTS=str(stores[engine]))

    with ThreadPoolExecutor(3) as three:
        for done in three.map(measure, ENGINES):
            assert done.returncode == 0, done.stderr
    together = home.home / "data/results/cpu"
    together.mkdir(parents=True)
    for record in home.home.glob("store-*/cpu/*.zip"):
        record.rename(together / record.name)
    with ThreadPoolExecutor(2) as two:
        execute = ("batchlab.report", "execute")
        for built in two.map(lambda name: home.run(*execute, name, "--scenario", "side-by-side"), NOTEBOOKS):
            assert built.returncode == 0, built.stderr
    rendered = home.run("batchlab.report", "render", "--scenario", "side-by-side")
    assert rendered.returncode == 0, rendered.stderr
    return home, file


@pytest.fixture(scope="module")
def page(side):
    home, _ = side
    return BeautifulSoup((home.home / "build/side-by-side/report.html").read_text(), "html.parser")


def test_every_cell_of_every_engine_is_exact(side):
    home, file = side
    frame = home.frame(file)
    assert set(frame["engine"]) == set(ENGINES) and frame["recorded"].all()
    for row in frame.to_dict("records"):
        reasons = [r for r in row["invalid_reasons"] if not any(t in r for t in TIMING)]
        assert reasons == [], (row["engine"], row["sweep"], reasons)
        assert row["completed"] == row["num_requests"] and row["failed"] == 0


def test_both_limits_act(side):
    """The engines schedule as their simulated policies do, so the running batch reaches and obeys the batch limit."""
    home, file = side
    study = home.study(file)
    for row in home.frame(file).query("sweep == 'throughput'").to_dict("records"):
        iterations = study.iterations(row["cell"])
        assert iterations["running"].max() <= row["max_batch_size"]
        if row["dataset"] == "decode-heavy" or row["max_batch_size"] == 2:
            assert iterations["running"].max() == row["max_batch_size"], row
        if row["engine"] != "tgi":  # whose iterations nobody tells
            tokens = iterations["prefill_tokens"] + iterations["decode_tokens"]
            assert tokens.max() <= row["max_num_tokens"]
            requests = study.requests(row["cell"])
            assert iterations["prefill_tokens"].sum() == requests["input_len"].sum()
            # SGLang's end is noticed an iteration late, in which the request decodes once more
            assert iterations["decode_tokens"].sum() + len(requests) >= requests["tokens"].sum()


def test_the_records_say_how_each_engine_was_started(side):
    home, file = side
    study = home.study(file)
    seen = {}
    for cell in study.cells("throughput"):
        engine = study.provenance(cell.id)["engine"]
        seen[cell.engine] = engine
        assert engine["version"] == engine["version_told"] == VERSION[cell.engine]
    assert seen["tensorrt-llm"]["yaml"]["kv_cache_config"]["enable_block_reuse"] is False
    published = seen["tgi"]["command"][seen["tgi"]["command"].index("-p") + 1]
    assert published.startswith("127.0.0.1:") and published.endswith(":80")
    assert seen["tgi"]["environment"]["PREFILL_CHUNKING"] == "0"
    assert "--disable-radix-cache" in seen["sglang"]["command"]


def test_the_report_names_every_engine_and_says_that_it_is_a_stand_in(page):
    text = page.get_text(" ")
    for name, engine in (("TensorRT-LLM", "tensorrt-llm"), ("TGI", "tgi"), ("SGLang", "sglang")):
        assert f"{name} {VERSION[engine]}" in text
    about = json.loads(page.find(id="batchlab-report").string)
    assert about["cells"]["valid"] + about["cells"]["invalid"] == 24 and about["cells"]["missing"] == 0


def test_engines_share_the_axes_in_their_own_colours(side):
    """One panel a dataset with all three engines in it, in the vector figure's colours."""
    home, _ = side
    for name, panels in (
        ("throughput-max-batch-size", 2),
        ("throughput-max-num-tokens", 2),
        ("ttft-max-batch-size", 1),
        ("tpot-max-batch-size", 2),
        ("running-batch-max-batch-size", 2),
    ):
        drawn = (home.home / f"figures/side-by-side/{name}.svg").read_text()
        axes = re.split(r'<g id="axes_\d+">', drawn)[1:]
        assert len(axes) == panels, name
        for panel in axes:
            assert all(f"stroke: {COLOURS[engine].lower()}" in panel.lower() for engine in ENGINES), name


def test_captions_and_tables_tell_the_engines_apart(page):
    captions = [c.get_text() for c in page.find_all("figcaption")]
    told = [c for c in captions if c.startswith("measured, SGLang")]
    assert told and all("TensorRT-LLM 1.3.0+standin, TGI" in c for c in told)
    heads = [[cell.get_text() for cell in table.find_all("th")] for table in page.find_all("table")]
    assert sum(head[:3] == ["engine", "dataset", "max_batch_size"] for head in heads) >= 4


def test_nothing_is_left_behind(side):
    assert side[0].left() == []


def test_an_engine_that_already_runs_is_measured_the_same_way(tmp_path):
    """Attach: SGLang's stand-in, started by hand, asked by its address, and still there afterwards."""
    home, port, model = lab(tmp_path), free_port(), materialize("tiny-llama")
    flags = ["--model-path", model.path, "--load-format", "dummy", "--port", port, "--max-running-requests", 4,
             "--chunked-prefill-size", 64, "--disable-radix-cache", "--enable-metrics"]  # fmt: skip
    python = home.env["BATCHLAB_SGLANG_PYTHON"]
    server = subprocess.Popen([python, "-m", "sglang.launch_server", *map(str, flags)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not healthy(f"http://127.0.0.1:{port}/health") and time.monotonic() < deadline:
            time.sleep(0.05)
        file = home.write(
            "attached",
            f"""
title: Whatever runs already
hardware: cpu
model: tiny-llama
engines:
  attach: {{version: {VERSION["sglang"]}, base_url: "http://127.0.0.1:{port}",
            limits: {{max_batch_size: 4, max_num_tokens: 64}}}}
datasets: {{short: {{input_len: 8, output_len: 24}}}}
defaults: {{max_batch_size: 4, max_num_tokens: 64}}
num_requests: 8
repeats: 1
sweeps: [{{name: throughput}}]
""",
        )
        done = home.run("batchlab", "run", file)
        (row,) = home.frame(file).to_dict("records")
        reasons = [r for r in row["invalid_reasons"] if not any(t in r for t in TIMING)]
        assert done.returncode == 0 and row["recorded"] and reasons == [], (done.stderr, reasons)
        assert row["completed"] == 8 and row["running_batch_mean"] <= 4
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    finally:
        server.terminate()
        server.wait(10)
