"""A results store filled by a toy scheduler. Test data: invented times, for tests only, never shown as results."""

import itertools
from pathlib import Path
from typing import Any

from batchlab import metrics, plan, records, scenario
from batchlab.cell import Cell
from batchlab.store import Store

SCENARIO = """\
title: A quick scenario of invented test data
question: Does the report show what the records hold?
hardware: test_machine
model: tiny-llama
engines:
  vllm: {version: "0.0.test", max_model_len: 512}
datasets:
  prefill-heavy: {input_len: 48, output_len: 8}
  decode-heavy: {input_len: 8, output_len: 48}
defaults: {max_batch_size: 8, max_num_tokens: 128}
num_requests: 24
repeats: 3
sweeps:
  - name: throughput
    question: All at once
    request_rate: inf
    max_batch_size: [1, 2, 4, 8, 16, 32]
    max_num_tokens: [64, 128, 256]
  - name: latency
    question: Arriving
    request_rate: 20
    max_batch_size: [1, 2, 4, 8, 16]
    max_num_tokens: [64, 128, 256]
"""


def fill(scenario_file: Path, results: Path) -> None:
    """Records every planned cell but one, the missing (16, 128) decode-heavy point of sweep latency.

    The (32, 128) prefill-heavy throughput cell of repeat 0 is invalid.
    """
    loaded = scenario.load(scenario_file)
    store = Store(results / loaded.hardware)
    for planned in plan.expand(loaded):
        cell = planned.cell
        if planned.sweep == "latency" and planned.dataset == "decode-heavy" and cell.max_batch_size == 16:
            continue
        bad = planned.dataset == "prefill-heavy" and cell.max_batch_size == 32 and planned.repeat == 0
        requests, iterations = simulate(cell)
        table = records.table(requests, records.REQUESTS)
        store.save(
            cell,
            {
                "invalid_reasons": ["the client sent 12 ms late"] if bad else [],
                "checks": {},
                "note": None,
                "gpu": None,
                "duration_s": metrics.duration_s(table.to_pandas()),
                "provenance": {
                    "machine": {"name": "invented machine, 2 cores"},
                    "commit": "0123abc",
                    "engine": {"start_s": 1.0},
                    "load_average": 0.1,
                    "started": "2026-11-29T22:00:00+00:00",
                    "libraries": {},
                },
            },
            table,
            records.table(iterations, records.ITERATIONS),
        )


def simulate(cell: Cell) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Iterations of mixed prefill and decode under both limits; a step costs a constant and a share a token."""
    due = [i / cell.request_rate if cell.request_rate else 0.0 for i in range(cell.num_requests)]
    lengths = (cell.dataset["input_len"], cell.dataset["output_len"])
    waiting, running, rows, trace, now = list(range(cell.num_requests)), {}, {}, [], 0.0
    for step in itertools.count():
        if not waiting and not running:
            break
        if not running and due[waiting[0]] > now:
            now = due[waiting[0]]
        budget, prefill = cell.max_num_tokens - len(running), 0
        decode = len(running)
        while (
            waiting and due[waiting[0]] <= now and len(running) < cell.max_batch_size and budget >= lengths[0]
        ):
            running[waiting.pop(0)] = 0
            budget, prefill = budget - lengths[0], prefill + lengths[0]
        cost = 0.004 + 0.00003 * prefill + 0.0002 * len(running) + 0.0001 * ((step + cell.seed) % 3)
        queue = sum(due[i] <= now for i in waiting)
        trace.append(
            {
                "scheduled_s": now,
                "output_s": now + cost,
                "running": len(running),
                "admitted": len(running),
                "waiting": queue,
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "kv_use": len(running) * sum(lengths) / 4096,
                "preemptions": 0,
                "max_batch_size": cell.max_batch_size,
                "max_num_tokens": cell.max_num_tokens,
            }
        )
        now += cost
        for index in list(running):
            running[index] += 1
            row = rows.setdefault(index, {"first_s": now})
            if running[index] == lengths[1]:
                row["last_s"] = now
                del running[index]
    return [request_row(i, due[i], lengths, rows[i]) for i in range(cell.num_requests)], trace


def request_row(index: int, due: float, lengths: tuple[int, int], times: dict[str, float]) -> dict[str, Any]:
    """A completed request's row."""
    return {
        "index": index,
        "input_len": lengths[0],
        "output_len": lengths[1],
        "scheduled_s": due,
        "sent_s": due,
        "first_s": times["first_s"],
        "last_s": times["last_s"],
        "end_s": times["last_s"],
        "tokens": lengths[1],
        "first_tokens": 1,
        "chunks": lengths[1],
        "prompt_tokens": lengths[0],
        "finish_reason": "length",
        "count_source": "token_ids",
        "engine_queued_s": due,
        "engine_first_s": times["first_s"],
        "engine_last_s": times["last_s"],
        "cached_tokens": 0,
        "preemptions": 0,
    }
