"""From what happened to the two tables of a cell."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from batchlab import records
from batchlab.sim.core import Trace
from batchlab.sim.host import HostOverheads
from batchlab.sim.policies.base import Limits
from batchlab.sim.state import Sequence


@dataclass(frozen=True)
class SimResult:
    """A simulated cell: what happened, from which each table and figure is made when it is asked for, and what it was
    made from.
    """

    trace: Trace
    sent: list[tuple[float, Sequence]]  # (scheduled time, sequence)
    limits: Limits
    host: HostOverheads  # the client sees each token so long after the engine gave it as its message takes
    keep_chunks: bool
    provenance: dict[str, Any]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Dicts with the columns of records.REQUESTS, in the order of their index."""
        return request_rows(self.trace, self.sent, host=self.host, keep_chunks=self.keep_chunks)

    @cached_property
    def requests(self) -> pa.Table:
        """The rows as a table of records.REQUESTS."""
        return records.table(self.rows, records.REQUESTS)

    @cached_property
    def iterations(self) -> pa.Table:
        """records.ITERATIONS."""
        return iteration_table(self.trace, self.limits)

    @cached_property
    def _seen(self) -> list[tuple[float, Sequence, float | None, float | None]]:
        """(scheduled_s, sequence, first_s, last_s) of each request: what the figures below need of the rows."""
        seen, ticks = _client_clock(self.trace, self.host)
        found = []
        for scheduled_s, seq in sorted(self.sent, key=lambda pair: pair[1].index):
            first_s, last_s = _ends(seq, seen, ticks)
            found.append((scheduled_s, seq, first_s, last_s))
        return found

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last token."""
        last_s = max((last for *_, last in self._seen if last is not None), default=0.0)
        return last_s - min((at for at, *_ in self._seen), default=0.0)

    @property
    def output_throughput_tok_s(self) -> float:
        """Output tokens of requests without error, over `duration_s`."""
        tokens = sum(seq.produced for _, seq, *_ in self._seen if seq.error is None)
        return tokens / self.duration_s if self.duration_s > 0 else 0.0

    def figures(self) -> dict[str, float | None]:
        """A few figures under the names of a cell's summary, of requests without error; None where there is none."""
        done = [seen for seen in self._seen if seen[1].error is None]
        ttft = [first - at for at, _, first, _ in done]
        tpot = [(last - first) / (seq.produced - 1) for _, seq, first, last in done if seq.produced > 1]
        running = self.trace.column("running")
        return {
            "output_throughput_tok_s": self.output_throughput_tok_s or None,
            "ttft_mean_ms": float(np.mean(ttft)) * 1e3 if ttft else None,
            "tpot_mean_ms": float(np.mean(tpot)) * 1e3 if tpot else None,
            "running_batch_mean": float(running.mean()) if len(running) else None,
            "preemptions": int(self.trace.column("preemptions").sum()),
        }


def iteration_table(trace: Trace, limits: Limits) -> pa.Table:
    """records.ITERATIONS of a run."""
    elsewhere = ("max_batch_size", "max_num_tokens", "launched_s")
    columns = {f.name: trace.column(f.name) for f in records.ITERATIONS if f.name not in elsewhere}
    columns["max_batch_size"] = np.full(trace.iterations, limits.max_batch_size)
    columns["max_num_tokens"] = np.full(trace.iterations, limits.max_num_tokens)
    columns["launched_s"] = np.full(trace.iterations, None)
    arrays = [pa.array(columns[f.name]).cast(f.type) for f in records.ITERATIONS]
    return pa.Table.from_arrays(arrays, schema=records.ITERATIONS)


