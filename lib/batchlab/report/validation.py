"""What 08-validation tells: errors of the simulation, and a line where there is nothing to compare."""

from typing import Any

import pandas as pd

from batchlab import plots, validation
from batchlab.plots import validation as figures
from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.saving import Shown
from batchlab.plots.style import TRANSPORTS, engine_name
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, text
from batchlab.study import POINT, Study

NOTHING = (
    "No measured cell of this scenario can be simulated: none is recorded, or nobody measured operator times on its "
    "machine."
)
LEFT_OUT = "Nothing to compare in this scenario."
NO_SIMULATION = "This scenario plans no simulated cell, so nothing of it rests on a simulation."
HOST = {
    "step_us": "an iteration",
    "token_us": "an output token",
    "request_us": "a request on its way in",
    "message_us": "a message",
    "stream_us": "a message, each running request besides",
    "gather_us": "gathering requests, when idle",
    "prompt_us": "an iteration with prompts that no graph holds, on the card",
    "launch_us": "launching an iteration",
    "pieces_us": "launching a layer in pieces, besides",
    "eager_us": "launching a layer kernel by kernel, besides",
}
SETS = (validation.FITTED, *validation.TEST_SETS)


def percent(value: float, *, signed: bool = False) -> str:
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def stands_on(study: Study, compared: pd.DataFrame) -> Table:
    """What was compared, and what the simulations are made from."""
    if compared.empty:
        return table(pd.DataFrame(columns=["what", "value"]), empty=NOTHING)
    made = validation.provenance(study, compared)
    steps, host = made["step_times"], made["host_overheads"]
    cells = compared.drop_duplicates("cell")
    fitted = int((cells["set"] == validation.FITTED).sum())
    rows: list[tuple[str, Any]] = [
        ("measured cells compared", whole(len(cells))),
        ("of them fitted on", whole(fitted)),
        ("policy", made["policy"]),
        ("step times", steps["kind"]),
    ]
    if "package" in steps:
        versions = ", ".join(steps["backend_version"])
        rows.append(("from", f"{steps['package']} {steps['package_version']}, {steps['backend']} {versions}"))
    rows += [(f"host time of {what}", f"{number(host[key])} µs") for key, what in HOST.items()]
    if limit := steps.get("power_limit"):
        sustained = f"{number(limit['tflops'])} TFLOP/s or {number(limit['tbytes'])} TB/s, or a mixture"
        rows.append(("power allows at full clock", sustained))
        rows.append(("operators of an iteration reach", f"{number(limit['reached_tflops'])} TFLOP/s"))
    for engine, others in cells[cells["set"] == "another engine"].groupby("engine", sort=False):
        steps = validation.provenance(study, others)["step_times"]
        whose = f"{steps['backend']} {', '.join(steps['backend_version'])}" if "package" in steps else steps["kind"]
        rows.append((f"{engine_name(engine)}, {len(others)} of the cells", f"{whose}; no host time was fitted for it"))
    return table(pd.DataFrame(rows, columns=["what", "value"]))


def errors(study: Study, compared: pd.DataFrame) -> Shown | Reading:
    """The figure of every cell's error."""
    if compared.empty:
        return Reading((LEFT_OUT,))
    note = "each beside its simulation with the constants of the fit cells"
    return errors_figure(study, compared, "validation-errors", note, reading(compared))


def errors_figure(study: Study, compared: pd.DataFrame, name: str, note: str, told: Reading) -> Shown:
    """The errors of `compared`, drawn and saved as `name`."""
    axes = figures.errors(compared, validation.GOALS, SETS)
    cells = study.frame().drop_duplicates("cell")
    shown = cells[cells["cell"].isin(compared["cell"])]
    plots.attach(axes[0].figure, plots.points(shown), note=note)
    alt = f"Relative error of the simulation in each measured cell, a panel a figure. {told}"
    return plots.save(axes[0].figure, name, alt, study)


