"""Checks of one row against arithmetic and against its card. Each returns Finding's last fields, or None."""

import math
from dataclasses import dataclass
from typing import Any

from batchlab.audit.roofs import Roofs

Found = dict[str, Any] | None
IDLE_SHARE = 0.5  # of a full batch's throughput, below which the rest needs an explanation


@dataclass(frozen=True, slots=True)
class Row:
    """A row's numbers (NaN where it has none), the bounds of its card and model if they are known, the tolerance."""

    values: dict[str, Any]
    roofs: Roofs | None
    tolerance: float

    def get(self, name: str) -> float:
        value = self.values.get(name)
        return math.nan if value is None else float(value)

    def throughput(self) -> tuple[str, float]:
        """(column, output tokens a second): as printed, else requests a second times their length."""
        tokens = self.get("output_throughput_tok_s")
        if not math.isnan(tokens):
            return "output_throughput_tok_s", tokens
        return "request_throughput_req_s", self.get("request_throughput_req_s") * self.get("output_len")

    def context(self) -> float:
        """Tokens that a request holds on average while it runs."""
        return self.get("input_len") + self.get("output_len") / 2


def requests(count: float) -> str:
    return f"{count:,.0f} request{'s' * (round(count) != 1)}"


def found(column: str, printed: float, bound: float, message: str, *, low: bool = False) -> dict[str, Any]:
    """The fields of a finding; `low`: the printed value is below what it must at least be."""
    factor = bound / printed if low else printed / bound
    return {"column": column, "printed": printed, "bound": bound, "factor": factor, "message": message}


def batch_over_tpot(row: Row) -> Found:
    """B requests, each a token every TPOT: no more than B / TPOT tokens a second (and first tokens besides)."""
    column, tokens = row.throughput()
    batch, tpot, length = row.get("max_batch_size"), row.get("tpot_mean_ms"), row.get("output_len")
    first = length / (length - 1) if length > 1 else 1.0  # the first token is none of TPOT's
    bound = 1000 * batch / tpot * first
    if not tokens > bound * (1 + row.tolerance):
        return None
    told = f"{tokens:,.0f} tok/s, but {requests(batch)} at {tpot:g} ms a token make {bound:,.0f} tok/s at most"
    return found(column, tokens, bound, told)


def offered_load(row: Row) -> Found:
    """No more comes out than goes in: request rate times output length."""
    column, tokens = row.throughput()
    rate, length = row.get("request_rate_req_s"), row.get("output_len")
    bound = rate * length
    if not math.isfinite(bound) or not tokens > bound * (1 + row.tolerance):
        return None
    told = f"{tokens:,.0f} tok/s out, but {rate:g} req/s of {length:g} tokens offer {bound:,.0f} tok/s"
    return found(column, tokens, bound, told)


def queue(row: Row) -> Found:
    """All at once: who waits for a slot waits for those before him, so mean TTFT follows from throughput.

    With N requests, at most R running and a makespan M, a request that is k-th in line cannot begin before k - R others
    have ended: on average over the requests at least M (1 - R/N)^2 / 2, where they end evenly.
    """
    tokens, ttft = row.throughput()[1], row.get("ttft_mean_ms")
    count, length = row.get("num_requests"), row.get("output_len")
    if not math.isinf(row.get("request_rate_req_s")) or math.isnan(tokens * ttft * count * length):
        return None
    running = row.get("max_batch_size")
    if row.roofs:
        kv = row.roofs.kv_tokens(row.get("gpu_memory_utilization"), row.get("kv_cache_gib"))
        running = row.roofs.running(row.context(), running, kv) if not math.isnan(row.context()) else running
    if not running < count:
        return None
    makespan = count * length / tokens
    bound = 1000 * makespan * (1 - running / count) ** 2 / 2
    if not ttft < bound * (1 - row.tolerance):
        return None
    told = (
        f"mean TTFT {ttft / 1000:,.3g} s, but {count:g} requests of {length:g} tokens at {tokens:,.0f} tok/s take "
        f"{makespan:,.0f} s, and with at most {running:,.0f} running the mean wait is {bound / 1000:,.0f} s at least"
    )
    return found("ttft_mean_ms", ttft, bound, told, low=True)


def backlog(row: Row) -> Found:
    """At a finite rate above what is served, the queue grows to the end, so mean TTFT follows from both rates.

    Little's law: the last of N arrivals comes at (N-1)/rate; what is then left to the run's end is the last one's TTFT
    and decoding. TTFT grows evenly up to it, so its mean is at least half of that.
    """
    tokens, ttft, tpot = row.throughput()[1], row.get("ttft_mean_ms"), row.get("tpot_mean_ms")
    count, length, rate = row.get("num_requests"), row.get("output_len"), row.get("request_rate_req_s")
    if math.isinf(rate) or math.isnan(tokens * ttft * tpot * count * length * rate):
        return None
    left = count * length / tokens - (count - 1) / rate
    scatter = 2 * math.sqrt(count) / rate  # of Poisson arrivals' last one, two standard deviations
    bound = 1000 * (left - scatter) / 2 - (length - 1) * tpot / 2
    if not bound > 0 or not ttft < bound * (1 - row.tolerance):
        return None
    told = (
        f"mean TTFT {ttft / 1000:,.3g} s, but {rate:g} req/s came and {tokens / length:.3g} req/s were served: the "
        f"queue that {count:g} requests leave makes the mean wait {bound / 1000:,.3g} s at least"
    )
    return found("ttft_mean_ms", ttft, bound, told, low=True)


