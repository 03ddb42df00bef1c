"""A cell proves that it measured what it says. Each check returns a reason, one line, or nothing."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from batchlab import metrics
from batchlab.cell import Cell
from batchlab.plan import most_tokens

# limits, stated here once and shown in the report
SEND_LAG_SHARE = 0.05  # all at once: the last request is on its way within 5% of the cell's duration,
SEND_LAG_MS = 100.0  # or within this
RATE_ERROR = 0.05  # finite rates: achieved against scheduled
LATE_P99_MS = 50.0  # finite rates: sent - scheduled
CLIENT_TPOT_ERROR = 0.05  # mean TPOT of client against engine
CLIENT_LAG_SHARE = 0.25  # p99 of the client's lag behind the engine, in mean TPOTs,
CLIENT_LAG_MS = 50.0  # or this
MERGED_SHARE = 0.05  # of the chunks, read together with a later one, so that their own time is lost
READ_LATE_MS = 5.0  # and later than this, and than a mean TPOT, after they had come in; else the client read at once
EARLY_MS = 1.0  # a token at the client before the engine says that it made it
CPU_SHARE = 0.9  # of one core, the busiest client process


def reasons(
    cell: Cell,
    requests: pd.DataFrame,
    iterations: pd.DataFrame,
    client: dict[str, Any],
    *,
    traced: bool,
    chat: bool = False,
    by_request: bool = True,
) -> list[str]:
    """Why this cell did not measure what it says; empty when it did.

    `traced`: the engine wrote its iterations. `by_request`: and its times of each request. `chat`: a chat template adds
    tokens of its own to each prompt.
    """
    found = [*_answers(requests, chat), *_arrivals(cell, requests), *_client(requests, client)]
    if traced:
        found += [*_inside(cell, requests, iterations, by_request), *_order(requests), *_lag(requests, client)]
    return found


def _some(indices: pd.Series) -> str:
    shown = ", ".join(str(i) for i in indices.head(3))
    return f"requests {shown}{', …' if len(indices) > 3 else ''}"


def _answers(r: pd.DataFrame, chat: bool) -> Iterator[str]:
    failed = r[~metrics.completed(r)]
    if len(failed):
        first = failed["error"].dropna()
        yield f"{len(failed)} of {len(r)} requests failed: {first.iloc[0] if len(first) else 'no token came'}"
    good = r[metrics.completed(r)]
    off = good[good["tokens"] != good["output_len"]]
    if len(off):
        yield (
            f"output length differs from the one asked for in {len(off)} requests ({_some(off['index'])}: "
            f"{off['tokens'].iloc[0]} instead of {off['output_len'].iloc[0]})"
        )
    counted = good[good["prompt_tokens"].notna()]
    added = counted["prompt_tokens"] - counted["input_len"]
    template = added.min() if chat and len(added) and added.min() > 0 else 0
    off = counted[added != template]
    if len(off):
        yield (
            f"prompt length differs from the one sent in {len(off)} requests ({_some(off['index'])}: "
            f"{off['prompt_tokens'].iloc[0]:.0f} instead of {off['input_len'].iloc[0]})"
        )
    hits = r[r["cached_tokens"].fillna(0) > 0]
    if len(hits):
        yield f"prefix cache hit in {len(hits)} requests ({_some(hits['index'])})"
    unsure = good[(good["count_source"] == "chunks") & (good["output_len"] > 1)]
    if len(unsure):
        yield f"the engine reports neither token ids nor usage: tokens of {len(unsure)} requests are counted by chunks"


def _arrivals(cell: Cell, r: pd.DataFrame) -> Iterator[str]:
    sent = r["sent_s"].dropna()
    if len(sent) < len(r):
        yield f"{len(r) - len(sent)} requests were never sent"
    late_ms = 1000.0 * (r["sent_s"] - r["scheduled_s"])
    closed = (cell.arrival or {}).get("kind") == "closed"
    if cell.request_rate is None or closed:
        limit = max(SEND_LAG_MS, 1000.0 * SEND_LAG_SHARE * metrics.duration_s(r))
        if late_ms.max() > limit:
            yield f"the last request was sent {late_ms.max():.0f} ms late (limit {limit:.0f} ms)"
        return
    if late_ms.quantile(0.99) > LATE_P99_MS:
        yield f"requests were sent late, p99 {late_ms.quantile(0.99):.0f} ms (limit {LATE_P99_MS:.0f} ms)"
    if len(r) > 2:
        planned, achieved = (r[c].max() - r[c].min() for c in ("scheduled_s", "sent_s"))
        if planned > 0 and abs(achieved / planned - 1) > RATE_ERROR:
            yield f"arrivals took {achieved:.1f} s instead of {planned:.1f} s"


def _client(r: pd.DataFrame, client: dict[str, Any]) -> Iterator[str]:
    share = client.get("cpu_share_max")
    if share is not None and share > CPU_SHARE:
        yield f"a client process was busy {100 * share:.0f}% of the time (limit {100 * CPU_SHARE:.0f}%)"
    merged, lag_ms = client.get("merged_share") or 0.0, client.get("receive_lag_p99_ms")
    # an engine may send tokens together too: only a client that reads later than a token takes is to blame
    late_ms = max(READ_LATE_MS, metrics.tpot_ms(r).mean())
    if merged > MERGED_SHARE and (lag_ms is None or lag_ms > late_ms):
        share = f"{100 * merged:.0f}%"
        yield f"the client read {share} of the chunks too late to time them (limit {100 * MERGED_SHARE:.0f}%)"


def _inside(cell: Cell, r: pd.DataFrame, it: pd.DataFrame, by_request: bool) -> Iterator[str]:
    if it.empty:
        yield "the engine wrote no iteration"
        return
    if it["running"].max() > cell.max_batch_size:
        yield f"the running batch reached {it['running'].max()}, above the limit {cell.max_batch_size}"
    tokens = it["prefill_tokens"] + it["decode_tokens"]
    most = most_tokens(cell)
    if tokens.max() > most:
        yield f"an iteration held {tokens.max()} tokens, above the limit {most}"
    known = it.dropna(subset=["max_batch_size", "max_num_tokens"])  # an engine that is only polled need not tell them
    in_force = set(zip(known["max_batch_size"], known["max_num_tokens"], strict=True))
    if cell.token_rule:
        if set(it["max_batch_size"]) != {cell.max_batch_size} or it["max_num_tokens"].max() > most:
            yield f"the engine's limits were not {cell.max_batch_size} and at most {most}"
    elif len(known) and in_force != {(cell.max_batch_size, cell.max_num_tokens)}:
        shown = ", ".join(f"{b}/{t}" for b, t in sorted(in_force))
        yield f"the engine's limits were {shown}, not {cell.max_batch_size}/{cell.max_num_tokens}"
    missing = r[metrics.completed(r) & r["engine_last_s"].isna()]
    if by_request and len(missing):
        yield f"the engine's trace lacks {len(missing)} requests ({_some(missing['index'])})"


def _order(r: pd.DataFrame) -> Iterator[str]:
    """No token is seen before it is made: else the two clocks, or whose tokens these are, cannot be trusted."""
    both = r[metrics.completed(r) & r["engine_last_s"].notna()]
    early_ms = 1000.0 * pd.concat([both[f"engine_{end}_s"] - both[f"{end}_s"] for end in ("first", "last")]).max()
    if early_ms > EARLY_MS:
        yield f"the client saw a token {early_ms:.1f} ms before the engine made it (limit {EARLY_MS:.0f} ms)"


def _lag(r: pd.DataFrame, client: dict[str, Any]) -> Iterator[str]:
    """The client's clock against the engine's: the same tokens, seen at both ends.

    Where the kernel's own receive times show that the client read everything as it came in, what lies between the two
    clocks is the engine's front end: a cost of serving, which the record states, and no fault of the measurement.
    """
    read_late_ms = client.get("receive_lag_p99_ms")
    if read_late_ms is not None and read_late_ms <= READ_LATE_MS:
        return
    both = r[metrics.completed(r) & r["engine_last_s"].notna()]
    many = both[both["tokens"] > both["first_tokens"]]
    if many.empty:
        return
    client_ms = metrics.tpot_ms(many).mean()
    engine_ms = (1000.0 * (many["engine_last_s"] - many["engine_first_s"]) / (many["tokens"] - 1)).mean()
    if engine_ms > 0 and abs(client_ms / engine_ms - 1) > CLIENT_TPOT_ERROR:
        yield (
            f"the client's mean TPOT is {client_ms:.2f} ms, the engine's {engine_ms:.2f} ms "
            f"(limit {100 * CLIENT_TPOT_ERROR:.0f}%)"
        )
    lag_ms = 1000.0 * (both["last_s"] - both["engine_last_s"])
    limit = max(CLIENT_LAG_MS, CLIENT_LAG_SHARE * client_ms)
    if lag_ms.quantile(0.99) > limit:
        yield f"the client saw last tokens {lag_ms.quantile(0.99):.0f} ms (p99) after the engine (limit {limit:.0f} ms)"
