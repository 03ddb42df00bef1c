"""Puts lengths, arrival times and prompts together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.arrivals import arrival_times
from batchlab.workload.lengths import cut, draw_lengths, fit, shared_tokens
from batchlab.workload.prompts import IdPrompts, TextPrompts
from batchlab.workload.traces import BLOCK, Trace, read_trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """scheduled_s: offset from t0, unused in a closed loop; prompt_ids: what the engine's tokenizer makes
    of the prompt, special tokens included; prompt_text: None without a tokenizer."""

    index: int
    scheduled_s: float
    prompt_ids: Sequence[int]
    prompt_text: str | None
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """note: what was changed to make the dataset fit, in one line; concurrency: of a closed loop."""

    requests: list[Request]
    note: str | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A workload without its prompts. lengths: int64 (count, 2), input_len and output_len; times: float64 (count,),
    seconds from t0; the rest as in Workload."""

    lengths: np.ndarray
    times: np.ndarray
    note: str | None
    concurrency: int | None
    trace: Trace | None


def draw_load(
    dataset: dict,
    *,
    num_requests: int,
    request_rate: float | None,
    arrival: dict | None = None,
    seed: int,
    max_len: int | None = None,
) -> Load:
    """Lengths and arrival times, with the arguments and errors of `build`."""
    if num_requests < 1:
        raise UsageError(f"num_requests {num_requests} must be at least 1")
    trace = read_trace(dataset, num_requests) if dataset.get("kind") == "trace" else None
    lengths, notes = (trace.lengths, trace.notes) if trace else draw_lengths(dataset, num_requests, seed)
    if dataset.get("clip"):
        lengths, cuts = cut(lengths, dataset["clip"])
        notes = notes + cuts
    lengths, cuts = fit(lengths, dataset.get("kind", "fixed"), max_len)
    if trace and trace.blocks and (equal := _made_equal(trace, lengths)):
        cuts = [*cuts, f"{equal} prompts became equal to another by the cut"]
    recorded = trace.times if trace else None
    times, concurrency = arrival_times(arrival, request_rate, num_requests, seed, recorded)
    return Load(lengths, times, "; ".join([*notes, *cuts]) or None, concurrency, trace)


def build(
    dataset: dict,
    *,
    num_requests: int,
    request_rate: float | None,
    arrival: dict | None = None,
    seed: int,
    nonce: str,
    vocab_size: int,
    tokenizer: "Tokenizer | None" = None,
    max_len: int | None = None,
) -> Workload:
    """The workload of one cell.

    Lengths and arrival times follow from (dataset, arrival, request_rate, seed): cells that differ in a
    limit only get the same load. Prompts follow from (seed, nonce, index) and differ from their first ids
    on, because prefix caches
    hash blocks from the start: a nonce of its own for each cell and repeat keeps one from hitting another's
      cache.

    request_rate: requests a second, None for all at once. vocab_size: ids are drawn below it, and not from
    0..3 or the tokenizer's special tokens. tokenizer: a `tokenizers.Tokenizer`; with it prompts have text
    that encodes to exactly input_len tokens, those included that it adds itself. max_len: the engine's
    limit on prompt + output. UsageError names what does not fit and the mend.
    """
    load = draw_load(
        dataset,
        num_requests=num_requests,
        request_rate=request_rate,
        arrival=arrival,
        seed=seed,
        max_len=max_len,
    )
    trace = load.trace
    prompts = TextPrompts(tokenizer, vocab_size, seed, nonce) if tokenizer else IdPrompts(vocab_size, seed, nonce)
    requests = []
    for index, ((input_len, output_len), at) in enumerate(zip(load.lengths.tolist(), load.times.tolist(), strict=True)):
        if trace and trace.blocks and trace.blocks[index]:
            ids, text = prompts.make_of_blocks(index, input_len, trace.blocks[index], BLOCK)
        else:
            ids, text = prompts.make(index, input_len, shared_tokens(dataset, input_len))
        requests.append(Request(index, at, ids, text, output_len))
    return Workload(requests, load.note, load.concurrency)


def _made_equal(trace: Trace, lengths: np.ndarray) -> int:
    """How many prompts of prefix blocks a cut made equal to another one."""

    def distinct(lengths: np.ndarray) -> int:
        pairs = zip(lengths[:, 0].tolist(), trace.blocks, strict=True)
        return len({(length, blocks[: -(-length // BLOCK)]) for length, blocks in pairs})

    return distinct(trace.lengths) - distinct(lengths)