def reading(compared: pd.DataFrame) -> Reading:
    """A sentence a figure: mean and largest error on cells that nothing was fitted on, against the goals; and one an
    engine and transport that no constant is of.
    """
    if compared.empty:
        return Reading((LEFT_OUT,))
    outside = compared["set"].isin(validation.OUTSIDE)
    again = compared["set"] == validation.AGAIN
    tested = compared[(compared["set"] != validation.FITTED) & ~again & ~outside]
    found = []
    for row in validation.errors(tested, by=("figure",)).to_dict("records"):
        words, _ = metric_words(row["figure"])
        goal, worst = validation.GOALS[row["figure"]], tested.loc[row["worst"]]
        met = "within" if row["mean_abs"] <= goal else "above"
        most = "within" if row["max_abs"] <= validation.WORST else "above"
        found.append(
            f"{words}, {row['cells']} cells that nothing was fitted on: off by {percent(row['mean_abs'])} on average "
            f"({met} the goal of {goal:.0%}) and by {percent(row['max_abs'])} at most ({most} the goal of "
            f"{validation.WORST:.0%}; {named(worst)}); signed mean {percent(row['mean'], signed=True)}."
        )
    if again.any():
        found.append(
            f"{compared[again]['cell'].nunique()} cells were measured once more because they had been missed, and "
            f"count in no mean: off on average by {_means(compared[again])}."
        )
    found += [_outside(rows) for _, rows in compared[outside].groupby(["engine", "transport"], sort=False)]
    return Reading(tuple(found) or ("Every cell was fitted on: there is none to test with.",))


def _outside(rows: pd.DataFrame) -> str:
    """The errors of one engine and transport that no constant was fitted for."""
    engine, transport = rows["engine"].iloc[0], rows["transport"].iloc[0]
    lacks = "server or host" if (rows["set"] == "another engine").any() else "server"
    return (
        f"{engine_name(engine)}, {TRANSPORTS.get(transport, transport)}, {rows['cell'].nunique()} cells, with no "
        f"constant of its {lacks}: off on average by {_means(rows)}."
    )


def _means(rows: pd.DataFrame) -> str:
    """The errors of these rows, figure by figure."""
    told = []
    for row in validation.errors(rows, by=("figure",)).to_dict("records"):
        words, _ = metric_words(row["figure"])
        signed = percent(row["mean"], signed=True)
        told.append(f"{words} {percent(row['mean_abs'])} (signed {signed}, at most {percent(row['max_abs'])})")
    return ", ".join(told)


def named(row: Any) -> str:
    """A compared cell in a few words."""
    rate = text("request_rate", row["request_rate"])
    return (
        f"{row['dataset']}, {row['max_batch_size']:.0f}/{row['max_num_tokens']:.0f}, {rate}, "
        f"{TRANSPORTS.get(row['transport'], row['transport'])}, cell {row['cell']}"
    )


def error_table(compared: pd.DataFrame) -> Table:
    """A row a figure and set."""
    rows = []
    for row in validation.errors(compared).to_dict("records"):
        words, _ = metric_words(row["figure"])
        rows.append(
            {
                "figure": words,
                "cells": f"{row['set']}",
                "number": row["cells"],
                "mean error": percent(row["mean_abs"]),
                "signed": percent(row["mean"], signed=True),
                "largest": percent(row["max_abs"]),
                "the worst cell": named(compared.loc[row["worst"]]),
            }
        )
    columns = ["figure", "cells", "number", "mean error", "signed", "largest", "the worst cell"]
    return table(pd.DataFrame(rows, columns=columns), empty=LEFT_OUT)


def same_load_table(study: Study, compared: pd.DataFrame) -> Table:
    """`validation.same_load`: what a measured TTFT differs from itself, beside the simulation's error."""
    found = validation.same_load(study, compared)
    rows = [
        {
            "load": f"{row['dataset']}, {text('request_rate', row['request_rate'])}",
            "measured runs of it": row["cells"],
            "mean TTFT (ms)": row["measured"],
            "lowest run": percent(row["lowest"] / row["measured"] - 1, signed=True),
            "highest run": percent(row["highest"] / row["measured"] - 1, signed=True),
            "simulated (ms)": row["simulated"],
            "error of the simulation": percent(row["error"], signed=True),
        }
        for row in found.to_dict("records")
    ]
    return table(pd.DataFrame(rows), empty="No load was measured three times or more without a limit that binds.")


