"""Tests by arithmetic: printed values against bounds, against one another, and claims against claims."""

import numpy as np

from batchlab import audit, models
from batchlab.audit.checks import worst
from batchlab.claims import data
from batchlab.claims.data import Claim, Claims
from batchlab.claims.outcome import Outcome, apart, listed
from batchlab.claims.setups import CARDS
from batchlab.plots.labels import number
from batchlab.plots.style import engine_name

WORDS = {
    "compute_roof": "more arithmetic than the card has",
    "memory_roof": "more than the card's memory holds and reads",
    "decode_step": "a step shorter than reading its memory",
    "batch_over_tpot": "more tokens than the batch makes at that TPOT",
    "idle_slots": "far fewer tokens than a full batch makes",
    "offered_load": "more out than in",
    "stated_limit": "another value is the last under the limit",
}


def audited(claims: Claims, claim: Claim, *, tables: list[str], checks: list[str]) -> Outcome:
    """The audit of printed tables finds nothing."""
    found, rows = [], 0
    for name in tables:
        table = data.table(name)
        rows += len(table)
        found += audit.check(table, only=tuple(checks))
    if not found:
        return Outcome(True, f"the printed values pass {listed(checks)}")
    first = worst([f for f in found if f.severity != "implausible"] or found)
    passed = " Its printed ratios are right." if "ratio" in checks and all(f.check != "ratio" for f in found) else ""
    lines = len({f.line for f in found})
    kinds = listed(list(dict.fromkeys(WORDS.get(f.check, f.check) for f in found)))
    told = f"{lines} of {rows} printed rows do not add up ({kinds}). Furthest off: {first.row}: {first.message}."
    return Outcome(False, named(told + passed), (), first.factor)


def named(text: str) -> str:
    """Engines and cards of a finding as their makers write them."""
    for name in ("tensorrt-llm", "vllm", "tgi"):
        text = text.replace(f"{name},", f"{engine_name(name)},").replace(f"{name} ", f"{engine_name(name)} ")
    for name, told in CARDS.items():
        text = text if name == "cpu" else text.replace(name, f"the {told}")
    return text


def understated(claims: Claims, claim: Claim, *, table: str, check: str) -> Outcome:
    """A stated lower bound is far below what follows from the same runs' other printed values."""
    rows = data.table(table)
    found = audit.check(rows, only=(check,))
    if not found:
        return Outcome(True, f"the printed values pass {check}")
    least, most = min(f.bound for f in found) / 1000, max(f.bound for f in found) / 1000
    first = max(found, key=lambda f: f.factor)
    low = min(f.factor for f in found)
    told = (
        f"more than {first.printed / 1000:g} s is true only as a lower bound: in {len(found)} of {len(rows)} runs "
        f"the mean "
        f"must be {number(least)} to {number(most)} s at least, {low:,.0f} to {first.factor:,.0f} times as much. "
        f"{first.row}: {first.message}"
    )
    return Outcome(False, named(told), (), first.factor)


def agrees_with(claims: Claims, claim: Claim, *, other: int) -> Outcome:
    """Another claim of the same study does not say the contrary."""
    against = claims.claim(other)
    contrary = {k: (v, against.says[k]) for k, v in claim.says.items() if against.says.get(k, v) != v}
    if not contrary:
        return Outcome(True, f"claim {other} says the same")
    return Outcome(False, listed([f"{k} {a}, but by claim {other} it {b}" for k, (a, b) in contrary.items()]))


def default_budget(claims: Claims, claim: Claim, *, model: str, stated: int, least: int) -> Outcome:
    """vLLM's default token budget without chunked prefill: the larger of the context length and a least value."""
    length = models.shape(model).max_len
    found = max(length, least)
    told = (
        f"vLLM 0.6.2 sets max_num_tokens to max(max_model_len, {least}) by default, which for {model}'s context of "
        f"{length} is {found}, "
        f"not {stated}, unless max_model_len was set to {stated} or less, which is not printed"
    )
    return Outcome(found == stated, told, (), apart(found, stated))


