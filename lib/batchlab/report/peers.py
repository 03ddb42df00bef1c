"""Notebook 11's words and tables: one run under the definitions of several benchmark programs."""

from typing import Any

import numpy as np
import pandas as pd

from batchlab import definitions
from batchlab.plots.labels import whole
from batchlab.plots.select import valid
from batchlab.plots.style import TRANSPORTS, engine_name
from batchlab.report import setup
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.study import Study

ALIKE = 0.005  # relative difference that is not told
NOTHING = "No valid measured cell is recorded, so there is no run to compare the definitions on."


def chosen(study: Study, cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Two measured, valid cells of the first dataset, as near the defaults as there are: one at its lowest finite rate,
    one with all requests at once. Each has a `run`, its name."""
    usable = cells[valid(cells) & (cells["evidence"] == "measured")].drop_duplicates("cell")
    if usable.empty:
        return []
    usable = usable[usable["dataset"] == usable["dataset"].iloc[0]]
    finite = np.isfinite(usable["request_rate"].astype(float))
    found = []
    for rows in (setup.lowest_rate(usable[finite]), usable[~finite]):
        for cell in setup.representatives(rows, study.scenario.defaults):
            rate = "all at once" if np.isinf(float(cell["request_rate"])) else f"{cell['request_rate']:g} req/s"
            found.append(cell | {"run": f"{cell['dataset']}, {rate}"})
    return found


def compared(study: Study, cells: list[dict[str, Any]]) -> pd.DataFrame:
    """A row a run and metric, a column a tool."""
    parts = []
    for cell in cells:
        told = definitions.compare(study.requests(cell["cell"]))
        parts.append(told.rename_axis("metric").reset_index().assign(run=cell["run"]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def numbers(found: pd.DataFrame) -> Table:
    """The figures side by side."""
    if found.empty:
        return table(pd.DataFrame(columns=["run"]), empty=NOTHING)
    shown = found.assign(metric=found["metric"].map(definitions.METRICS))
    return table(shown, {"run": "run", "metric": "metric"} | {tool: tool for tool in definitions.TOOLS})


def runs(cells: list[dict[str, Any]]) -> Reading:
    """Which runs these are."""
    told = [
        f"{c['run']}: cell {c['cell']}, {engine_name(c['engine'])} {c['engine_version']}, "
        f"{TRANSPORTS.get(c['transport'], c['transport'])}, {whole(c['num_requests'])} requests, max_batch_size "
        f"{whole(c['max_batch_size'])}, max_num_tokens {whole(c['max_num_tokens'])}."
        for c in cells
    ]
    return Reading(tuple(told) or (NOTHING,))


def reading(found: pd.DataFrame) -> Reading:
    """Where the programs' figures differ from this project's, and by what factor: a sentence a run."""
    told = []
    for run, rows in found.groupby("run", sort=False) if len(found) else ():
        far = [text for row in rows.to_dict("records") if (text := _far(row))]
        same = f"no figure differs by more than {ALIKE:.1%}"
        told.append(f"{run}, as a multiple of ours: {'; '.join(far) if far else same}.")
    return Reading(tuple(told) or (NOTHING,))


def _far(row: dict[str, Any]) -> str:
    """ "mean TTFT 0.98 (vLLM, AIPerf)" for the tools that differ; nothing where none does."""
    own, by_ratio = row["batchlab"], {}
    for tool in list(definitions.TOOLS)[1:]:
        if pd.notna(own) and pd.notna(row[tool]) and own and abs(row[tool] / own - 1) > ALIKE:
            by_ratio.setdefault(f"{row[tool] / own:.3g}", []).append(tool.split()[0])
    parts = [f"{ratio} ({', '.join(tools)})" for ratio, tools in by_ratio.items()]
    return f"{definitions.METRICS[row['metric']].split(' (')[0]} {', '.join(parts)}" if parts else ""


def defined() -> Table:
    """Every definition, with the place it was read from."""
    rows = [{"metric": d.metric, "tool": d.tool, "definition": d.formula, "read from": d.source}
            for d in definitions.DEFINITIONS]  # fmt: skip
    return table(pd.DataFrame(rows))
