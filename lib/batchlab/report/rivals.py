"""Notebook 13's words, figures and tables: measured engines over one transport, with one client."""

import json
import math
from collections.abc import Iterable

import pandas as pd

from batchlab import rivals
from batchlab.noise import LATE
from batchlab.plots.crosses import crosses, varied
from batchlab.plots.labels import metric_words, whole
from batchlab.plots.saving import Shown, save
from batchlab.plots.style import engine_name
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table
from batchlab.scenario import Scenario
from batchlab.study import Study

NOTHING = "No sweep of this scenario measures two engines over one transport{rate}, so there is nothing to compare."
NAMES = {
    "output_throughput_tok_s": "throughput",
    "tpot_mean_ms": "tpot",
    "running_batch_mean": "running-batch",
    "ttft_mean_ms": "ttft",
}
METRICS = list(NAMES)
# what max_num_tokens bounds, and what that does to requests that decode: the engines' own schedulers, see sim.policies
DESIGN = {
    "vllm": "vLLM puts pieces of prompts and a token of each decoding request into the same iteration; max_num_tokens "
    "bounds their sum, and requests are admitted while memory lasts, preempted when it does not.",
    "sglang": "SGLang prefills in iterations of their own, during which decoding pauses; max_num_tokens bounds the "
    "prompt tokens of such an iteration, and a request is admitted only when memory for all of its output is left.",
    "tensorrt-llm": "TensorRT-LLM puts prompts and a token of each decoding request into the same iteration; "
    "max_num_tokens bounds their sum, and a request is admitted only when memory for all of its output is left.",
    "tgi": "TGI reserves a request's memory in full before it is admitted; max_num_tokens bounds the prompt tokens of "
    "an iteration.",
}


def _finite(at_once: bool) -> str:
    return "" if at_once else " at a finite rate"


def obstacle(scenario: Scenario, found: pd.DataFrame, *, at_once: bool) -> str | None:
    """None where two engines are recorded, else why not, in one line."""
    sweep, engines = rivals.sweep_of(scenario, at_once=at_once), rivals.recorded_engines(found)
    if len(engines) > 1:
        return None
    if sweep is None:
        return NOTHING.format(rate=_finite(at_once))
    asked = " and ".join(engine_name(e) for e in scenario.engines_of(sweep))
    there = f"only {engine_name(engines[0])}" if engines else "neither"
    return f"Sweep `{sweep.name}` asks for {asked}; {there} is recorded so far, so there is nothing to compare."


def figure(study: Study, found: pd.DataFrame, metric: str, *, at_once: bool = True) -> Shown | Reading:
    """One metric along both limits, every engine in each panel; or the line that there is nothing to compare."""
    if why := obstacle(study.scenario, found, at_once=at_once):
        return Reading((why,))
    axes = crosses(found, metric, defaults=study.scenario.defaults, log_y=metric.startswith("ttft"))
    words, _ = metric_words(metric)
    who = " and ".join(engine_name(e) for e in rivals.recorded_engines(found))
    alt = f"{words[0].upper() + words[1:]} of {who} along both limits, a column a dataset. "
    told = reading(study, found, metric, at_once=at_once)
    return save(axes[0].figure, f"engines-{NAMES[metric]}", alt + " ".join(told.sentences), study)


def reading(study: Study, found: pd.DataFrame, metric: str, *, at_once: bool = True) -> Reading:
    """For each dataset the ratio to the first engine at both ends of each limit, and where it is furthest from 1."""
    if why := obstacle(study.scenario, found, at_once=at_once):
        return Reading((why,))
    words, _ = metric_words(metric)
    lines = varied(rivals.measured(found), study.scenario.defaults)
    parts = [rivals.ratios(found, axis, metric, study.scenario.defaults) for axis in lines]
    every = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=rivals.RATIOS)
    told = []
    for (engine, dataset), rows in every.groupby(["engine", "dataset"], sort=False):
        ends = "; ".join(_ends(axis, some) for axis, some in rows.groupby("axis", sort=False))
        known = rows["apart"].dropna()
        planned = sum(line.loc[line["dataset"] == dataset, axis].nunique() for axis, line in lines.items())
        gone = (
            f" {planned - len(rows)} of {planned} points are left out: not recorded and valid for both."
            if planned > len(rows)
            else ""
        )
        sure = f" {int(known.sum())} of {len(known)} points differ by more than their intervals." if len(known) else ""
        over = f"{engine_name(engine)}'s {words} over {engine_name(rows['base'].iloc[0])}'s"
        told.append(f"{dataset}: {over} is {ends}.{sure}{gone}")
    return Reading(tuple(told) or ("No point is valid for both engines.",))


def _ends(axis: str, rows: pd.DataFrame) -> str:
    """ "0.98 (0.95 to 1.01) at max_batch_size 4 and 1.10 (…) at 512, furthest from 1 at 128 with 1.20 (…)"."""
    first, last = rows.iloc[0], rows.iloc[-1]
    told = f"{_ratio(first)} at {axis} {whole(first['at'])}"
    if len(rows) > 1:
        told += f" and {_ratio(last)} at {whole(last['at'])}"
    far = rows.loc[(rows["ratio"].map(math.log).abs()).idxmax()]
    if far["at"] not in (first["at"], last["at"]):
        told += f", furthest from 1 at {whole(far['at'])} with {_ratio(far)}"
    return told


def _ratio(row: pd.Series) -> str:
    if pd.isna(row["ratio_lo"]):
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.2f} ({row['ratio_lo']:.2f} to {row['ratio_hi']:.2f})"


