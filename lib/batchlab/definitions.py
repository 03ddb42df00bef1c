"""What other benchmark programs would have printed for the same run, by their own definitions.

`compare` takes one cell's requests (records.REQUESTS) and works out, for each of TOOLS, the figures that the program
prints: what it counts from, which tokens and chunks it divides by, how it averages over requests, which span it divides
throughput by, and how it takes a percentile. `DEFINITIONS` says each of these in words, with the place in the program's
source that it was read from. tests/test_definitions.py works them out by hand and holds them against the programs'
own functions where they are installed.

What a record does not hold cannot be told apart: chunks without a token (a role, an empty text), which vLLM counts as
a first chunk; the length that AIPerf's own tokenizer gives an answer; GuideLLM's warm-up and cool-down, both off by
default.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchlab import metrics

METRICS = {
    "ttft_mean_ms": "mean TTFT (ms)",
    "ttft_p99_ms": "p99 TTFT (ms)",
    "tpot_mean_ms": "mean TPOT (ms)",
    "itl_mean_ms": "mean ITL (ms)",
    "e2e_mean_ms": "mean latency (ms)",
    "e2e_p99_ms": "p99 latency (ms)",
    "duration_s": "duration (s)",
    "output_throughput_tok_s": "output throughput (tok/s)",
    "request_throughput_req_s": "request throughput (req/s)",
}


def batchlab(requests: pd.DataFrame) -> dict[str, float]:
    """This project's definitions (metrics.py): everything from the scheduled time, tokens and not chunks."""
    good = requests[metrics.completed(requests)]
    ttft, tpot, e2e = metrics.ttft_ms(good), metrics.tpot_ms(good), metrics.e2e_ms(good)
    gaps = _gaps(good)
    return _rates(good, metrics.duration_s(requests)) | {
        "ttft_mean_ms": ttft.mean(),
        "ttft_p99_ms": ttft.quantile(0.99),
        "tpot_mean_ms": tpot.mean(),
        "itl_mean_ms": math.nan if gaps is None else (gaps[:, 0] / gaps[:, 1]).mean(),
        "e2e_mean_ms": e2e.mean(),
        "e2e_p99_ms": e2e.quantile(0.99),
    }


def vllm(requests: pd.DataFrame) -> dict[str, float]:
    """vllm bench serve 0.32.0: from the send; TPOT over all tokens but one; ITL a chunk; duration to the last answer's
    very end."""
    good = requests[metrics.completed(requests)]
    ttft, e2e = _since_sent(good, "first_s"), _since_sent(good, "last_s")
    span = requests["end_s"].max() - requests["scheduled_s"].min()
    return _rates(good, span) | {
        "ttft_mean_ms": ttft.mean(),
        "ttft_p99_ms": _linear(ttft, 99),
        "tpot_mean_ms": _over_all_but_one(good).mean(),
        "itl_mean_ms": _chunk_gap(good),
        "e2e_mean_ms": e2e.mean(),
        "e2e_p99_ms": _linear(e2e, 99),
    }


def guidellm(requests: pd.DataFrame) -> dict[str, float]:
    """GuideLLM 0.8.1: TPOT holds the wait for the first token; TPOT and ITL are averaged over tokens, not requests; the
    latency ends with the stream; percentiles are values that occurred."""
    good = requests[metrics.completed(requests)]
    ttft, latency = _since_sent(good, "first_s"), _since_sent(good, "end_s")
    several = good[good["tokens"] > 1]
    decoding_ms = 1000 * (several["last_s"] - several["first_s"]).sum()
    return _rates(good, requests["end_s"].max() - requests["sent_s"].min()) | {
        "ttft_mean_ms": ttft.mean(),
        "ttft_p99_ms": _occurring(ttft, 99),
        "tpot_mean_ms": _since_sent(good, "last_s").sum() / good["tokens"].sum() if len(good) else math.nan,
        "itl_mean_ms": decoding_ms / (several["tokens"] - 1).sum() if len(several) else math.nan,
        "e2e_mean_ms": latency.mean(),
        "e2e_p99_ms": _occurring(latency, 99),
    }


