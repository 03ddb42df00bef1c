"""A token budget that follows the load while an engine runs: S2's "dynamic adjustment", through the control file.

S2 (vLLM or TGI on an A10G) states the rule: more than 20 waiting, the budget grows by a fifth, up to 16384;
"GPU use" above 90%, it shrinks by a tenth; otherwise it stays. It leaves open what GPU use is (here the share of
the KV cache in use, which is what vLLM reports under that name), how often the rule is applied, and where
shrinking ends (here at the batch limit, below which engines refuse a budget).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchlab.engines.trace import TraceReader, set_limits
from batchlab.scenario import Limits


def next_budget(rule: dict[str, Any], budget: int, *, waiting: int, kv_use: float, least: int) -> int:
    """The budget (tokens an iteration) after one look at the engine. `kv_use` is a share, 0 to 1."""
    if waiting > rule["waiting_above"]:
        return min(round(budget * rule["grow"]), rule["most"])
    if kv_use > rule["kv_use_above"]:
        return max(round(budget * rule["shrink"]), least)
    return budget


@contextmanager
def adjusting(trace: Path, control: Path, start: Limits, rule: dict[str, Any]) -> Iterator[list[int]]:
    """Apply the rule every `every_s` seconds while the block runs; yields the list of budgets set.

    The engine's state is its last iteration; without a new one since the last look, nothing changes.
    """
    reader = TraceReader(trace)
    reader.mark()
    stop, budgets = threading.Event(), [start.max_num_tokens]

    def follow() -> None:
        while not stop.wait(rule["every_s"]):
            state = reader.last_iteration()
            if state is None:
                continue
            wanted = next_budget(
                rule, budgets[-1], waiting=state["waiting"], kv_use=state["kv_use"], least=start.max_batch_size
            )
            if wanted != budgets[-1]:
                set_limits(control, Limits(max_batch_size=start.max_batch_size, max_num_tokens=wanted))
                budgets.append(wanted)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield budgets
    finally:
        stop.set()
        thread.join()
        set_limits(control, start)