def request_rows(
    trace: Trace, sequences: list[tuple[float, Sequence]], *, host: HostOverheads, keep_chunks: bool
) -> list[dict[str, Any]]:
    """A row a request, in the order of its index. `sequences` holds (scheduled time, sequence).

    The client sees each token as long after the engine gave it as `host` says.
    """
    outputs, ticks = _clock(trace, trace.column("output_s"))
    seen, seen_ticks = _client_clock(trace, host)
    gaps = _gap_statistics([s for _, s in sequences], seen, seen_ticks)
    rows = []
    for scheduled_s, seq in sorted(sequences, key=lambda pair: pair[1].index):
        engine_first_s, engine_last_s = _ends(seq, outputs, ticks)
        first_s, last_s = _ends(seq, seen, seen_ticks)
        done = seq.error is None
        p50, p99, most = gaps.get(seq.index, (None, None, None))
        row = {
            "index": seq.index,
            "input_len": seq.prompt,
            "output_len": seq.output,
            "scheduled_s": scheduled_s,
            "sent_s": scheduled_s,
            "first_s": first_s,
            "last_s": last_s,
            "end_s": last_s if done else seq.queued_s + host.message_s(0),
            "tokens": seq.produced,
            "first_tokens": int(seq.produced > 0),
            "chunks": seq.produced,
            "prompt_tokens": seq.prompt,
            "finish_reason": "length" if done else None,
            "error": seq.error,
            "count_source": "token_ids",
            "itl_p50_ms": p50,
            "itl_p99_ms": p99,
            "itl_max_ms": most,
            "engine_queued_s": seq.queued_s,
            "engine_first_s": engine_first_s,
            "engine_last_s": engine_last_s,
            "cached_tokens": 0,
            "preemptions": seq.preemptions,
            "chunk_us": None,
            "chunk_tokens": None,
        }
        if keep_chunks and first_s is not None:
            times = _token_times(seq, seen, seen_ticks)
            row["chunk_us"] = np.round((times - times[0]) * 1e6).astype(int).tolist()
            row["chunk_tokens"] = [1] * len(times)
        rows.append(row)
    return rows


def _clock(trace: Trace, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The times of iterations, and of those that decode."""
    return at, at[trace.column("decode_tokens") > 0] if trace.iterations else at


def _client_clock(trace: Trace, host: HostOverheads) -> tuple[np.ndarray, np.ndarray]:
    """When the client sees what each iteration, and each that decodes, gave; outputs keep their order."""
    if not trace.iterations:
        return _clock(trace, trace.column("output_s"))
    seen = trace.column("output_s") + host.message_s(trace.column("running"))
    return _clock(trace, np.maximum.accumulate(seen) if host.stream_us else seen)


def _token_times(seq: Sequence, outputs: np.ndarray, ticks: np.ndarray) -> np.ndarray:
    return np.concatenate([outputs[b : b + 1] if a < 0 else ticks[a:b] for a, b in seq.spans])


def _ends(seq: Sequence, outputs: np.ndarray, ticks: np.ndarray) -> tuple[float | None, float | None]:
    if not seq.spans:
        return None, None
    (kind, first), (last_kind, last) = seq.spans[0], seq.spans[-1]
    return float(outputs[first] if kind < 0 else ticks[kind]), float(
        outputs[last] if last_kind < 0 else ticks[last - 1]
    )


def _gap_statistics(sequences: list[Sequence], outputs: np.ndarray, ticks: np.ndarray) -> dict[int, tuple[float, ...]]:
    """Median, 99th percentile and maximum of the gaps between tokens, in ms, by request. One pass for all of one
    length.
    """
    same: dict[int, list[Sequence]] = {}
    statistics = {}
    for seq in sequences:
        if len(seq.spans) == 2 and seq.spans[0][0] < 0 <= seq.spans[1][0]:
            same.setdefault(seq.spans[1][1] - seq.spans[1][0], []).append(seq)
        elif seq.produced > 1:
            gaps = np.diff(_token_times(seq, outputs, ticks)) * 1e3
            statistics[seq.index] = (*np.percentile(gaps, (50, 99)).tolist(), float(gaps.max()))
    for length, group in same.items():
        starts = np.array([seq.spans[1][0] for seq in group])
        first = np.array([outputs[seq.spans[0][1]] for seq in group])
        times = np.column_stack([first, ticks[starts[:, None] + np.arange(length)]])
        gaps = np.diff(times) * 1e3
        p50, p99 = np.percentile(gaps, (50, 99), axis=1)
        for seq, *values in zip(group, p50.tolist(), p99.tolist(), gaps.max(axis=1).tolist(), strict=True):
            statistics[seq.index] = tuple(values)
    return statistics
