"""Notebook 12's second half: whether the values of weights matter to speed, in words and a table."""

import pandas as pd

from batchlab.plots.labels import metric_words
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.weights import FIGURES

NOTHING = "No point of this scenario is recorded both with weights from a file and with dummy ones."


def reading(found: pd.DataFrame) -> Reading:
    """The range of the ratios of each figure, the noise they are held against, and what follows."""
    if found.empty:
        return Reading((NOTHING,))
    told = [
        f"Weights from a file over dummy ones: {'; '.join(_range(found, figure) for figure in FIGURES)}, at "
        f"{len(found) // len(FIGURES)} points."
    ]
    known = found["differs"].dropna()
    if known.empty:
        return Reading((*told, "No point was repeated, so what runs vary by chance is not known."))
    noise = max(((row.ratio_hi - row.ratio) / row.ratio for row in found.itertuples()), default=0.0)
    beyond = found[found["differs"].map(bool)]
    if beyond.empty:
        told.append(f"No difference beyond noise: every interval holds 1, the widest is ±{noise:.1%}.")
    else:
        far = beyond.loc[(beyond["ratio"] - 1).abs().idxmax()]
        told.append(
            f"{len(beyond)} of {len(known)} ratios differ by more than the noise of repeats (±{noise:.1%} at most), "
            f"the furthest {metric_words(far['figure'])[0]} of {far['dataset']} at max_batch_size "
            f"{far['max_batch_size']}: {far['ratio']:.3f} ({far['ratio_lo']:.3f} to {far['ratio_hi']:.3f})."
        )
    told.append(
        "The noise is that of repeated points; the two kinds of weights took two engine starts, and what starts differ "
        "by may not be in it."
    )
    return Reading(tuple(told))


def _range(found: pd.DataFrame, figure: str) -> str:
    rows = found.loc[found["figure"] == figure, "ratio"]
    return f"{metric_words(figure)[0]} {rows.min():.3f} to {rows.max():.3f} (mean {rows.mean():.3f})"


def numbers(found: pd.DataFrame) -> Table:
    """A row a point and figure."""
    shown = found.assign(
        figure=[f" ({unit})".join((words, "")) for words, unit in map(metric_words, found["figure"])],
        ratio=[f"{row.ratio:.3f}" + _interval(row) for row in found.itertuples()],
        setting=[f"{row.max_batch_size:.0f} / {row.max_num_tokens:.0f}" for row in found.itertuples()],
    )
    columns = {
        "dataset": "dataset",
        "setting": "batch / tokens",
        "figure": "figure",
        "from_file": "weights from a file",
        "dummy": "dummy weights",
        "ratio": "ratio (95% interval)",
        "n_file": "n, file",
        "n_dummy": "n, dummy",
    }
    return table(shown, columns, empty=NOTHING)


def _interval(row: object) -> str:
    return "" if pd.isna(row.ratio_lo) else f" ({row.ratio_lo:.3f} to {row.ratio_hi:.3f})"