def aiperf(requests: pd.DataFrame) -> dict[str, float]:
    """AIPerf 0.13.0: from the send; its inter-token latency is a TPOT over all tokens but one, a mean over requests;
    duration to the last chunk with content."""
    good = requests[metrics.completed(requests)]
    ttft, latency = _since_sent(good, "first_s"), _since_sent(good, "last_s")
    return _rates(good, good["last_s"].max() - good["sent_s"].min()) | {
        "ttft_mean_ms": ttft.mean(),
        "ttft_p99_ms": _linear(ttft, 99),
        "tpot_mean_ms": _over_all_but_one(good).mean(),
        "itl_mean_ms": _chunk_gap(good),
        "e2e_mean_ms": latency.mean(),
        "e2e_p99_ms": _linear(latency, 99),
    }


TOOLS: dict[str, Callable[[pd.DataFrame], dict[str, float]]] = {
    "batchlab": batchlab,
    "vLLM 0.32.0": vllm,
    "GuideLLM 0.8.1": guidellm,
    "AIPerf 0.13.0": aiperf,
}


def compare(requests: pd.DataFrame) -> pd.DataFrame:
    """A row a metric of METRICS, a column a tool of TOOLS; NaN where the record does not tell (ITL without chunks)."""
    told = {tool: figures(requests) for tool, figures in TOOLS.items()}
    return pd.DataFrame({tool: [found[m] for m in METRICS] for tool, found in told.items()}, index=list(METRICS))


@dataclass(frozen=True, slots=True)
class Definition:
    """How one tool comes to one metric. `source`: file and function of the program, at TOOLS' version."""

    metric: str
    tool: str
    formula: str
    source: str


_VLLM = "vllm/benchmarks/"
_STATS = "guidellm/schemas/base/request_stats.py, GenerativeRequestStats."
_AIPERF = "aiperf/metrics/types/"
DEFINITIONS = (
    Definition("TTFT", "batchlab", "first chunk that holds a token − scheduled time", "batchlab/metrics.py, ttft_ms"),
    Definition(
        "TTFT",
        "vLLM 0.32.0",
        "first chunk with a choice, even without text − send; what a request waits in the client is not in it",
        f"{_VLLM}lib/endpoint_request_func.py, async_request_openai_completions",
    ),
    Definition("TTFT", "GuideLLM 0.8.1", "first chunk with a token − send", f"{_STATS}time_to_first_token_ms"),
    Definition("TTFT", "AIPerf 0.13.0", "first chunk with content − send", f"{_AIPERF}ttft_metric.py"),
    Definition(
        "TPOT",
        "batchlab",
        "(last token − first token) / (n − k), k tokens in the first chunk; mean over requests",
        "batchlab/metrics.py, tpot_ms",
    ),
    Definition(
        "TPOT",
        "vLLM 0.32.0",
        "(last chunk − first chunk) / (n − 1); mean over requests",
        f"{_VLLM}serve.py, calculate_metrics",
    ),
    Definition(
        "TPOT",
        "GuideLLM 0.8.1",
        "(last token − send) / n, the wait for the first token included; mean over tokens",
        f"{_STATS}time_per_output_token_ms; benchmark/schemas/metrics.py, GenerativeMetrics.compile",
    ),
    Definition(
        "TPOT",
        "AIPerf 0.13.0",
        "its inter-token latency: (last − first chunk) / (n − 1), n − k with --per-chunk-usage; mean over requests",
        f"{_AIPERF}inter_token_latency_metric.py",
    ),
    Definition(
        "ITL",
        "batchlab",
        "gap between chunks / tokens of the later one; mean over gaps",
        "batchlab/client/rows.py, _gaps",
    ),
    Definition(
        "ITL",
        "vLLM 0.32.0",
        "gap between chunks, however many tokens they hold; mean over gaps",
        f"{_VLLM}serve.py, calculate_metrics",
    ),
    Definition(
        "ITL",
        "GuideLLM 0.8.1",
        "(last token − first token) / (n − 1); mean over tokens",
        f"{_STATS}inter_token_latency_ms",
    ),
    Definition(
        "ITL",
        "AIPerf 0.13.0",
        "called inter-chunk latency: gap between chunks; mean over gaps",
        f"{_AIPERF}inter_chunk_latency_metric.py",
    ),
    Definition("latency", "batchlab", "last token − scheduled time", "batchlab/metrics.py, e2e_ms"),
    Definition("latency", "vLLM 0.32.0", "last chunk with a choice − send", f"{_VLLM}lib/endpoint_request_func.py"),
    Definition(
        "latency",
        "GuideLLM 0.8.1",
        "end of the stream − send: the usage chunk and [DONE] are waited for",
        f"{_STATS}request_latency",
    ),
    Definition("latency", "AIPerf 0.13.0", "last chunk with content − send", f"{_AIPERF}request_latency_metric.py"),
    Definition(
        "throughput",
        "batchlab",
        "output tokens of completed requests / (last token − first send)",
        "batchlab/metrics.py, duration_s",
    ),
    Definition(
        "throughput",
        "vLLM 0.32.0",
        "the same tokens / (end of the last answer − start of the first request's making)",
        f"{_VLLM}serve.py, benchmark",
    ),
    Definition(
        "throughput",
        "GuideLLM 0.8.1",
        "the same tokens / (end of the last stream − first send), less warm-up and cool-down where set",
        "guidellm/schemas/base/statistics.py, DistributionSummary.rate_distribution_from_timings",
    ),
    Definition(
        "throughput",
        "AIPerf 0.13.0",
        "tokens by its own tokenizer, or by usage with --use-server-token-count / (last content − first send)",
        f"{_AIPERF}output_token_throughput_metrics.py; benchmark_duration_metric.py",
    ),
    Definition("percentile", "batchlab", "linear between neighbours", "pandas, Series.quantile"),
    Definition("percentile", "vLLM 0.32.0", "linear between neighbours", f"{_VLLM}serve.py (numpy.percentile)"),
    Definition(
        "percentile",
        "GuideLLM 0.8.1",
        "the smallest value that so many are not above; prints p95",
        "guidellm/schemas/base/statistics.py, Percentiles.from_pdf",
    ),
    Definition(
        "percentile",
        "AIPerf 0.13.0",
        "linear between neighbours",
        "aiperf/metrics/metric_dicts.py, metric_result_from_array",
    ),
)


