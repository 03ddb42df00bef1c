"""Notebook 06's words and tables: what limits on TPOT and TTFT leave, what that costs, and what is recommended."""

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from batchlab.plots.labels import number, whole
from batchlab.plots.saving import Shown, save
from batchlab.plots.select import SERIES
from batchlab.plots.service import rates, tradeoff
from batchlab.plots.style import TRANSPORTS, engine_name
from batchlab.recommend import Recommendation
from batchlab.report.elsewhere import cards
from batchlab.report.elsewhere import cells as recorded_elsewhere
from batchlab.report.readings import Reading
from batchlab.report.tables import Table, table, told_apart
from batchlab.service import SETTING, THROUGHPUT, ServiceLimits, at_once, published, rate_lines, usable
from batchlab.study import Study

NAME = {"who": "engine", "dataset": "dataset", "setting": "batch / tokens"}
COST = {
    THROUGHPUT: "output throughput (tok/s)",
    "best_tok_s": "without a limit (tok/s)",
    "left": "throughput left",
    "gpus_for_unlimited": "GPUs for equal work",
    "gpus_relative": "GPUs against the best engine",
}


def who(row: dict[str, Any]) -> str:
    """ "vLLM 0.26.0, measured, in process"."""
    transport = row.get("transport")
    way = "" if transport in (None, row["evidence"]) or pd.isna(transport) else TRANSPORTS.get(transport, transport)
    return ", ".join(filter(None, [f"{engine_name(row['engine'])} {row['engine_version']}", row["evidence"], way]))


def _shown(rows: pd.DataFrame, columns: dict[str, str], empty: str) -> Table:
    """The columns of rows; those that say nothing new are left out."""
    if rows.empty:
        return table(pd.DataFrame(columns=list(columns)), columns, empty=empty)
    shown = rows.assign(
        who=_whose(rows, [_parsed(text) for text in rows["engine_options"]]),
        setting=_settings(rows),
        left=[f"{v:.0%}" if pd.notna(v) else None for v in rows["throughput_left"]],
    )
    told = {c: words for c, words in columns.items() if c != "gpus_relative" or shown[c].notna().any()}
    return table(shown[list(told)].astype(object), told, empty=empty)


def _whose(rows: pd.DataFrame, options: Sequence[dict[str, Any]]) -> list[str]:
    """Each row's engine, and of its evidence, transport, model and options what the rows differ in."""
    apart = told_apart(rows)
    words = [
        [
            engine_name(row["engine"]),
            row["evidence"] if "evidence" in apart else None,
            TRANSPORTS.get(row["transport"], row["transport"]) if "transport" in apart else None,
            row["model"] if rows["model"].nunique(dropna=False) > 1 else None,
            own,
        ]
        for row, own in zip(rows.to_dict("records"), _differing(options), strict=True)
    ]
    # simulated is evidence and transport in one
    return [", ".join(dict.fromkeys(w for w in told if w is not None and not pd.isna(w))) for told in words]


def _settings(rows: pd.DataFrame) -> list[str]:
    """ "128 / 16384", as sentences write it; a dash for what is not known."""
    sizes = [["–" if pd.isna(v) else f"{v:.0f}" for v in rows[column]] for column in SETTING]
    return ["–" if set(pair) == {"–"} else " / ".join(pair) for pair in zip(*sizes, strict=True)]


def _differing(options: Sequence[dict[str, Any]]) -> list[str | None]:
    """Each row's engine options in words, without those that all rows with options have in common."""
    # `args`, the options of an engine's own, stand among the others
    options = [{k: v for k, v in o.items() if k != "args"} | o.get("args", {}) for o in options]
    given = [o for o in options if o]
    alike = {k for k in (given[0] if given else {}) if all(o.get(k) == given[0][k] for o in given)}
    return [", ".join(f"{k} {v}" for k, v in o.items() if k not in alike) or None for o in options]


def _parsed(text: Any) -> dict[str, Any]:
    return json.loads(text) if isinstance(text, str) else {}


ASKS = ("tpot-limit", "ttft-limit")  # the sweeps that hold S1's own tables' settings


def points(opened: Study, cells: pd.DataFrame) -> pd.DataFrame:
    """The usable points of these cells, with what other scenarios have recorded of S1's tables and what S1 printed."""
    own = usable(cells)
    asked = cells[cells["sweep"].isin(ASKS)] if len(cells) else cells
    others = usable(recorded_elsewhere(opened, asked, *ASKS))
    return pd.concat([f for f in (own, others, published(own)) if len(f)] or [own], ignore_index=True)


