"""What 08-validation tells of machines: how far they alone move the figures that the simulation missed."""

import pandas as pd

from batchlab.machines import Spread
from batchlab.plots.labels import metric_words, number
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, with_range
from batchlab.report.validation import named, percent
from batchlab.validation import WORST

ONE_MACHINE = "No two engine starts are recorded that show how far machines of one kind lie apart."
LATENCY = "ttft_mean_ms"
LAUNCHED = {"eager_us": "kernel by kernel", "pieces_us": "as graphs in pieces"}


def missed_table(found: pd.DataFrame, spread: Spread | None) -> Table:
    """A row a figure that is off by more than the goal. `found` is what `machines.missed` returns, `spread` what
    `machines.spread` does.
    """
    ordered = found.sort_values("error", key=abs, ascending=False, kind="stable")
    rows = [
        {
            "cell": named(row),
            "figure": metric_words(row["figure"])[0],
            "measured": row["measured"],
            "simulated (fastest to slowest machine)": with_range(row["simulated"], row["fastest"], row["slowest"]),
            "error": percent(row["error"], signed=True),
            "inside": "yes" if row["inside"] else "no",
            "other runs": ", ".join(percent(e, signed=True) for e in row["others"]) or "-",
        }
        for row in ordered.to_dict("records")
    ]
    none = f"No figure that was tested is off by more than {WORST:.0%}."
    return table(pd.DataFrame(rows), empty=none if spread else ONE_MACHINE)


def missed_reading(found: pd.DataFrame, spread: Spread | None) -> Reading:
    """How many of the missed figures machines account for, and which are left. Arguments as in `missed_table`."""
    if spread is None:
        return Reading((ONE_MACHINE,))
    launches = " and ".join(
        f"{number(spread.shortest[name] / 1e3)} to {number(spread.longest[name] / 1e3)} ms ({words})"
        for name, words in LAUNCHED.items()
        if name in spread.shortest
    )
    told = [
        f"The recorded cards differ by up to {percent(spread.card)} for equal iterations; their hosts launch one with "
        f"prompts in {launches}, medians of engine starts."
    ]
    told += [_account(rows, words) for rows, words in _groups(found) if len(rows)]
    return Reading(tuple(told))


def _groups(found: pd.DataFrame) -> list[tuple[pd.DataFrame, str]]:
    late = found["figure"] == LATENCY
    return [(found[~late], "throughput, TPOT and running batch"), (found[late], "TTFT at finite rates")]


def _account(rows: pd.DataFrame, words: str) -> str:
    """Of the figures above the goal: inside the machines' range; else within the goal in another run; else left."""
    again = [any(abs(e) <= WORST for e in others) for others in rows["others"]]
    inside, left = rows["inside"], rows[~rows["inside"] & ~pd.Series(again, index=rows.index)]
    other = len(rows) - int(inside.sum()) - len(left)
    cells = "; ".join(f"{metric_words(r['figure'])[0]}, {named(r)}" for r in left.to_dict("records"))
    return (
        f"Figures of {words} off by more than {WORST:.0%}: {len(rows)}. Between what the fastest and the slowest "
        f"machine would make of the load: {int(inside.sum())}; within the goal in another run of it: {other} more; "
        f"left: {len(left)}{f' ({cells})' if cells else ''}."
    )