def printed_gain(
    claims: Claims, claim: Claim, *, table: str, rates: dict[str, float], stated: float, within: float
) -> Outcome:
    """A stated gain of TensorRT-LLM's throughput over vLLM's, each at a stated rate of a printed table."""
    rows = data.table(table)
    value = {
        engine: float(
            rows[(rows["engine"] == engine) & (rows["request_rate_req_s"] == rate)]["output_throughput_tok_s"].iloc[0]
        )
        for engine, rate in rates.items()
    }
    found = value["tensorrt-llm"] / value["vllm"] - 1
    told = f"{value['tensorrt-llm']:g} over {value['vllm']:g} tok/s is {found:+.1%}, printed as {stated:.1%}"
    if within > 0.01:
        low, high = stated - within, stated + within
        told = (
            f"{value['tensorrt-llm']:g} over {value['vllm']:g} tok/s is {found:+.1%} (stated: {low:.0%} to {high:.0%})"
        )
    return Outcome(abs(found - stated) <= within, told, (), apart(1 + found, 1 + stated))


def edge_without_lead(claims: Claims, claim: Claim, *, other: int, table: str, engine: str, over: str) -> Outcome:
    """Another claim says the contrary, and the engine that is said to have the edge is behind in every row of a
    table."""
    contrary = agrees_with(claims, claim, other=other)
    rows = data.table(table)
    shape = ["input_len", "output_len"]
    sides = {e: rows[rows["engine"] == e].set_index(shape)["output_throughput_tok_s"] for e in (engine, over)}
    lead = int((sides[engine] > sides[over]).sum())
    told = f"{contrary.detail}; and {engine_name(engine)} leads in {lead} of {len(sides[engine])} rows of table 1"
    return Outcome(contrary.holds and lead > 0, told)


def memory_level(claims: Claims, claim: Claim, *, table: str, card_gb: float, within: float) -> Outcome:
    """Memory that an engine takes at its start does not vary with the token budget."""
    rows = data.table(table)
    used, share = rows["gpu_memory_gb"], float(rows["gpu_memory_utilization"].iloc[0])
    ratio = used.max() / used.min()
    told = (
        f"{used.min():g} to {used.max():g} GB are printed ({ratio - 1:+.0%}), but vLLM takes {share:.0%} of the card "
        f"when it starts, "
        f"{share * card_gb:.1f} of {card_gb:g} GB, and fills what is left of it with KV cache whatever the budget is"
    )
    return Outcome(bool(ratio <= 1 + within), told, (), float(ratio))


def best_memory_share(claims: Claims, claim: Claim, *, table: str, card_gb: float, low: float, high: float) -> Outcome:
    """The memory printed at the best budget of each load, as a share of the card's."""
    rows = data.table(table)
    parts, shares = [], []
    for dataset, group in rows.groupby("dataset", sort=False):
        best = group.loc[group["request_throughput_req_s"].idxmax()]
        shares.append(best["gpu_memory_gb"] / card_gb)
        parts.append(
            f"{dataset} is best at max_num_tokens {best['max_num_tokens']:g}, which takes {best['gpu_memory_gb']:g} "
            f"GB, "
            f"{shares[-1]:.0%} of {card_gb:g} GB"
        )
    found = np.array(shares)
    told = (
        f"in the study's own table {listed(parts)} (stated: {low:.0%} to {high:.0%}); a number of tokens is no amount "
        "of memory"
    )
    return Outcome(bool(((found >= low) & (found <= high)).all()), told, (), apart(float(found.max()), high))


def fixed_lengths(claims: Claims, claim: Claim, *, stated: list[int], script: list[int], ignore_eos: bool) -> Outcome:
    """Output lengths that are said to be fixed are so in the load script."""
    low, high = script
    told = (
        f"{listed([str(s) for s in stated])} output tokens are stated, but the study's load script draws max_tokens "
        f"from {low} to "
        f"{high}" + ("" if ignore_eos else " and lets the model stop earlier (no ignore_eos)")
    )
    return Outcome(low == high and ignore_eos, told, (), apart(high, low))