def tpot_table(best: pd.DataFrame, limits: ServiceLimits) -> Table:
    """`service.under_tpot` as a table."""
    columns = NAME | {limits.tpot: f"{limits.statistic} TPOT (ms)"} | COST
    return _shown(best, columns, "No valid cell with all requests at once is recorded.")


def ttft_table(best: pd.DataFrame, limits: ServiceLimits) -> Table:
    """`service.under_ttft` as a table."""
    best = best.assign(kept=[_kept(r["request_rate"], r["request_rate_missed"]) for r in best.to_dict("records")])
    columns = NAME | {"kept": "kept up to (req/s)"} | {limits.ttft: f"{limits.statistic} TTFT (ms)"} | COST
    return _shown(best, columns, "No valid cell at a finite rate keeps the limit.")


def _kept(highest: float | None, missed: float | None) -> str:
    """ "13, not 16": the highest rate that keeps a limit, and the lowest that does not."""
    kept = "none" if highest is None or pd.isna(highest) else f"{highest:g}"
    return kept if missed is None or pd.isna(missed) else f"{kept}, not {missed:g}"


APART = "their shapes compare, their values do not"
NOTHING = "No cell of this scenario tells that."
FEW = 4  # so many are told one by one; more in sum


def tpot_reading(best: pd.DataFrame, limits: ServiceLimits) -> Reading:
    """The best settings under the limit and what they cost: a sentence each, or of many the dearest and one without."""
    rows = best.to_dict("records")
    if len(rows) <= FEW:
        return Reading(tuple(_tpot_sentence(row, limits) for row in rows) or (NOTHING,))
    kept = best[best[THROUGHPUT].notna() & (best["evidence"] != "published")]
    gone = int(best[THROUGHPUT].isna().sum())
    free = int((kept["throughput_left"] > 0.999).sum())
    told = [f"{len(rows) - gone} of the table's {len(rows)} rows keep the limit, {free} at no cost in throughput."]
    if len(kept):
        dearest = kept.loc[kept["throughput_left"].idxmin()].to_dict()
        told.append(f"It costs most here: {_tpot_sentence(dearest, limits)}")
    told += [_tpot_sentence(row, limits) for row in rows if pd.isna(row[THROUGHPUT])][:1]
    return Reading(tuple(told))


def _tpot_sentence(row: dict[str, Any], limits: ServiceLimits) -> str:
    name = f"{row['dataset']}, {who(row)}"
    if pd.isna(row[THROUGHPUT]):
        return f"{name}: no setting keeps {limits.tpot_ms:g} ms; the lowest TPOT is {number(row['lowest_tpot_ms'])} ms."
    tokens = "" if pd.isna(row["max_num_tokens"]) else f" with max_num_tokens {whole(row['max_num_tokens'])}"
    if row["throughput_left"] > 0.999:
        cost = "which is the best there is without the limit too"
    else:
        cost = (
            f"{row['throughput_left']:.0%} of the {number(row['best_tok_s'])} tok/s without the limit: "
            f"{row['gpus_for_unlimited']:.2f} GPUs do what one does without it"
        )
    return (
        f"{name}: best is max_batch_size {whole(row['max_batch_size'])}{tokens}, {number(row[THROUGHPUT])} tok/s at "
        f"{number(row[limits.tpot])} ms, {cost}."
    )


def ttft_reading(best: pd.DataFrame, limits: ServiceLimits) -> Reading:
    """The highest rates kept and the GPUs against the best engine: a sentence each, of many those that have an end."""
    rows = best.to_dict("records")
    ended = [row for row in rows if pd.notna(row["request_rate_missed"])]
    shown = rows if len(rows) <= FEW else ended
    found = [_ttft_sentence(row) for row in shown]
    if len(shown) < len(rows):
        found.append(f"The other {len(rows) - len(shown)} rows of the table keep it at every rate that is recorded.")
    return Reading(tuple(found) or (NOTHING,))