def compute_roof(row: Row) -> Found:
    """Tokens a second against the card's peak arithmetic."""
    column, tokens = row.throughput()
    lengths = row.get("input_len"), row.get("output_len")
    if row.roofs is None or math.isnan(tokens) or any(map(math.isnan, lengths)):
        return None
    bound = row.roofs.compute_tok_s(*lengths)
    if not tokens > bound:
        return None
    tera = row.roofs.request_flops(*lengths) / 1e12
    told = (
        f"{tokens:,.0f} tok/s, but a request is {tera:,.3g} TFLOP and {row.roofs.card.name} peaks at "
        f"{row.roofs.peak_flops / 1e12:,.0f} TFLOP/s: {bound:,.0f} tok/s at most ({tokens / bound:.0%} of the peak)"
    )
    return found(column, tokens, bound, told)


def memory_roof(row: Row) -> Found:
    """Tokens a second against what the card's memory holds and how fast it is read."""
    column, tokens = row.throughput()
    context = row.context()
    if row.roofs is None or math.isnan(tokens) or math.isnan(context):
        return None
    kv = row.roofs.kv_tokens(row.get("gpu_memory_utilization"), row.get("kv_cache_gib"))
    running = row.roofs.running(context, row.get("max_batch_size"), kv)
    bound = row.roofs.memory_tok_s(running, context) if running > 0 else 0.0
    if not tokens > bound > 0:
        return None
    length, step = row.get("output_len"), row.roofs.step_s(running, context)
    why = "max_batch_size" if running < kv / context else f"the KV cache has room for {kv / 1000:,.1f}k tokens"
    told = (
        f"{tokens:,.0f} tok/s, but at most {requests(running)} of {context:,.0f} tokens run at once ({why}) and a step "
        f"over them reads for {1000 * step:,.1f} ms: {bound:,.0f} tok/s at most, which is {bound / length:,.3g} req/s"
    )
    return found(column, tokens, bound, told)


def decode_step(row: Row) -> Found:
    """TPOT against the time that its step's weights, keys and values take to read.

    Throughput times TPOT is the number of requests running (Little's law).
    """
    tokens, tpot = row.throughput()[1], row.get("tpot_mean_ms")
    if row.roofs is None or math.isnan(tpot):
        return None
    running, context = tokens * tpot / 1000, row.context()
    known = not math.isnan(running * context)
    bound = 1000 * row.roofs.step_s(running if known else 1.0, context if known else 1.0)
    if not tpot < bound:
        return None
    what = (
        f"{tokens:,.0f} tok/s × {tpot:g} ms = {running:,.1f} requests running, and their keys, values and the weights"
    )
    told = f"TPOT {tpot:g} ms, but {what if known else 'the weights'} take {bound:,.2f} ms to read at full bandwidth"
    return found("tpot_mean_ms", tpot, bound, told, low=True)


def prefill_time(row: Row) -> Found:
    """Mean TTFT against the time of one prompt on an idle card at its peak."""
    ttft, length = row.get("ttft_mean_ms"), row.get("input_len")
    if row.roofs is None or math.isnan(ttft * length):
        return None
    bound = 1000 * row.roofs.prefill_s(length)
    if not ttft < bound:
        return None
    told = f"mean TTFT {ttft:g} ms, but a prompt of {length:g} tokens takes {bound:,.1f} ms at the card's peak"
    return found("ttft_mean_ms", ttft, bound, told, low=True)


def card_memory(row: Row) -> Found:
    """Memory in use against the memory there is."""
    used = row.get("gpu_memory_gb")
    if row.roofs is None or math.isnan(used):
        return None
    bound = row.roofs.card.memory_bytes / 1e9
    return found("gpu_memory_gb", used, bound, f"{used:g} GB used of {bound:,.1f} GB") if used > bound else None


def idle_slots(row: Row) -> Found:
    """All at once with requests waiting, every slot is taken, so throughput is near B / TPOT.

    Far less leaves a time between a slot's requests that the prompt's own time must explain. B is the batch limit, the
    running batch where that is told, or what the KV cache or the token budget let run: T tokens an iteration bring in
    and carry at most T / (input + output) new requests, each of which stays for `output` iterations.
    """
    column, tokens = row.throughput()
    batch, tpot, length = row.get("max_batch_size"), row.get("tpot_mean_ms"), row.get("output_len")
    waiting = row.get("request_rate_req_s")
    if not (math.isinf(waiting) or math.isnan(waiting)) or math.isnan(tokens * batch * tpot * length):
        return None
    if row.get("num_requests") < 2 * batch:
        return None
    admitted = length * row.get("max_num_tokens") / (row.get("input_len") + length)
    known = [n for n in (batch, admitted, row.get("running_batch_mean")) if not math.isnan(n)]
    slots = min(known)
    if row.roofs and not math.isnan(row.context()):
        kv = row.roofs.kv_tokens(row.get("gpu_memory_utilization"), row.get("kv_cache_gib"))
        slots = row.roofs.running(row.context(), slots, kv)
    cycle = slots * length / tokens  # of a slot: its request's first token and its decoding
    first = cycle - (length - 1) * tpot / 1000
    full = 1000 * slots / tpot
    bound = IDLE_SHARE * full
    if not tokens < bound:
        return None
    told = (
        f"{tokens:,.0f} tok/s, but {requests(slots)} at {tpot:g} ms a token make {full:,.0f} tok/s: each would hold "
        f"its slot for {first:,.{1 if first < 10 else 0}f} s before its first token"
    )
    return found(column, tokens, bound, told, low=True)
