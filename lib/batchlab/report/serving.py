"""Notebook 12's words and tables: what serving over HTTP costs against the same cells in process."""

import pandas as pd

from batchlab import transports
from batchlab.plots.labels import number, whole
from batchlab.plots.saving import Shown, save
from batchlab.plots.transports import serving_cost
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.study import Study

NOTHING = "No point is recorded both over HTTP and in process in this scenario, so there is no cost to show."
AXIS = "max_batch_size"


def at_once(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs with all requests at once: one rate, for a figure."""
    return pairs[pairs["request_rate"].astype(float) == float("inf")]


def figure(pairs: pd.DataFrame, points: pd.DataFrame, study: Study) -> Shown | Reading:
    """Throughput lost and TPOT added against max_batch_size, or a line that there is nothing to compare."""
    shown = at_once(pairs)
    if shown.empty:
        return Reading((NOTHING,))
    axes = serving_cost(shown, points, defaults=study.scenario.defaults)
    what = "Throughput lost and time per output token added over HTTP against the same cells in process."
    return save(axes[0].figure, "serving-cost", f"{what} {' '.join(reading(pairs, points).sentences)}", study)


def reading(pairs: pd.DataFrame, points: pd.DataFrame) -> Reading:
    """The largest cost a dataset, how many pairs are apart by more than their intervals, and TTFT at finite rates."""
    told = []
    for dataset, rows in at_once(pairs).groupby("dataset", sort=False):
        worst = rows.loc[rows["throughput_lost"].idxmax()]
        known = rows["apart"].dropna()
        sure = f"; {int(known.sum())} of {len(known)} pairs differ by more than their intervals" if len(known) else ""
        http, inside = (number(worst[f"output_throughput_tok_s_{way}"]) for way in ("http", "inprocess"))
        where = f"at {AXIS} {whole(worst[AXIS])} and max_num_tokens {whole(worst['max_num_tokens'])}"
        lost = worst["throughput_lost"]
        most = f"{lost:.1%} of the throughput is lost at most"
        if lost <= 0:
            most = f"no throughput is lost, {-lost:.1%} is gained at least"
        told.append(
            f"{dataset}: over HTTP {most}, {where} ({http} instead of {inside} tok/s), where TPOT changes by "
            f"{worst['tpot_added_ms']:+.2f} ms{sure}."
        )
    finite = pairs[pairs["request_rate"].astype(float) != float("inf")]
    for (dataset, rate), rows in finite.groupby(["dataset", "request_rate"], sort=False):
        least, most = (rows.loc[getattr(rows["ttft_added_ms"], which)()] for which in ("idxmin", "idxmax"))
        told.append(
            f"{dataset}, {rate:g} req/s: mean TTFT over HTTP differs by {least['ttft_added_ms']:+.1f} to "
            f"{most['ttft_added_ms']:+.1f} ms (median {rows['ttft_added_ms'].median():+.1f} ms of "
            f"{number(rows['ttft_mean_ms_inprocess'].median())} ms) over {len(rows)} points."
        )
    if told and (gone := transports.unpaired(points, pairs)):
        told.append(f"{gone} planned point{'s are' if gone > 1 else ' is'} left out: not valid over both transports.")
    return Reading(tuple(told) or (NOTHING,))


def numbers(pairs: pd.DataFrame) -> Table:
    """Every pair."""
    limits = [f"{b} / {t}" for b, t in zip(pairs["max_batch_size"], pairs["max_num_tokens"], strict=True)]
    shown = pairs.assign(lost=[f"{v:.1%}" for v in pairs["throughput_lost"]], limits=limits)
    columns = {
        "dataset": "dataset",
        "request_rate": "request rate",
        "limits": "batch / tokens",
        "output_throughput_tok_s_http": "HTTP (tok/s)",
        "output_throughput_tok_s_inprocess": "in process (tok/s)",
        "lost": "lost",
        "tpot_mean_ms_http": "TPOT, HTTP (ms)",
        "tpot_mean_ms_inprocess": "TPOT, in process (ms)",
        "ttft_mean_ms_http": "TTFT, HTTP (ms)",
        "ttft_mean_ms_inprocess": "TTFT, in process (ms)",
    }
    return table(shown, columns, empty=NOTHING)
