"""Which optional keys of a request a server takes, found out by asking it with less and less."""

import dataclasses
from collections.abc import Callable

from batchlab.client.replay import replay
from batchlab.client.target import Target
from batchlab.workload import Workload

REFUSED = ("HTTP 400", "HTTP 422")


def accepted(target: Target, workload: Callable[[Target], Workload], *, timeout_s: float) -> Target:
    """The fullest form of `target` that the server does not refuse; `target` itself when it refuses them all.

    workload: makes a load of one request for a form of the target. Its answer is thrown away, so it is a warm-up too.
    """
    bare = dataclasses.replace(target, continuous_usage=False, ignore_eos=False)
    forms = [
        target,
        dataclasses.replace(target, continuous_usage=False),
        bare,
        dataclasses.replace(bare, extra={**target.extra, "stream_options": None}),
    ]
    for number, candidate in enumerate(forms):
        if candidate in forms[:number]:
            continue
        rows = replay(candidate, workload(candidate), timeout_s=timeout_s).rows
        if not (rows[0]["error"] or "").startswith(REFUSED):
            return candidate
    return target
