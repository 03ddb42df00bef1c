"""From the stored reads of one request to its row of the REQUESTS table."""

import numpy as np
import orjson

from batchlab.client.exchange import Exchange
from batchlab.client.http import Response, parse
from batchlab.client.sse import Events
from batchlab.client.stream import Stream, error_text, is_error, one_line, read_stream
from batchlab.workload import Request

_INT32 = 2**31 - 1
_INT16 = 2**15 - 1


def read(exchange: Exchange, api: str) -> Stream:
    """The stream that one HTTP exchange brought, or what went wrong with it."""
    stream = Stream()
    error = exchange.error
    if exchange.times:
        response = parse(exchange.reads, exchange.times, exchange.closed_ns)
        try:
            stream = _answer(response, api)
        except (AttributeError, TypeError, KeyError, ValueError) as fault:
            stream = Stream(error=one_line(f"an event has an unknown shape: {fault!r}"))
        stream.end = response.end
        # a whole stream needs no good end of its connection; what the server said tells more than how that ended
        if stream.error is None or error is None or response.complete or _said_by_server(response, stream):
            error = stream.error
    elif error is None:
        error = "the server closed the connection without an answer"
    stream.error = error
    return stream


def row(exchange: Exchange, stream: Stream, t0_ns: int, keep_chunks: bool) -> dict:
    """The client's columns of REQUESTS for one HTTP exchange."""
    sent = exchange.input_len, exchange.output_len
    return _row(exchange.index, sent, exchange.due_ns, exchange.sent_ns, stream, t0_ns, keep_chunks)


def request_row(request: Request, raw: dict, t0_ns: int, *, keep_chunks: bool) -> dict:
    """The same columns for a request that an engine's Python API answered. raw: scheduled_ns, sent_ns,
    end_ns, chunks [(time ns, tokens)], finish_reason, prompt_tokens, error."""
    stream = Stream(
        times=[time for time, _ in raw["chunks"]],
        counts=[count for _, count in raw["chunks"]],
        tokens=sum(count for _, count in raw["chunks"]),
        count_source="token_ids",
        prompt_tokens=raw["prompt_tokens"],
        finish_reason=raw["finish_reason"],
        error=raw["error"],
        end=raw["end_ns"],
    )
    if stream.error is None and not stream.times:
        stream.error = f"no token came (finish reason {stream.finish_reason})"
    sent = len(request.prompt_ids), request.output_len
    return _row(request.index, sent, raw["scheduled_ns"], raw["sent_ns"], stream, t0_ns, keep_chunks)


def _row(
    index: int,
    lengths: tuple[int, int],
    due_ns: int,
    sent_ns: int | None,
    stream: Stream,
    t0_ns: int,
    keep_chunks: bool,
) -> dict:
    """A request that failed keeps `scheduled_s` and `sent_s`; its other times are null."""
    ok = stream.error is None
    values = {
        "index": index,
        "input_len": lengths[0],
        "output_len": lengths[1],
        "scheduled_s": (due_ns - t0_ns) / 1e9,
        "sent_s": None if sent_ns is None else (sent_ns - t0_ns) / 1e9,
        "first_s": (stream.times[0] - t0_ns) / 1e9 if ok else None,
        "last_s": (stream.times[-1] - t0_ns) / 1e9 if ok else None,
        "end_s": ((stream.end or stream.times[-1]) - t0_ns) / 1e9 if ok else None,
        "tokens": stream.tokens,
        "first_tokens": stream.counts[0] if stream.counts else 0,
        "chunks": len(stream.times),
        "prompt_tokens": stream.prompt_tokens,
        "finish_reason": stream.finish_reason,
        "error": stream.error,
        "count_source": stream.count_source,
        "cached_tokens": stream.cached_tokens,
    }
    times, counts = np.asarray(stream.times, np.int64), np.asarray(stream.counts, np.int64)
    return values | _gaps(times, counts, ok) | _chunks(times, counts, ok and keep_chunks)


def _said_by_server(response: Response, stream: Stream) -> bool:
    return response.status not in (None, 200) or stream.error.startswith("error in the stream")


def _answer(response: Response, api: str) -> Stream:
    """The stream in a response, or a Stream with nothing but the error that came in its place."""
    if response.status is None:
        return Stream(error=response.fault or "the connection broke before a whole answer came")
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        return Stream(error=f"the answer is compressed ({one_line(encoding, 40)}), which was not asked for")
    if response.status != 200:
        return Stream(error=f"HTTP {response.status}: {_reason(response)}")
    events = Events()
    for piece, time in zip(response.pieces, response.times, strict=True):
        events.feed(piece, time)
    whole = events.close()
    if not events.data:
        body = b"".join(response.pieces)
        return Stream(error=f"HTTP 200, but no event stream: {_message(body) or 'an empty body'}")
    stream = read_stream(api, events.data, events.times, response.complete and whole)
    if response.fault and stream.error is None and not response.complete:
        stream.error = response.fault
    return stream


def _reason(response: Response) -> str:
    location = response.headers.get("location")
    if 300 <= response.status < 400 and location:
        return one_line(f"moved to {location}; give that address")
    return _message(b"".join(response.pieces)) or "no reason given"


def _message(body: bytes) -> str:
    """A body in one line: the message of an engine's error object, else the text itself."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return one_line(body.decode("utf-8", "replace"))
    if isinstance(value, dict) and (is_error(value) or "detail" in value or "message" in value):
        return error_text(value)
    return one_line(body.decode("utf-8", "replace"))


def _gaps(times: np.ndarray, counts: np.ndarray, ok: bool) -> dict:
    """Percentiles of the inter-token latencies: gaps between chunks, each divided by the tokens of the
    later chunk."""
    if not ok or len(times) < 2:
        return {"itl_p50_ms": None, "itl_p99_ms": None, "itl_max_ms": None}
    gaps = np.diff(times) / counts[1:] / 1e6
    p50, p99 = np.percentile(gaps, (50, 99))
    return {"itl_p50_ms": float(p50), "itl_p99_ms": float(p99), "itl_max_ms": float(gaps.max())}


def _chunks(times: np.ndarray, counts: np.ndarray, keep: bool) -> dict:
    """The list columns; null when they are not kept or do not fit their types (35 minutes, 32767 tokens)."""
    if not keep:
        return {"chunk_us": None, "chunk_tokens": None}
    since = (times - times[0]) // 1000
    if since[-1] > _INT32 or counts.max() > _INT16:
        return {"chunk_us": None, "chunk_tokens": None}
    return {"chunk_us": since.tolist(), "chunk_tokens": counts.tolist()}
