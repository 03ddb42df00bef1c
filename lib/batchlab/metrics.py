"""What is measured, exactly. Every function takes the tables of records.py as pandas frames; times are seconds,
results as named.

For a request: `scheduled` (when the arrival process says it should go), `sent`, then for each chunk (time,
tokens in it).

* TTFT  = first chunk that holds a token - scheduled. Queueing in a late client counts, as a user would feel it.
* TPOT  = (last token - first token) / (n - k), n output tokens, k of them in the first chunk; null when n = k.
* E2E   = last chunk that holds a token - scheduled.
* Output throughput = output tokens of completed requests / (last token - first send).
* Running batch size = mean over engine iterations of the requests scheduled in them.

A failed or tokenless request has no TTFT, TPOT or E2E: null, never 0.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

# the summary's keys, in order; null where one does not apply
SUMMARY_KEYS = (
    "output_throughput_tok_s",
    "request_throughput_req_s",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "tpot_mean_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "tpot_p99_ms",
    "tpot_min_ms",
    "tpot_max_ms",
    "e2e_p50_ms",
    "e2e_p90_ms",
    "e2e_p99_ms",
    "running_batch_mean",
    "batch_efficiency",
    "kv_use_peak",
    "preemptions",
    "gpu_memory_peak_gib",
    "completed",
    "failed",
    "duration_s",
    "valid",
    "invalid_reasons",
)
# further figures of a cell, in the same object
EXTRA_KEYS = (
    "steady_throughput_tok_s",
    "steady_window_s",
    "running_batch_time_mean",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "output_throughput_half_tok_s",
    "ttft_mean_half_ms",
    "tpot_mean_half_ms",
    "tpot_engine_mean_ms",
    "ttft_sent_p50_ms",
    "iterations",
    "polled_samples",
    "front_end_behind_s",
    "energy_j",
    "energy_per_output_token_j",
)
PLATEAU = 0.9  # of the largest running batch: where the steady window begins and ends
BATCHES = 8  # for the method of batch means


def completed(requests: pd.DataFrame) -> pd.Series:
    """Which requests ended as asked: no error and at least one token. A boolean a row."""
    return requests["error"].isna() & (requests["tokens"] > 0)


def ttft_ms(requests: pd.DataFrame) -> pd.Series:
    """Milliseconds from the scheduled time to the first token, NaN for requests that failed."""
    return (1000.0 * (requests["first_s"] - requests["scheduled_s"])).where(completed(requests))


def tpot_ms(requests: pd.DataFrame) -> pd.Series:
    """Milliseconds a token after the first chunk, NaN for failed requests and for those with one chunk."""
    later = requests["tokens"] - requests["first_tokens"]
    span_ms = 1000.0 * (requests["last_s"] - requests["first_s"])
    return (span_ms / later.where(later > 0)).where(completed(requests))


def e2e_ms(requests: pd.DataFrame) -> pd.Series:
    """Milliseconds from the scheduled time to the last token, NaN for failed requests."""
    return (1000.0 * (requests["last_s"] - requests["scheduled_s"])).where(completed(requests))


def duration_s(requests: pd.DataFrame) -> float:
    """Last token of a completed request - first send, NaN when nothing was completed."""
    return requests.loc[completed(requests), "last_s"].max() - requests["sent_s"].min()


def meets(
    requests: pd.DataFrame,
    *,
    ttft_limit_ms: float | None = None,
    tpot_limit_ms: float | None = None,
    e2e_limit_ms: float | None = None,
) -> pd.Series:
    """Which requests meet every given limit. A missing metric misses its limit, except a request of one token, which
    has no TPOT to miss. A boolean a row."""
    good = completed(requests)
    for values, limit in ((ttft_ms(requests), ttft_limit_ms), (e2e_ms(requests), e2e_limit_ms)):
        if limit is not None:
            good &= values <= limit
    if tpot_limit_ms is not None:
        single = completed(requests) & (requests["tokens"] == requests["first_tokens"]) & (requests["output_len"] == 1)
        good &= (tpot_ms(requests) <= tpot_limit_ms) | single
    return good


def goodput_req_s(requests: pd.DataFrame, **limits: float | None) -> float:
    """Requests a second that meet every given limit (see `meets`)."""
    span = duration_s(requests)
    return float(meets(requests, **limits).sum() / span) if span > 0 else 0.0


def behind_s(requests: pd.DataFrame, iterations: pd.DataFrame) -> float:
    """How long after the engine's last iteration was done the last token came to the client: what its front end is
    behind at the end. NaN without iterations, or without any token.
    """
    return float(requests["last_s"].max() - iterations["output_s"].max())


def step_durations_s(iterations: pd.DataFrame) -> np.ndarray:
    """How long each iteration held the engine: to its output, from the later of its scheduling and the previous output.

    With asynchronous scheduling an iteration is scheduled while the one before it still runs.
    """
    output = iterations["output_s"].to_numpy()
    before = np.concatenate([[-np.inf], output[:-1]])
    return output - np.maximum(iterations["scheduled_s"].to_numpy(), before)


def is_polled(iterations: pd.DataFrame) -> bool:
    """Whether the rows are samples of an engine's metrics page (scrape.py) and not its iterations."""
    return bool(len(iterations)) and bool(iterations["decode_tokens"].isna().all())


