"""Tests of what was run: machine, releases, settings, lengths."""

import itertools
import math

import numpy as np

from batchlab.claims.batching import BATCH, TOKENS
from batchlab.claims.body import AT_ONCE, Body
from batchlab.claims.data import Source
from batchlab.claims.outcome import Missing, Outcome, listed
from batchlab.plots.labels import whole
from batchlab.plots.select import recorded, valid
from batchlab.plots.style import engine_name

CARDS = {"a100_sxm": "A100-SXM-80G", "h200_sxm": "H200", "h100_sxm": "H100-SXM", "a10g": "A10G", "cpu": "a CPU"}
# chunked prefill: off by default in vLLM's V0 scheduler, always on in V1's, which every release since 0.8 has by
# default
WHOLE_PROMPTS = {"vllm-v0": True, "vllm-v0-multi-step": True, "vllm-v1": False, "vllm": False}


def card(name: str) -> str:
    return CARDS.get(name, name)


def differences(source: Source, body: Body, sweeps: list[str] | None = None) -> list[str]:
    """What of a body's recorded cells is not as in a study: card, model, releases, engines that it lacks."""
    there = body.studied(body.versions(sweeps))
    found = []
    cards, models = sorted(set(there["hardware"])), sorted(set(there["model"]))
    if cards != [source.hardware]:
        found.append(f"{listed([card(c) for c in cards])} instead of {card(source.hardware)}")
    if source.model not in models:
        found.append(f"{listed(models)} instead of {source.model}")
    for role, version in source.engines.items():
        try:
            engine = body.engine(role)
        except Missing:
            found.append(f"no {engine_name(role)}")
            continue
        ours = sorted(set(there.loc[there["engine"] == engine, "engine_version"]))
        if ours and not any(version.startswith(v) for v in ours):
            found.append(f"{engine_name(engine)} {listed(ours)} instead of {version}")
    if body.evidence == "simulated":
        found.append("simulated, not measured")
    return found


def same_setup(body: Body, source: Source, *, sweeps: list[str] | None = None) -> Outcome:
    """Card, model and releases of the recorded cells are the study's."""
    differ = differences(source, body, sweeps)
    rows = body.studied(body.frame[recorded(body.frame)])
    rows = rows[rows["sweep"].isin(sweeps)] if sweeps else rows
    cells = tuple(dict.fromkeys(rows["cell"]))
    told = f"{len(cells)} cells of {body.scenario}, {body.evidence}"
    return Outcome(not differ, told, cells, 1.0, tuple(differ))


def grid_covered(body: Body, *, datasets: list[str], max_batch_size: list[int], max_num_tokens: list[int]) -> Outcome:
    """Each pair of limits has a valid cell for each dataset, all at once."""
    made = body.points(AT_ONCE)
    good = made[valid(made) & np.isinf(made["request_rate"].astype(float))]
    good = good[good["engine"] == body.engine("vllm")]
    wanted = list(itertools.product(datasets, max_batch_size, max_num_tokens))
    have = set(zip(good["dataset"], good[BATCH], good[TOKENS], strict=True))
    there = [w for w in wanted if w in have]
    if not there:
        raise Missing(f"scenario {body.scenario} has no valid cell of the grid")
    rows = good[[(d, b, t) in set(wanted) for d, b, t in zip(good["dataset"], good[BATCH], good[TOKENS], strict=True)]]
    told = f"{len(there)} of {len(wanted)} points of the grid have a valid cell in {body.scenario}"
    return Outcome(len(there) == len(wanted), told, tuple(c for some in rows["cells"] for c in some))