def _ttft_sentence(row: dict[str, Any]) -> str:
    missed = row["request_rate_missed"]
    beyond = "no higher rate is recorded" if pd.isna(missed) else f"{missed:g} req/s is too much"
    more = row["gpus_relative"] - 1
    cost = f"; {more:.1%} more GPUs than the best engine for equal throughput" if more > 0.0005 else ""
    return (
        f"{row['dataset']}, {who(row)}: {row['request_rate']:g} req/s keep the limit ({beyond}), "
        f"{number(row[THROUGHPUT])} tok/s{cost}."
    )


def tpot_figure(points: pd.DataFrame, best: pd.DataFrame, limits: ServiceLimits, study: Study) -> Shown | Reading:
    """Throughput against TPOT, all requests at once; a line where no dataset has enough settings."""
    shown = at_once(points)
    if shown.empty:
        return Reading(("No dataset has three max_batch_size with all requests at once, so there is no figure.",))
    axes = tradeoff(shown, limits.tpot, limits.tpot_ms, best, cards(shown, APART))
    what = "Output throughput against time per output token at every setting, a panel a dataset, the limit as a line."
    return save(axes[0].figure, "limit-tpot", f"{what} {tpot_reading(best, limits)}", study)


def ttft_figure(points: pd.DataFrame, best: pd.DataFrame, limits: ServiceLimits, study: Study) -> Shown | Reading:
    """TTFT against the request rate where two rates of one setting are recorded; otherwise a line that says so."""
    lines = rate_lines(points)
    if lines.empty:
        return Reading(("No setting is recorded at two request rates, so there is no figure against the rate.",))
    axes = rates(lines, limits.ttft, limits.ttft_ms, cards(lines, APART))
    what = "Time to first token against the request rate, a panel a dataset, with the limit as a line."
    return save(axes[0].figure, "limit-ttft", f"{what} {ttft_reading(best, limits)}", study)


def advice_table(made: Sequence[Recommendation], limits: ServiceLimits) -> Table:
    """A row a recommendation."""
    both = "both limits" if limits.tpot_ms and limits.ttft_ms else "the limit"
    if not made:
        return table(pd.DataFrame(columns=list(NAME)), NAME, empty=NOTHING)
    rows = pd.DataFrame(
        {
            **{name: getattr(r, name) for name in (*SERIES, *SETTING, "model", "dataset", "status")},
            "throughput": r.output_throughput_tok_s,
            "holds": _holds(r),
            "why": r.why.removeprefix(f"{r.status}: ").replace(limits.told(), both),
        }
        for r in made
    )
    shown = rows.assign(who=_whose(rows, [r.engine_options for r in made]), setting=_settings(rows))
    words = {"throughput": "output throughput (tok/s)", "holds": "TPOT kept up to", "status": "status", "why": "why"}
    columns = NAME | words
    return table(shown[list(columns)], columns, empty=NOTHING)


def _confirmed(r: Recommendation) -> str:
    way = TRANSPORTS.get(r.transport or "", "")
    where = f"{r.dataset} at {r.max_batch_size} / {r.max_num_tokens} up to {r.request_rate:g} req/s"
    return f"{where}, {engine_name(r.engine)} {way}".strip()


def _holds(r: Recommendation) -> str | None:
    """Up to which load the limit on TPOT is kept."""
    if r.max_batch_size is None:
        return None
    if r.any_load and r.status != "refuted":
        return "any load"
    return "no rate measured" if r.request_rate is None else f"{r.request_rate:g} req/s"


def advice_reading(made: Sequence[Recommendation], limits: ServiceLimits) -> Reading:
    """How many recommendations there are, which of them measured cells confirm or refute, and up to which rate."""
    given = [r for r in made if r.max_batch_size is not None]
    if not made:
        return Reading((NOTHING,))
    many = f"{len(given)} recommendation{'s' * (len(given) != 1)}"
    sure, wrong = ([r for r in given if r.status == status] for status in ("confirmed", "refuted"))
    told = f"For {limits.told()}: {many}, {len(sure)} of them confirmed by a measured cell"
    told += f" ({'; '.join(map(_confirmed, sure))})" if sure else ""
    told += f", {len(wrong)} refuted by one." if wrong else "."
    for r in wrong:
        told += f" {r.dataset} at {r.max_batch_size} / {r.max_num_tokens}: {r.why.removeprefix('refuted: ')}."
    if none := len(made) - len(given):
        told += f" {none} time{'s' * (none != 1)} no recorded setting keeps the limits."
    return Reading((told,))