def running_batch(iterations: pd.DataFrame) -> tuple[float, float]:
    """Mean running batch size over iterations, and weighted by the time that each took (idle time counts as 0).

    Of polled samples the first is the mean over those in which something ran, which is what a mean over iterations
    comes to when they are equally long.
    """
    if iterations.empty:
        return math.nan, math.nan
    running = iterations["running"].to_numpy(float)
    span = iterations["output_s"].iloc[-1] - iterations["scheduled_s"].iloc[0]
    weighted = float((running * step_durations_s(iterations)).sum() / span) if span > 0 else math.nan
    return float(running.mean()), weighted


def steady_window(iterations: pd.DataFrame) -> tuple[float, float] | None:
    """From the first to the last iteration whose running batch is at least 90% of the largest; None without
    iterations, and for polled samples, which do not say how many tokens came."""
    if iterations.empty or is_polled(iterations):
        return None
    high = iterations["running"] >= PLATEAU * iterations["running"].max()
    at = iterations.index[high]
    return float(iterations.loc[at[0], "output_s"]), float(iterations.loc[at[-1], "output_s"])


def steady_throughput_tok_s(requests: pd.DataFrame, iterations: pd.DataFrame) -> tuple[float, float]:
    """Output tokens a second inside the steady window, by the engine's own account, and the window's length in seconds.

    An iteration yields a token for each decode token, and one for each prompt that it completes.
    """
    window = steady_window(iterations)
    if window is None or window[1] <= window[0]:
        return math.nan, math.nan
    start, end = window
    inside = iterations[(iterations["output_s"] > start) & (iterations["output_s"] <= end)]
    first = requests["engine_first_s"]
    tokens = inside["decode_tokens"].sum() + ((first > start) & (first <= end)).sum()
    return float(tokens / (end - start)), end - start


def batch_means_half(values: np.ndarray) -> float:
    """Half-width of a 95% interval of the mean of one run's values, in their order, by batch means.

    Neighbouring values of a run are correlated, so the run is cut into 8 batches whose means are treated as independent
    (Law and Kelton, Simulation Modeling and Analysis, the method of batch means). NaN for fewer than 2 values a batch.
    """
    values = values[~np.isnan(values)]
    if len(values) < 2 * BATCHES:
        return math.nan
    means = np.array([batch.mean() for batch in np.array_split(values, BATCHES)])
    return float(stdtrit(BATCHES - 1, 0.975) * means.std(ddof=1) / math.sqrt(BATCHES))


def throughput_half(iterations: pd.DataFrame) -> float:
    """The same for the decode throughput (tok/s) inside the steady window, over batches of equal time."""
    window = steady_window(iterations)
    if window is None:
        return math.nan
    inside = iterations[(iterations["output_s"] > window[0]) & (iterations["output_s"] <= window[1])]
    if len(inside) < 4 * BATCHES:
        return math.nan
    edges = np.linspace(window[0], window[1], 2 * BATCHES + 1)
    tokens, _ = np.histogram(inside["output_s"], edges, weights=inside["decode_tokens"])
    return batch_means_half(tokens / np.diff(edges))


