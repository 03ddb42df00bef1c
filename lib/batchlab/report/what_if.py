"""What 10-what-if tells: equal step times for both engines, and other cards and models."""

from collections.abc import Sequence

import pandas as pd

from batchlab import plots, what_if
from batchlab.cell import SIMULATED
from batchlab.plots.labels import metric_words, number, whole
from batchlab.plots.saving import Shown
from batchlab.plots.setups import setups as draw_setups
from batchlab.plots.style import engine_name
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.study import Study

ONLY_SIMULATED = "Other cards and models are shown in reports of scenarios that are simulated throughout, such as a100."
NO_EXPERIMENT = "This scenario has no sweep with equal step times."
SAME = 0.01  # relative difference that is not called one


def frame(study: Study, setups: Sequence[str], engine: str) -> pd.DataFrame:
    """`what_if.frame` where the scenario is simulated throughout, else nothing: measured ones stay quick to render."""
    simulated = all(cell.transport == SIMULATED for cell in study.cells())
    return what_if.frame(study, setups, engine) if simulated else pd.DataFrame()


def signed(value: float) -> str:
    return f"{value:+.1%}"


def equal_figure(study: Study, sweep: str, metric: str) -> Shown | Reading:
    """vLLM V0, TensorRT-LLM, and TensorRT-LLM with vLLM's step times, against max_batch_size."""
    own = "throughput" if sweep == "equal-step-times" else "latency"
    if not (study.has(sweep) and study.has(own)):
        return Reading((NO_EXPERIMENT,))
    cells = pd.concat([study.ensure(own), study.ensure(sweep)]).drop_duplicates("cell")
    shown = cells[cells["engine"].isin(["vllm-v0", "tensorrt-llm", "tensorrt-llm-equal"])]
    shown = shown[shown["dataset"].isin(study.frame(sweep)["dataset"])]
    latency = metric.startswith("ttft")
    axes = plots.side_by_side(
        plots.points(shown), "max_batch_size", metric, defaults=study.scenario.defaults, log_y=latency
    )
    words, _ = metric_words(metric)
    told = " ".join(s for s in equal_reading(study).sentences if words in s)
    alt = f"{words} of vLLM V0 and of TensorRT-LLM with its own and with equal step times. {told}"
    return plots.save(axes[0].figure, f"equal-step-times-{'ttft' if latency else 'throughput'}", alt, study)


def equal_table(study: Study) -> Table:
    """TensorRT-LLM over vLLM V0 at each max_batch_size, a column a figure: own step times / equal ones."""
    rows = []
    for (dataset, batch), group in what_if.equal_step_times(study).groupby(["dataset", "max_batch_size"], sort=False):
        row = {"dataset": dataset, "max_batch_size": whole(batch)}
        for one in group.to_dict("records"):
            row[metric_words(one["figure"])[0]] = f"{signed(one['own'])} / {signed(one['equal'])}"
        rows.append(row)
    return table(pd.DataFrame(rows), empty=NO_EXPERIMENT)


def equal_reading(study: Study) -> Reading:
    """For each dataset and figure: the range of the difference, with own and with equal step times."""
    found = what_if.equal_step_times(study)
    sentences = []
    for (dataset, figure), group in found.groupby(["dataset", "figure"], sort=False):
        (own_low, own_high), (low, high) = what_if.spread(group["own"]), what_if.spread(group["equal"])
        if max(abs(low), abs(high)) <= SAME:
            left = f"with equal step times they differ by {SAME:.0%} at most: the kernels make the difference"
        else:
            left = f"with equal step times {signed(low)} to {signed(high)}: that much is scheduling alone"
        sentences.append(
            f"{dataset}, {metric_words(figure)[0]} of TensorRT-LLM against vLLM V0 over max_batch_size "
            f"{group['max_batch_size'].min()} to {group['max_batch_size'].max()}: with its own step times "
            f"{signed(own_low)} to {signed(own_high)}, {left}."
        )
    return Reading(tuple(sentences) or (NO_EXPERIMENT,))


def setup_figure(study: Study, cells: pd.DataFrame, metric: str, name: str, label: str) -> Shown | Reading:
    """One metric of all setups."""
    if cells.empty:
        return Reading((ONLY_SIMULATED,))
    axes = draw_setups(cells, metric, label)
    alt = f"{label} of each setup against max_batch_size. {setup_reading(cells)}"
    return plots.save(axes[0].figure, name, alt, study)


def setup_table(cells: pd.DataFrame) -> Table:
    """A row a setup and dataset, at the batch size with the highest throughput."""
    rows = []
    for (setup, dataset), group in cells.groupby(["setup", "dataset"], sort=False) if len(cells) else ():
        best = group.loc[group["output_throughput_tok_s"].idxmax()]
        rows.append(
            {
                "setup": setup,
                "dataset": dataset,
                "best batch size": whole(best["max_batch_size"]),
                "output tokens a second": best["output_throughput_tok_s"],
                "a second and card": best["throughput_per_card_tok_s"],
                "mean TPOT (ms)": best["tpot_mean_ms"],
                "mean running batch": best["running_batch_mean"],
                "KV cache (tokens)": number(best["kv_tokens"]),
                "preemptions": int(best["preemptions"]),
            }
        )
    return table(pd.DataFrame(rows), empty=ONLY_SIMULATED)


def setup_reading(cells: pd.DataFrame) -> Reading:
    """The setup with the most throughput a card, for each model and dataset."""
    if cells.empty:
        return Reading((ONLY_SIMULATED,))
    found = []
    for (model, dataset), group in cells.groupby(["model", "dataset"], sort=False):
        best = group.loc[group["throughput_per_card_tok_s"].idxmax()]
        others = group[group["setup"] != best["setup"]]
        then = ""
        if len(others):
            second = others.loc[others["throughput_per_card_tok_s"].idxmax()]
            ratio = best["throughput_per_card_tok_s"] / second["throughput_per_card_tok_s"]
            then = f", {ratio:.1f} times the next, {second['setup']}"
        rate, batch = number(best["throughput_per_card_tok_s"]), whole(best["max_batch_size"])
        found.append(
            f"{model}, {dataset}, {engine_name(best['engine'])}: the most output tokens a card come from "
            f"{best['setup']}, {rate} tok/s at max_batch_size {batch}{then}."
        )
    found.append(
        "Simulated, on operator times alone: no host time, no power limit and no serving; see the limits of 08."
    )
    return Reading(tuple(found))
