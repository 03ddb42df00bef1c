"""Gauges of an engine that keeps no account of its iterations, polled beside a replay (scrape.py has the names)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from batchlab.engines.trace import Traced
from batchlab.errors import UsageError
from batchlab.scenario import Limits
from batchlab.scrape import Samples, scraping

NO_ITERATIONS = "the token limit and short peaks of the batch: what it tells is a gauge, polled"
NO_GAUGE = "its running batch, and so whether it kept the batch limit: it shows no gauge of a known name"


@contextmanager
def polling(url: str) -> Iterator[Samples | None]:
    """Poll a metrics page while the block runs; None where there is no such page or no known gauge on it."""
    with ExitStack() as stack:
        try:
            samples = stack.enter_context(scraping(url))
        except UsageError:
            samples = None
        yield samples


def traced(samples: Samples | None, t0_ns: int, limits: Limits, unchecked: tuple[str, ...], **more: Any) -> Traced:
    """What was polled, as a Traced without requests."""
    rows = samples.rows(t0_ns, limits) if samples else []
    told = {**more.pop("facts", {}), **(samples.told() if samples else {})}
    missing = NO_ITERATIONS if rows else NO_GAUGE
    point = (limits.max_batch_size, limits.max_num_tokens)
    source = "polled" if rows else "none"
    return Traced(rows, {}, [point], source=source, unchecked=(*unchecked, missing), facts=told, **more)