def datasets_replayed(body: Body, *, lengths: list[list[int]], num_requests: int) -> Outcome:
    """Valid cells of the article's sweeps with exactly these lengths, and how many requests each sent."""
    frame = body.studied(body.frame[valid(body.frame) & body.frame["sweep"].isin((*AT_ONCE, "latency"))])
    counts, cells = [], ()
    for input_len, output_len in lengths:
        rows = frame[(frame["input_len"] == input_len) & (frame["output_len"] == output_len)]
        if rows.empty:
            raise Missing(f"scenario {body.scenario} has no valid cell of ({input_len}, {output_len})")
        counts += list(rows["num_requests"])
        cells += tuple(dict.fromkeys(rows["cell"]))
    low, high = min(counts), max(counts)
    told = (
        f"{body.scenario} sends exactly {listed([f'({i}, {o})' for i, o in lengths])}, "
        + (f"{low}" if low == high else f"{low} to {high}")
        + " requests a cell"
        + ("" if low == high == num_requests else f" instead of {num_requests}: fewer where the batch is small")
    )
    return Outcome(low == high == num_requests, told, cells, 1.0, ("the number of requests of the smaller batches",))


def rates_covered(body: Body, *, rates: list[float]) -> Outcome:
    """Valid cells at each of these request rates."""
    made = body.points((*AT_ONCE, "latency"))
    good = body.studied(made[valid(made)])
    rows = good[good["request_rate"].astype(float).isin(rates)]
    there = set(rows["request_rate"].astype(float))
    if not there:
        raise Missing(f"scenario {body.scenario} has no valid cell at these request rates")
    words = ["all at once" if math.isinf(r) else f"at {r:g} req/s" for r in rates if r in there]
    told = f"{len(rows)} points of {body.scenario}, {listed(words)}"
    return Outcome(there == set(rates), told, tuple(c for some in rows["cells"] for c in some))


def budget_above_prompt(body: Body) -> Outcome:
    """A cell of vLLM whose token budget is below its prompts' length is refused, or completes nothing."""
    frame = body.frame[recorded(body.frame) & (body.frame["engine"] == body.engine("vllm"))]
    below = frame[frame[TOKENS] < frame["input_len"].astype(float)]
    if below.empty:
        raise Missing(f"no recorded cell of scenario {body.scenario} has max_num_tokens below its input length")
    served = below[valid(below) & (below["failed"] == 0)].drop_duplicates("cell")
    if served.empty:
        return Outcome(
            True, f"none of {below['cell'].nunique()} such cells of {body.scenario} is valid", tuple(below["cell"])
        )
    row = served.iloc[0]
    release = f"{engine_name(row['engine'])} {row['engine_version']}"
    told = (
        f"{len(served)} cells of {body.scenario} with max_num_tokens {whole(row[TOKENS])} serve every prompt of "
        f"{whole(row['input_len'])} tokens, since {release} splits prompts over iterations (chunked prefill)"
    )
    differs = (f"{release} chunks prompts, the releases studied did not by default",)
    return Outcome(False, told, tuple(served["cell"]), 1.0, differs)


def whole_prompts(body: Body, *, sweeps: list[str]) -> Outcome:
    """The vLLM of these cells takes prompts whole, and no request was served from a prefix cache (each cell's
    validity)."""
    versions = body.versions(sweeps)
    engine = body.engine("vllm")
    frame = body.frame[body.frame["sweep"].isin(sweeps) & valid(body.frame) & (body.frame["engine"] == engine)]
    if frame.empty:
        raise Missing(f"scenario {body.scenario} has no valid cell of {listed(sweeps)}")
    version = versions.loc[versions["engine"] == engine, "engine_version"].iloc[0]
    unsplit = WHOLE_PROMPTS.get(engine, False)
    told = (
        f"{engine_name(engine)} {version} {'leaves prompts whole' if unsplit else 'always chunks prompts'}; no "
        f"request of "
        f"{frame['cell'].nunique()} valid cells was served from a prefix cache"
    )
    differs = () if unsplit else (f"{engine_name(engine)} {version} cannot leave prompts whole",)
    return Outcome(unsplit, told, tuple(dict.fromkeys(frame["cell"])), 1.0, differs)