def repeats_table(study: Study, compared: pd.DataFrame) -> Table:
    """How far repeats of one point, with other seeds and on other days, lie apart: lowest and highest over the mean."""
    frame = study.frame().drop_duplicates("cell")
    mine = frame[frame["cell"].isin(compared["cell"])]
    rows = []
    for _, group in mine.groupby([*POINT, "num_requests"], dropna=False, sort=False):
        if len(group) < 2:
            continue
        days = sorted({str(at)[:10] for at in group["measured_at"]})
        row = {"point": named(group.iloc[0].to_dict() | {"cell": "-"}).removesuffix(", cell -"), "repeats": len(group)}
        for key in ("output_throughput_tok_s", "tpot_mean_ms"):
            values = group[key].astype(float)
            low, high = values.min() / values.mean() - 1, values.max() / values.mean() - 1
            row[metric_words(key)[0]] = f"{percent(low, signed=True)} to {percent(high, signed=True)}"
        rows.append(row | {"measured on": ", ".join(days)})
    return table(pd.DataFrame(rows), empty="No point was measured more than once.")


def preemption_table(compared: pd.DataFrame) -> Table:
    """Cells in which the engine, or its simulation, preempted."""
    cells = compared.drop_duplicates("cell")
    some = cells[(cells["measured_preemptions"].fillna(0) > 0) | (cells["simulated_preemptions"] > 0)]
    rows = [
        {"cell": named(r), "measured": r["measured_preemptions"], "simulated": r["simulated_preemptions"]}
        for _, r in some.iterrows()
    ]
    empty = f"Neither the engine nor the simulation preempted in any of {len(cells)} cells." if len(cells) else LEFT_OUT
    return table(pd.DataFrame(rows, columns=["cell", "measured", "simulated"]), empty=empty)


def published(study: Study, rows: pd.DataFrame) -> Shown | Reading:
    """The figure of the published rows."""
    if rows.empty:
        return Reading((NO_SIMULATION,))
    ax = figures.published(rows)
    ax.figure.set_label(
        "published: NVIDIA, TensorRT-LLM 1.0 performance overview; simulated: TensorRT-LLM's policy, operator times of "
        f"aiconfigurator-core, nothing fitted; {len(rows)} rows"
    )
    alt = f"Simulated against published output throughput of TensorRT-LLM. {published_reading(rows)}"
    return plots.save(ax.figure, "validation-published", alt, study)


def published_reading(rows: pd.DataFrame) -> Reading:
    """Mean and largest error over NVIDIA's rows."""
    if rows.empty:
        return Reading((NO_SIMULATION,))
    worst = rows.loc[rows["error"].abs().idxmax()]
    where = f"{worst['model']}, {worst['tp']} × {worst['hardware']}, {worst['input_len']} in, {worst['output_len']} out"
    size = rows["error"].abs()
    told = (
        f"TensorRT-LLM, {len(rows)} published rows: the simulation is off by {percent(size.mean())} on average and by "
        f"{percent(size.max())} at most ({where}); signed mean {percent(rows['error'].mean(), signed=True)}. "
        "No constant was fitted to them."
    )
    return Reading((told,))


def published_table(rows: pd.DataFrame) -> Table:
    """A row a model and card: the errors over its published shapes."""
    made = []
    for (model, hardware, tp), group in rows.groupby(["model", "hardware", "tp"], sort=False) if len(rows) else ():
        made.append(
            {
                "model": model,
                "hardware": f"{tp} × {hardware}",
                "rows": len(group),
                "mean error": percent(group["error"].abs().mean()),
                "signed": percent(group["error"].mean(), signed=True),
                "largest": percent(group["error"].abs().max()),
            }
        )
    return table(pd.DataFrame(made), empty=NO_SIMULATION)


def published_rows(study: Study) -> pd.DataFrame:
    """`validation.published` where the scenario's report has a use for it: where it simulates anything."""
    return validation.published() if validation.simulates(study) else pd.DataFrame()
