"""The two tables of a cell: a row a request, a row an engine iteration.

Times are seconds since the cell's start (`t0`, CLOCK_MONOTONIC). A time that does not exist is null, never 0.
"""

import pyarrow as pa

REQUESTS = pa.schema(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("input_len", pa.int32(), nullable=False),  # prompt tokens sent
        pa.field("output_len", pa.int32(), nullable=False),  # output tokens asked for
        pa.field("scheduled_s", pa.float64(), nullable=False),  # when the arrival process says it goes
        pa.field("sent_s", pa.float64()),
        pa.field("first_s", pa.float64()),  # first chunk that holds a token
        pa.field("last_s", pa.float64()),  # last chunk that holds a token
        pa.field("end_s", pa.float64()),  # the response ended
        pa.field("tokens", pa.int32(), nullable=False),  # output tokens counted
        pa.field("first_tokens", pa.int32(), nullable=False),  # of them in the first chunk
        pa.field("chunks", pa.int32(), nullable=False),  # chunks that hold a token
        pa.field("prompt_tokens", pa.int32()),  # the engine's own count
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("itl_p50_ms", pa.float64()),
        pa.field("itl_p99_ms", pa.float64()),
        pa.field("itl_max_ms", pa.float64()),
        pa.field("count_source", pa.string()),  # token_ids | usage | chunks
        pa.field("engine_queued_s", pa.float64()),
        pa.field("engine_first_s", pa.float64()),
        pa.field("engine_last_s", pa.float64()),
        pa.field("cached_tokens", pa.int32()),  # prompt tokens served from a prefix cache
        pa.field("preemptions", pa.int32()),
        pa.field("chunk_us", pa.list_(pa.int32())),  # each token-holding chunk, after first_s
        pa.field("chunk_tokens", pa.list_(pa.int16())),
    ]
)

ITERATIONS = pa.schema(
    [
        pa.field("scheduled_s", pa.float64(), nullable=False),
        pa.field("output_s", pa.float64(), nullable=False),
        pa.field("running", pa.int32(), nullable=False),  # requests scheduled in this iteration
        pa.field("admitted", pa.int32()),  # requests holding a slot
        pa.field("waiting", pa.int32()),  # null, like admitted and preemptions, where an engine does not tell
        pa.field("prefill_tokens", pa.int32()),  # null where the engine was polled (scrape.py)
        pa.field("decode_tokens", pa.int32()),  # likewise
        pa.field("kv_use", pa.float32()),
        pa.field("preemptions", pa.int32()),
        pa.field("max_batch_size", pa.int32()),  # limits in force; null where nobody knows
        pa.field("max_num_tokens", pa.int32()),
        # the host had launched its last kernel; null in records older than this column, and where it does not show
        pa.field("launched_s", pa.float64()),
    ]
)


def table(rows: list[dict], schema: pa.Schema) -> pa.Table:
    """Rows (missing keys become null) as a table of exactly this schema; pa.ArrowInvalid when a value does not fit."""
    columns = [pa.array([row.get(f.name) for row in rows], type=f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)
