"""What a cell's record comes to: a row of the study's frame. Of a measured record it is computed once and kept."""

from collections.abc import Callable
from typing import Any

from batchlab import kept, metrics
from batchlab.cell import SIMULATED, Cell
from batchlab.store import DamagedCell, Store

KEYS = ("recorded", "machine", "commit", "measured_at", *metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS)


def summary(store: Store, cell: Cell, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """KEYS of a cell, from its record in `store`; `recorded` is False without a usable one, and damage told of.

    A measured record's numbers are kept (kept.py) under the digest of the cell's id and its file's content.
    """
    if cell.transport == SIMULATED:
        return computed(store, cell, tell)
    name = content(store, cell)
    found = kept.find("summaries", name) if name else None
    # what was kept is always a whole summary of a record: anything else there is damage
    if isinstance(found, dict) and found.get("recorded") is True and found.keys() == set(KEYS):
        return found
    made = computed(store, cell, tell)
    if made["recorded"] and name and name == content(store, cell):  # a file replaced meanwhile has another name
        kept.keep("summaries", name, made)
    return made


def content(store: Store, cell: Cell) -> str | None:
    """The digest of a cell's id and its file; None without one."""
    try:
        return kept.digest(cell.id, store.path(cell.id).read_bytes())
    except OSError:
        return None


def computed(store: Store, cell: Cell, tell: Callable[[str], None]) -> dict[str, Any]:
    """The same, from the record itself."""
    try:
        if cell.transport == SIMULATED:  # its digest vouches for the summary that it was stored with
            meta = store.meta(cell.id)
            figures = meta["summary"]
        else:
            recorded = store.load(cell.id)
            meta = recorded.meta
            figures = metrics.summary(
                recorded.requests.to_pandas(),
                recorded.iterations.to_pandas(),
                max_batch_size=cell.max_batch_size,
                gpu_memory_peak_gib=(meta["gpu"] or {}).get("memory_peak_gib"),
                energy_j=(meta["gpu"] or {}).get("energy_j"),
                invalid_reasons=meta["invalid_reasons"],
            )
    except (KeyError, DamagedCell) as error:
        if isinstance(error, DamagedCell):
            tell(f"{error}; it counts as not measured")
        return dict.fromkeys(KEYS) | {"recorded": False, "valid": False, "invalid_reasons": ["not measured"]}
    source = meta["provenance"]
    return {
        "recorded": True,
        # where a simulation ran does not matter: what it simulates does
        "machine": None if cell.transport == SIMULATED else source["machine"]["name"],
        "commit": source["commit"],
        "measured_at": source["started"],
        **figures,
    }