def design(found: pd.DataFrame) -> Reading:
    """What differs by the engines' design, and with which options each was started."""
    engines = rivals.recorded_engines(found)
    if len(engines) < 2:
        return Reading((NOTHING.format(rate=""),))
    real = rivals.measured(found)
    told = [DESIGN[e] for e in engines if e in DESIGN]
    for engine in engines:
        row = real[real["engine"] == engine].iloc[0]
        told.append(f"{engine_name(engine)} {row['engine_version']}: {', '.join(_options(row['engine_options']))}.")
    return Reading((" ".join(told),))


def _options(spelled: str) -> Iterable[str]:
    options = json.loads(spelled)
    flat = {k: v for k, v in options.items() if k != "args"} | options.get("args", {})
    return [f"{k} {v}" for k, v in flat.items()] or ["its defaults"]


def numbers(study: Study, *found: pd.DataFrame) -> Table:
    """A row a point and further engine that is valid for both: the ratios of every figure."""
    by = ["dataset", "engine", "base", "axis", "at", "other"]
    rows: list[pd.DataFrame] = []
    for points, metrics in zip(found, (METRICS[:3], METRICS[3:]), strict=False):
        for axis in varied(rivals.measured(points), study.scenario.defaults):
            parts = [
                rivals.ratios(points, axis, m, study.scenario.defaults).assign(**{m: lambda r: r.apply(_ratio, axis=1)})
                for m in metrics
            ]
            parts = [part.set_index(by)[metrics[n]] for n, part in enumerate(parts) if len(part)]
            rows += [pd.concat(parts, axis=1).reset_index()] if parts else []
    if not rows:
        return table(pd.DataFrame(columns=by), by, empty=NOTHING.format(rate=""))
    shown = pd.concat(rows, ignore_index=True).groupby(by, sort=False, as_index=False).first()
    batch = shown["axis"] == "max_batch_size"
    limits = (shown["at"].where(batch, shown["other"]), shown["other"].where(batch, shown["at"]))
    shown["limits"] = [f"{whole(size)} / {whole(tokens)}" for size, tokens in zip(*limits, strict=True)]
    shown["over"] = [f"{engine_name(r.engine)} / {engine_name(r.base)}" for r in shown.itertuples()]
    # of two engines, the heading says which over which: a column for it pushes the last figure off the page
    pairs = shown["over"].unique()
    columns = {"dataset": pairs[0]} if len(pairs) == 1 else {"dataset": "dataset", "over": "ratio of"}
    columns |= {"limits": "batch / tokens"} | {m: metric_words(m)[0] for m in METRICS if m in shown}
    return table(shown.drop(columns="engine").drop_duplicates(["dataset", "over", "limits"]), columns)


def front_ends(behind: pd.DataFrame, other: pd.DataFrame) -> Reading:
    """Where an engine's HTTP front end, not its iterations, sets the throughput: its worst point by engine.

    `other`: `rivals.front_ends` of the same points with other options of an engine, set beside them.
    """
    if behind["engine"].nunique() < 2:
        return Reading((NOTHING.format(rate=""),))
    told = []
    for engine, rows in behind.groupby("engine", sort=False):
        late, worst = rows[rows["limits"]], rows.loc[rows["behind_s"].idxmax()]
        share = f"{100 * LATE:.0f}%"
        if late.empty:
            told.append(f"{engine_name(engine)}'s front end is nowhere behind it by more than {share} of the run.")
            continue
        told.append(
            f"{engine_name(engine)}'s front end is behind its engine by more than {share} of the run at {len(late)} of "
            f"{len(rows)} points. The furthest is {worst['dataset']} at batch {whole(worst['max_batch_size'])} and "
            f"{whole(worst['max_num_tokens'])} tokens: the engine's last iteration ended after "
            f"{worst['inside_s']:.1f} s ({worst['inside_tok_s']:,.0f} tok/s), the client had the last token after "
            f"{worst['client_s']:.1f} s ({worst['client_tok_s']:,.0f} tok/s)."
        )
    return Reading((*told, *_eased(behind, other), *_hosts(behind)))


def _eased(behind: pd.DataFrame, other: pd.DataFrame) -> Iterable[str]:
    """What other options of an engine do to its front end, beside the same point with the usual ones (`behind`)."""
    place = ["engine", "dataset", "max_batch_size", "max_num_tokens"]
    for row in other.merge(behind, on=place, suffixes=("", "_usual")).itertuples():
        usual = set(_options(row.engine_options_usual))
        changed = ", ".join(option for option in _options(row.engine_options) if option not in usual)
        yield (
            f"{engine_name(row.engine)} with {changed}, {row.dataset} at batch {whole(row.max_batch_size)} and "
            f"{whole(row.max_num_tokens)} tokens: {row.inside_tok_s:,.0f} tok/s inside, {row.client_tok_s:,.0f} at the "
            f"client, {row.behind_s:.1f} s behind on {row.cores} cores; without it {row.inside_tok_s_usual:,.0f}, "
            f"{row.client_tok_s_usual:,.0f} and {row.behind_s_usual:.1f} s on {row.cores_usual}."
        )


def _hosts(behind: pd.DataFrame) -> Iterable[str]:
    """Where front ends limit and a dataset's points come from hosts of different sizes: how many of each they limit."""
    told = []
    for (engine, dataset), rows in behind.groupby(["engine", "dataset"], sort=False):
        if rows["cores"].nunique() > 1 and rows["limits"].any():
            parts = [f"{some['limits'].sum()} of {len(some)} with {n} cores" for n, some in rows.groupby("cores")]
            told.append(f"{engine_name(engine)}, {dataset}: {' and '.join(parts)}")
    if told:
        yield (
            "A front end is work of the host, and the points come from hosts of different sizes, so what differs "
            f"between two points need not be the limit's doing. Behind by so much are, {'; '.join(told)}."
        )
