"""Polling an engine's Prometheus page: names of several engines, samples on the client's clock, and what they mean."""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
import pytest

from batchlab import metrics, paths, records, scrape, validity
from batchlab.errors import UsageError
from batchlab.scenario import Limits
from batchlab.scrape import Sample, Samples
from batchlab.store import Store
from support.ground_truth import running
from test_metrics import frame, request
from test_store import CELLS, META

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 7.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 12.0
"""
OLD_VLLM = "vllm:num_requests_running 4.0\nvllm:gpu_cache_usage_perc 0.5\n"
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 6
tgi_queue_size 2
tgi_batch_current_max_tokens 1200
tgi_batch_max_total_tokens 4800
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.1
sglang:num_retracted_requests_total{model_name="m"} 2.0
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM.format(running="8.0"), (8, 3, 0.25, 7)),
        (OLD_VLLM, (4, None, 0.5, None)),
        (TGI, (6, 2, 0.25, None)),
        (SGLANG, (5, 1, 0.1, 2)),
    ],
)
def test_known_names_of_each_engine(page, expected):
    found = scrape.read(page, 5)
    assert (found.running, found.waiting, found.kv_use, found.preemptions) == expected and found.time_ns == 5


def test_ranks_behind_one_page_are_added_up():
    two = VLLM.format(running="8.0") + VLLM.format(running="2.0").replace('engine="0"', 'engine="1"')
    found = scrape.read(two, 0)
    assert (found.running, found.waiting, found.kv_use, found.preemptions) == (10, 6, 0.25, 14)


def test_a_page_without_a_running_batch_is_none():
    assert scrape.read("process_cpu_seconds_total 3.0\n", 0) is None and scrape.read("", 0) is None


def samples(*values, step_s=1.0, counted=None):
    found = [
        Sample(round(i * step_s * 1e9), v, 0.0, 0.5, None if counted is None else counted[i])
        for i, v in enumerate(values)
    ]
    return Samples("http://x/metrics", step_s, found)


def polled(samples, limits=None):
    return records.table(samples.rows(0, limits), records.ITERATIONS).to_pandas()


def test_the_mean_running_batch_of_samples_over_what_ran_and_over_time():
    found = polled(samples(0, 4, 8, 0, 6, 0))
    mean, weighted = metrics.running_batch(found)
    assert mean == pytest.approx((4 + 8 + 6) / 3)
    assert weighted == pytest.approx((4 + 8 + 0 + 6) / 4)  # from the first that ran to the end of the last that did


def test_uneven_samples_weigh_by_the_time_they_stand_for():
    uneven = Samples("x", 1.0, [Sample(0, 2, 0, 0, 0), Sample(10**9, 6, 0, 0, 0), Sample(4 * 10**9, 0, 0, 0, 0)])
    assert metrics.running_batch(polled(uneven))[1] == pytest.approx((2 * 1 + 6 * 3) / 4)


def test_preemptions_are_what_a_counter_grew_by_and_a_restart_is_no_negative():
    found = polled(samples(1, 1, 1, 0, counted=[5, 7, 1, 2]))
    assert found["preemptions"].tolist() == [2, 0, 1]


def test_samples_are_marked_and_claim_no_more_than_they_know():
    requests = frame(*[request(i, first=0.5 + i / 10, last=3.0) for i in range(20)])
    summary = metrics.summary(requests, polled(samples(*[4] * 40, 0, step_s=0.1)), max_batch_size=8)
    assert summary["running_batch_mean"] == 4 and summary["batch_efficiency"] == 0.5 and summary["kv_use_peak"] == 0.5
    assert summary["polled_samples"] == 40 and summary["iterations"] is None
    assert summary["steady_throughput_tok_s"] is None and summary["output_throughput_half_tok_s"] is None
    traced = metrics.summary(requests, records.table([], records.ITERATIONS).to_pandas(), max_batch_size=8)
    assert traced["polled_samples"] is None and traced["iterations"] == 0


def test_samples_are_stored_as_they_are(tmp_path):
    table = records.table(samples(3, 3, 0).rows(0), records.ITERATIONS)
    store = Store(tmp_path)
    store.save(CELLS[0], META, records.table([], records.REQUESTS), table)
    assert store.load(CELLS[0].id).iterations.equals(table)
    assert metrics.is_polled(store.load(CELLS[0].id).iterations.to_pandas())


def test_validity_checks_the_batch_and_asks_for_no_more_than_was_polled():
    cell = CELLS[0]
    requests = frame(request(0, tokens=4, output_len=4))
    told = validity.reasons(cell, requests, polled(samples(9, 0)), {}, traced=True, by_request=False)
    assert any("running batch reached 9" in reason for reason in told)
    fine = Limits(max_batch_size=cell.max_batch_size, max_num_tokens=cell.max_num_tokens)
    for limits in (None, fine):
        told = validity.reasons(cell, requests, polled(samples(1, 0), limits), {}, traced=True, by_request=False)
        assert told == []
    other = Limits(max_batch_size=1, max_num_tokens=7)
    told = validity.reasons(cell, requests, polled(samples(1, 0), other), {}, traced=True, by_request=False)
    assert any("limits were 1/7" in reason for reason in told)


def test_energy_is_per_output_token_of_completed_requests_and_null_without_a_gpu():
    both = frame(request(0), request(1, error="broken", first=None, last=None, tokens=5))
    nothing = records.table([], records.ITERATIONS).to_pandas()
    found = metrics.summary(both, nothing, max_batch_size=8, energy_j=33.0)
    assert found["energy_j"] == 33.0 and found["energy_per_output_token_j"] == pytest.approx(3.0)
    none = metrics.summary(both, nothing, max_batch_size=8)
    assert none["energy_j"] is None and none["energy_per_output_token_j"] is None


# over HTTP -------------------------------------------------------------------------------------------------------


@contextmanager
def page(pages):
    """A server that gives these pages one after the other, the last one for ever; status 500 for an empty one."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = (left.pop(0) if len(left) > 1 else left[0]).encode()
            self.send_response(200 if body else 500)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_polling_is_on_the_clients_clock_and_survives_a_bad_page():
    pages = [VLLM.format(running=f"{n}.0") for n in (0, 2)] + ["", VLLM.format(running="4.0")]
    before = time.monotonic_ns()
    with page(pages) as url, scrape.scraping(url, period_s=0.02) as found:
        while len(found.found) < 5:
            time.sleep(0.01)
    after = time.monotonic_ns()
    assert [s.running for s in found.found][:3] == [0, 2, 4] and found.failed == 1
    times = [s.time_ns for s in found.found]
    assert times == sorted(times) and before < times[0] and times[-1] < after
    told = found.told()
    assert told["samples"] == len(times) and told["polled"].endswith("/metrics") and told["period_s"] == 0.02
    traced = found.traced(before, Limits(max_batch_size=8, max_num_tokens=64))
    assert traced.source == "metrics" and traced.limits == [(8, 64)] and traced.facts == told
    idle = Samples("x", 1.0, [Sample(0, 0, 0, 0, 0), Sample(1, 0, 0, 0, 0)])
    assert idle.traced(0).source == "none"


