"""The running batch of an engine without a trace: its Prometheus page, polled beside a replay.

    with scraping("http://127.0.0.1:8000/metrics") as samples:
        replayed = replay(target, workload)
    iterations = samples.rows(replayed.t0_ns)

What comes of it are samples, not iterations: a gauge tells what ran when it was asked, so short moments fall between
two polls, and nothing says how many tokens an iteration held. `rows` fills records.ITERATIONS as far as that goes and
leaves `prefill_tokens` and `decode_tokens` null, which is what tells polled samples from a trace ever after
(`metrics.is_polled`). Each sample stands for the time until the next one.
"""

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from batchlab.engines.trace import Traced
from batchlab.errors import UsageError
from batchlab.scenario import Limits

PERIOD_S = 0.2  # a page costs the server some milliseconds: often enough for a batch that lives for seconds
TIMEOUT_S = 5.0

NO_TIMES = "the engine's own times of each request, and so the client's clock against them"

# What each figure is called, by engine and release; the first one that a page has is taken.
# (TensorRT-LLM tells its batch on a JSON page of its own, which is its adapter's to read.)
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size")
KV_USE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # vLLM V0
    "sglang:token_usage",
)
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")  # counters
# TGI tells its KV cache in tokens: those reserved by the batch, and those that there are
RESERVED, RESERVABLE = "tgi_batch_current_max_tokens", "tgi_batch_max_total_tokens"
_KNOWN = (*RUNNING, *WAITING, *KV_USE, *PREEMPTIONS, RESERVED, RESERVABLE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One page. time_ns: CLOCK_MONOTONIC, half way between question and answer; None where the page has no such figure.
    preemptions: since the engine's start."""

    time_ns: int
    running: float
    waiting: float | None
    kv_use: float | None
    preemptions: float | None


@dataclass(slots=True)
class Samples:
    """What was polled so far. `failed`: questions without a usable answer."""

    url: str
    period_s: float
    found: list[Sample] = field(default_factory=list)
    failed: int = 0

    def rows(self, t0_ns: int, limits: Limits | None = None) -> list[dict]:
        """Rows for records.ITERATIONS, in seconds after t0: a sample with a running request lasts until the next one.

        Samples of an idle engine make no row, as it makes no iteration then; idle time still weighs in the
        time-weighted mean, which divides by the whole span. limits: in force, where that is known.
        """
        rows = []
        for now, after in pairwise(self.found):
            if now.running > 0:
                before = now.preemptions or 0.0
                rows.append(
                    {
                        "scheduled_s": (now.time_ns - t0_ns) / 1e9,
                        "output_s": (after.time_ns - t0_ns) / 1e9,
                        "running": round(now.running),
                        "admitted": round(now.running),
                        "waiting": round(now.waiting or 0),
                        "kv_use": now.kv_use,
                        # a counter that fell was set back by a restart
                        "preemptions": max(0, round((after.preemptions or 0.0) - before)),
                        "max_batch_size": limits.max_batch_size if limits else None,
                        "max_num_tokens": limits.max_num_tokens if limits else None,
                    }
                )
        return rows

    def traced(self, t0_ns: int, limits: Limits | None = None) -> Traced:
        """The same as an engine's account of a replay; of source "none" when the engine was idle at every poll."""
        rows = self.rows(t0_ns, limits)
        known = [(limits.max_batch_size, limits.max_num_tokens)] if limits and rows else []
        unchecked = ("its iterations: its running batch was polled", NO_TIMES)
        return Traced(rows, {}, known, "metrics" if rows else "none", (), unchecked, self.told())

    def told(self) -> dict[str, object]:
        """For the record: where from, how often, how many, and how far apart they came (s, the longest)."""
        times = [s.time_ns for s in self.found]
        gaps = [(b - a) / 1e9 for a, b in pairwise(times)]
        return {
            "polled": self.url,
            "period_s": self.period_s,
            "samples": len(times),
            "failed": self.failed,
            "longest_gap_s": round(max(gaps), 3) if gaps else None,
        }


def metrics_url(text: str) -> str:
    """An address of a Prometheus page: `/metrics` where no path is given. UsageError for anything but http(s)."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"metrics url {text!r} must look like http://host:port/metrics")
    return text if url.path.strip("/") else text.rstrip("/") + "/metrics"


def read(page: str, time_ns: int) -> Sample | None:
    """The sample that a page holds; None when it tells no running batch by any known name.

    Series of several engines behind one page (data parallel ranks) are added up; of the KV cache's use, the mean.
    """
    lines = [line for line in page.splitlines() if line.startswith(_KNOWN)]
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
    running = _first(values, RUNNING)
    if running is None:
        return None
    kv = _first(values, KV_USE)
    use = sum(kv) / len(kv) if kv else _ratio(values)
    counted = _first(values, PREEMPTIONS)
    waiting = _first(values, WAITING)
    return Sample(
        time_ns,
        sum(running),
        None if waiting is None else sum(waiting),
        use,
        None if counted is None else sum(counted),
    )


def _first(values: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)


def _ratio(values: dict[str, list[float]]) -> float | None:
    most = sum(values.get(RESERVABLE, ()))
    return sum(values[RESERVED]) / most if RESERVED in values and most > 0 else None


def poll(url: str) -> Sample | None:
    """One question to the page. OSError when nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    before = time.monotonic_ns()
    with opener.open(urllib.request.Request(url, headers={"Accept": "text/plain"}), timeout=TIMEOUT_S) as answer:
        page = answer.read().decode("utf-8", "replace")
    after = time.monotonic_ns()
    try:
        return read(page, (before + after) // 2)
    except ValueError:  # not the format
        return None


@contextmanager
def scraping(url: str, period_s: float = PERIOD_S) -> Iterator[Samples]:
    """Poll `url` in a thread while the block runs, every `period_s` (s), once at its start and once at its end.

    UsageError when the page cannot be read at the start, or tells no running batch by a known name.
    """
    url = metrics_url(url)
    try:
        first = poll(url)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"metrics url {url} cannot be read ({reason}); correct it or leave it out") from None
    if first is None:
        raise UsageError(f"metrics url {url} tells no running batch; known are {', '.join(RUNNING)}")
    samples, stop = Samples(url, period_s, [first]), threading.Event()
    thread = threading.Thread(target=_poll_until, args=(samples, stop), daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _poll_until(samples: Samples, stop: threading.Event) -> None:
    due = time.monotonic()
    while True:
        due += samples.period_s
        last = stop.wait(max(0.0, due - time.monotonic()))
        try:
            found = poll(samples.url)
        except (OSError, ValueError):
            found = None
        if found is None:
            samples.failed += 1
        else:
            samples.found.append(found)
        if last:
            return
        due = max(due, time.monotonic() - samples.period_s)  # what a slow page missed is not made up for
