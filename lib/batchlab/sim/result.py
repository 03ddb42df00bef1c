"""From what happened to the two tables of a cell."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from batchlab import records
from batchlab.sim.core import Trace
from batchlab.sim.policies.base import Limits
from batchlab.sim.state import Sequence


@dataclass(frozen=True)
class SimResult:
    """A simulated cell: request rows (dicts with the columns of records.REQUESTS), iterations, and what they were
    made from.
    """

    rows: list[dict[str, Any]]
    iterations: pa.Table  # records.ITERATIONS
    provenance: dict[str, Any]

    @cached_property
    def requests(self) -> pa.Table:
        """The rows as a table of records.REQUESTS."""
        return records.table(self.rows, records.REQUESTS)

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last token."""
        return max((r["last_s"] for r in self.rows if r["last_s"] is not None), default=0.0) - min(
            (r["scheduled_s"] for r in self.rows), default=0.0
        )

    @property
    def output_throughput_tok_s(self) -> float:
        """Output tokens of requests without error, over `duration_s`."""
        tokens = sum(r["tokens"] for r in self.rows if r["error"] is None)
        return tokens / self.duration_s if self.duration_s > 0 else 0.0

    def figures(self) -> dict[str, float | None]:
        """A few figures under the names of a cell's summary, of requests without error; None where there is none."""
        rows = [r for r in self.rows if r["error"] is None]
        ttft = [r["first_s"] - r["scheduled_s"] for r in rows]
        tpot = [
            (r["last_s"] - r["first_s"]) / (r["tokens"] - r["first_tokens"])
            for r in rows
            if r["tokens"] > r["first_tokens"]
        ]
        running = self.iterations["running"].to_numpy()
        return {
            "output_throughput_tok_s": self.output_throughput_tok_s or None,
            "ttft_mean_ms": float(np.mean(ttft)) * 1e3 if ttft else None,
            "tpot_mean_ms": float(np.mean(tpot)) * 1e3 if tpot else None,
            "running_batch_mean": float(running.mean()) if len(running) else None,
            "preemptions": int(self.iterations["preemptions"].to_numpy().sum()),
        }


def iteration_table(trace: Trace, limits: Limits) -> pa.Table:
    """records.ITERATIONS of a run."""
    columns = {
        f.name: trace.column(f.name) for f in records.ITERATIONS if f.name not in ("max_batch_size", "max_num_tokens")
    }
    columns["max_batch_size"] = np.full(trace.iterations, limits.max_batch_size)
    columns["max_num_tokens"] = np.full(trace.iterations, limits.max_num_tokens)
    arrays = [pa.array(columns[f.name]).cast(f.type) for f in records.ITERATIONS]
    return pa.Table.from_arrays(arrays, schema=records.ITERATIONS)


def request_rows(
    trace: Trace, sequences: list[tuple[float, Sequence]], *, message_s: float, keep_chunks: bool
) -> list[dict[str, Any]]:
    """A row a request, in the order of its index. `sequences` holds (scheduled time, sequence).

    The client sees each token `message_s` after the engine gave it.
    """
    outputs = trace.column("output_s")
    ticks = outputs[trace.column("decode_tokens") > 0] if trace.iterations else outputs
    gaps = _gap_statistics([s for _, s in sequences], outputs, ticks)
    rows = []
    for scheduled_s, seq in sorted(sequences, key=lambda pair: pair[1].index):
        engine_first_s, engine_last_s = _ends(seq, outputs, ticks)
        first_s, last_s = (None if t is None else t + message_s for t in (engine_first_s, engine_last_s))
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
            "end_s": last_s if done else seq.queued_s + message_s,
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
            times = _token_times(seq, outputs, ticks)
            row["chunk_us"] = np.round((times - times[0]) * 1e6).astype(int).tolist()
            row["chunk_tokens"] = [1] * len(times)
        rows.append(row)
    return rows


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
