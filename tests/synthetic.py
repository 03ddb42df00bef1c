"""Test data in the shape of a study's frames. Invented numbers: for tests only, never shown as results."""

import itertools
from typing import Any

import numpy as np
import pandas as pd

from batchlab import metrics

BATCHES = (1, 2, 4, 8, 16, 32)
TOKENS = (128, 256, 512, 1024)
DATASETS = {"prefill-heavy": (96, 16), "decode-heavy": (16, 96)}
DEFAULTS = {"max_batch_size": 16, "max_num_tokens": 512}


def row(
    dataset: str,
    batch: int,
    tokens: int,
    repeat: int,
    sweep: str,
    engine: str = "vllm",
    evidence: str = "measured",
) -> dict[str, Any]:
    """One valid cell whose numbers rise and flatten the way a serving engine's do."""
    input_len, output_len = DATASETS[dataset]
    noise = 1 + 0.02 * (repeat - 1)
    running = min(batch, 20)
    tpot = (2 + 0.25 * running) * noise
    queue = 4000 / min(batch, 8) if sweep == "throughput" else 300 / min(batch, 8)
    values = {
        "cell": f"{dataset}-{batch}-{tokens}-{repeat}-{sweep}-{engine}",
        "engine": engine,
        "engine_version": "0.32.0",
        "hardware": "cpu",
        "evidence": evidence,
        "transport": "http" if evidence == "measured" else None,
        "model": "tiny-llama",
        "dataset": dataset,
        "input_len": input_len,
        "output_len": output_len,
        "num_requests": 64,
        "max_batch_size": batch,
        "max_num_tokens": tokens,
        "request_rate": np.inf if sweep == "throughput" else 4.0,
        "seed": repeat,
        "repeat": repeat,
        "sweep": sweep,
        "recorded": True,
        "machine": "test machine, 2 cores",
        "commit": "0123abc",
        "measured_at": "2026-11-29T22:00:00Z",
        "output_throughput_tok_s": 1000 * running / tpot,
        "steady_throughput_tok_s": 1050 * running / tpot,
        "request_throughput_req_s": 1000 * running / tpot / output_len,
        "tpot_mean_ms": tpot,
        "tpot_min_ms": tpot * 0.5,
        "tpot_max_ms": tpot * (1.5 + 0.2 * running),
        "running_batch_mean": running * 0.95,
        "running_batch_time_mean": running * 0.97,
        "batch_efficiency": running * 0.95 / batch,
        "kv_use_peak": min(1.0, 0.03 * running),
        "preemptions": 0,
        "gpu_memory_peak_gib": None,
        "completed": 64,
        "failed": 0,
        "duration_s": 12.0,
        "valid": True,
        "invalid_reasons": [],
    }
    for stat, factor in (("mean", 1), ("p50", 0.9), ("p90", 1.7), ("p99", 2.1)):
        values[f"ttft_{stat}_ms"] = (20 + queue) * factor * noise
        values.setdefault(f"tpot_{stat}_ms", tpot * factor)
        if stat != "mean":
            values[f"e2e_{stat}_ms"] = (20 + queue + tpot * output_len) * factor * noise
    return dict.fromkeys((*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS)) | values


def cells(sweep: str = "throughput", engine: str = "vllm", evidence: str = "measured") -> pd.DataFrame:
    """Both datasets, a cross through the defaults, three repeats; all recorded and valid."""
    cross = [(b, DEFAULTS["max_num_tokens"]) for b in BATCHES]
    cross += [(DEFAULTS["max_batch_size"], t) for t in TOKENS if t != DEFAULTS["max_num_tokens"]]
    return pd.DataFrame(
        [
            row(d, b, t, r, sweep, engine, evidence)
            for r, d, (b, t) in itertools.product(range(3), DATASETS, cross)
        ]
    )


METRIC_COLUMNS = [
    k for k in (*metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS) if k not in ("valid", "invalid_reasons")
]


def make_missing(frame: pd.DataFrame, where: pd.Series) -> pd.DataFrame:
    """The frame with these rows as a study shows cells that have no record."""
    frame = frame.astype(dict.fromkeys(METRIC_COLUMNS, float))
    frame.loc[where, METRIC_COLUMNS] = np.nan
    for column in ("machine", "commit", "measured_at"):
        frame.loc[where, column] = None
    frame.loc[where, ["valid", "recorded"]] = False
    frame["invalid_reasons"] = [
        ["not measured"] if gone else reasons
        for gone, reasons in zip(where, frame["invalid_reasons"], strict=True)
    ]
    return frame


def make_invalid(frame: pd.DataFrame, where: pd.Series, reason: str = "client lagged") -> pd.DataFrame:
    """The frame with these rows recorded but invalid, for this reason."""
    frame = frame.copy()
    frame.loc[where, "valid"] = False
    frame["invalid_reasons"] = [
        [reason] if bad else reasons for bad, reasons in zip(where, frame["invalid_reasons"], strict=True)
    ]
    return frame


def iterations(count: int = 1000, limit: int = 16, waiting: int = 64) -> pd.DataFrame:
    """A cell's trace: fills up, holds the limit, drains; one prompt prefilled every 8 iterations."""
    n = np.arange(count)
    running = np.minimum(np.minimum(n // 2 + 1, limit), np.maximum(1, (count - n) // 4))
    prefill = np.where((n % 8 == 0) & (n < count * 0.8), 96, 0)
    return pd.DataFrame(
        {
            "scheduled_s": n * 0.01,
            "output_s": n * 0.01 + 0.009,
            "running": running,
            "admitted": running,
            "waiting": np.maximum(0, waiting - n // 12),
            "prefill_tokens": prefill,
            "decode_tokens": running,
            "kv_use": running / 40,
            "preemptions": np.where(n == 500, 1, 0),
            "max_batch_size": limit,
            "max_num_tokens": 512,
        }
    )
