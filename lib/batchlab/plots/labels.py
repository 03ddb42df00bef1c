"""Words for metrics, axes and datasets, with their units: the same in figures, tables and readings."""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

STATISTICS = {
    "mean": "mean",
    "p50": "median",
    "p90": "p90",
    "p99": "p99",
    "min": "lowest",
    "max": "highest",
}
METRICS = {
    "output_throughput_tok_s": ("output throughput", "tok/s"),
    "steady_throughput_tok_s": ("output throughput, steady state", "tok/s"),
    "request_throughput_req_s": ("request throughput", "req/s"),
    "running_batch_mean": ("mean running batch size", "requests"),
    "running_batch_time_mean": ("running batch size, time-weighted mean", "requests"),
    "batch_efficiency": ("running batch / max_batch_size", ""),
    "kv_use_peak": ("peak KV cache use", ""),
    "preemptions": ("preemptions", ""),
    "gpu_memory_peak_gib": ("peak GPU memory", "GiB"),
    "duration_s": ("duration", "s"),
    "energy_j": ("GPU energy", "J"),
    "energy_per_output_token_j": ("GPU energy per output token", "J"),
}
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end latency", "itl": "inter-token latency"}
OTHER_AXIS = {"max_batch_size": "max_num_tokens", "max_num_tokens": "max_batch_size"}


def metric_words(metric: str) -> tuple[str, str]:
    """("mean TTFT", "ms") for "ttft_mean_ms"; a metric that has no words keeps its own name."""
    if metric in METRICS:
        return METRICS[metric]
    match = re.fullmatch(r"(\w+?)_(mean|p50|p90|p99|min|max)_(ms|s)", metric)
    if match and match[1] in LATENCIES:
        return f"{STATISTICS[match[2]]} {LATENCIES[match[1]]}", match[3]
    return metric, ""


def axis_label(metric: str) -> str:
    """ "Mean TTFT (ms)"."""
    words, unit = metric_words(metric)
    return (words[0].upper() + words[1:]) + (f" ({unit})" if unit else "")


def number(value: Any) -> str:
    """Three significant digits, thousands separated: 0.0123, 1.23, 12.3, 123, 1,234; missing is a dash."""
    if value is None or pd.isna(value):
        return "–"
    value = float(value)
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def whole(value: Any) -> str:
    """A limit or a count, exact: 1024 stays 1024, so that it can be searched for and typed again."""
    return "–" if value is None or pd.isna(value) else f"{int(value)}"


def length(value: Any) -> str:
    """A token length, fixed or "from to"."""
    if isinstance(value, (list, tuple)):
        return f"{value[0]}–{value[1]}"
    if isinstance(value, Mapping):
        return f"~{value.get('median', '?')}"
    return whole(value) if not isinstance(value, str) else value


def dataset_title(row: Mapping[str, Any]) -> str:
    """ "prefill-heavy: 768 in, 128 out" from a row's dataset, input_len and output_len."""
    lengths = [row.get("input_len"), row.get("output_len")]
    if any(v is None or (not isinstance(v, (list, tuple, Mapping, str)) and pd.isna(v)) for v in lengths):
        return str(row["dataset"])
    return f"{row['dataset']}: {length(lengths[0])} in, {length(lengths[1])} out"