def test_what_cannot_be_polled_is_said_at_once():
    def start(url):
        with scrape.scraping(url):
            pass

    with pytest.raises(UsageError, match=r"metrics url http://127\.0\.0\.1:9/metrics cannot be read"):
        start("http://127.0.0.1:9")
    with page(["other 1.0\n"]) as url, pytest.raises(UsageError, match="tells no running batch; known are vllm:"):
        start(url)
    with pytest.raises(UsageError, match="must look like"):
        start("ftp://x")


def test_replay_prints_the_polled_batch():
    flags = "--api openai-completions --model tiny-llama --input-len 4 --output-len 20 --num-requests 4"
    with page([VLLM.format(running="6.0")]) as metrics_url, running() as server:
        url = server.url(first_ms=50, gap_ms=20, usage="continuous")
        urls = ("--base-url", url, "--metrics-url", metrics_url)
        done = subprocess.run(
            [sys.executable, "-m", "batchlab", "replay", *flags.split(), "--request-rate", "inf", "--json", *urls],
            capture_output=True,
            text=True,
            cwd=paths.ROOT,
            timeout=60,
        )
    summary = json.loads(done.stdout)
    assert done.returncode == 0 and summary["running_batch_mean"] == 6 and summary["polled_samples"] >= 1
    assert "not from its iterations" in done.stderr
    assert pd.isna(summary["steady_throughput_tok_s"]) and summary["valid"]