def summary(
    requests: pd.DataFrame,
    iterations: pd.DataFrame,
    *,
    max_batch_size: int | None,
    gpu_memory_peak_gib: float | None = None,
    energy_j: float | None = None,
    invalid_reasons: list[str] | None = None,
) -> dict[str, Any]:
    """The figures of one cell: SUMMARY_KEYS and EXTRA_KEYS, None where one does not apply.

    energy_j: what the (first) GPU took from before the first send until all answers were in, by its own counter where
    it has one, else by its power sampled at 5 Hz; its idle power is part of it. A token's share of it is over the
    output tokens of the completed requests.
    """
    good = completed(requests)
    ttft, tpot, e2e = ttft_ms(requests), tpot_ms(requests), e2e_ms(requests)
    span = duration_s(requests)
    batch_mean, batch_time_mean = running_batch(iterations)
    polled = is_polled(iterations)
    output_tokens = int(requests.loc[good, "tokens"].sum())
    steady, window = steady_throughput_tok_s(requests, iterations)
    arrivals = requests["scheduled_s"].nunique()
    engine_span = requests["engine_last_s"] - requests["engine_first_s"]
    engine_tpot = 1000.0 * engine_span / (requests["tokens"] - 1).where(requests["tokens"] > 1)
    values: dict[str, Any] = {
        "output_throughput_tok_s": output_tokens / span if span > 0 else None,
        "request_throughput_req_s": good.sum() / span if span > 0 else None,
        "ttft_mean_ms": ttft.mean(),
        "tpot_mean_ms": tpot.mean(),
        "tpot_min_ms": tpot.min(),
        "tpot_max_ms": tpot.max(),
        "running_batch_mean": batch_mean,
        "running_batch_time_mean": batch_time_mean,
        "batch_efficiency": batch_mean / max_batch_size if max_batch_size else None,
        "kv_use_peak": iterations["kv_use"].max() if len(iterations) else None,
        "preemptions": int(iterations["preemptions"].sum()) if iterations["preemptions"].notna().any() else None,
        "gpu_memory_peak_gib": gpu_memory_peak_gib,
        "completed": int(good.sum()),
        "failed": int((~good).sum()),
        "duration_s": span,
        "valid": not invalid_reasons,
        "invalid_reasons": list(invalid_reasons or []),
        "steady_throughput_tok_s": steady,
        "steady_window_s": window,
        "itl_p50_ms": requests.loc[good, "itl_p50_ms"].median(),
        "itl_p99_ms": requests.loc[good, "itl_p99_ms"].median(),
        "itl_max_ms": requests.loc[good, "itl_max_ms"].max(),
        "output_throughput_half_tok_s": throughput_half(iterations),
        # all at once, TTFT climbs with the queue from first to last: it has no steady mean to be unsure of
        "ttft_mean_half_ms": batch_means_half(_in_order(ttft, requests, "scheduled_s")) if arrivals > 1 else None,
        "tpot_mean_half_ms": batch_means_half(_in_order(tpot, requests, "last_s")),
        "tpot_engine_mean_ms": engine_tpot.where(good).mean(),
        "ttft_sent_p50_ms": (1000.0 * (requests["first_s"] - requests["sent_s"])).where(good).median(),
        "iterations": None if polled else len(iterations),
        "polled_samples": len(iterations) if polled else None,
        "front_end_behind_s": None if polled else behind_s(requests, iterations),
        "energy_j": energy_j,
        "energy_per_output_token_j": energy_j / output_tokens if energy_j and output_tokens else None,
    }
    for name, series in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        values |= {f"{name}_p{q}_ms": series.quantile(q / 100) for q in (50, 90, 99)}
    return {key: _plain(values[key]) for key in (*SUMMARY_KEYS, *EXTRA_KEYS)}


def _in_order(values: pd.Series, requests: pd.DataFrame, by: str) -> np.ndarray:
    """By time, and by the requests' numbers where times are equal: the order of rows means nothing."""
    return values.iloc[np.lexsort((requests["index"], requests[by]))].to_numpy(float)


def _plain(value: Any) -> Any:
    """JSON has no NaN, and NumPy's numbers are not JSON's."""
    if isinstance(value, bool | list | str) or value is None:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, int | np.integer) else round(number, 6)


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95% t interval of independent repeats; the interval is NaN for fewer than two."""
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half