def _rates(good: pd.DataFrame, span: float) -> dict[str, float]:
    if not span > 0:
        return dict.fromkeys(("duration_s", "output_throughput_tok_s", "request_throughput_req_s"), math.nan)
    return {
        "duration_s": span,
        "output_throughput_tok_s": good["tokens"].sum() / span,
        "request_throughput_req_s": len(good) / span,
    }


def _since_sent(good: pd.DataFrame, column: str) -> pd.Series:
    return 1000.0 * (good[column] - good["sent_s"])


def _over_all_but_one(good: pd.DataFrame) -> pd.Series:
    """Milliseconds a token over n − 1 of them, whatever came in the first chunk; requests of one token are left out."""
    several = good[good["tokens"] > 1]
    return 1000.0 * (several["last_s"] - several["first_s"]) / (several["tokens"] - 1)


def _gaps(good: pd.DataFrame) -> np.ndarray | None:
    """(gap in ms, tokens of the later chunk) for every two chunks of all requests; None where chunks were not kept."""
    kept = [(u, t) for u, t in zip(good["chunk_us"], good["chunk_tokens"], strict=True) if u is not None]
    if not kept or len(kept) < len(good):
        return None
    return np.concatenate([np.column_stack((np.diff(u) / 1000.0, np.asarray(t)[1:])) for u, t in kept])


def _chunk_gap(good: pd.DataFrame) -> float:
    gaps = _gaps(good)
    return math.nan if gaps is None or not len(gaps) else float(gaps[:, 0].mean())


def _linear(values: pd.Series, q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else math.nan


def _occurring(values: pd.Series, q: float) -> float:
    """The smallest value at which the share of values not above it reaches q%."""
    ordered = np.sort(values.to_numpy(float))
    if not len(ordered):
        return math.nan
    shares = np.cumsum(np.full(len(ordered), 1 / len(ordered)))
    return float(ordered[min(np.searchsorted(shares, q / 100, side="left"), len(ordered) - 1)])
