"""What the events of one answer say: which of them hold tokens, how many, and why it ended.

How tokens are counted (`count_source`), the first that the stream allows:
  token_ids  each chunk carries the ids of its tokens (TGI: a chunk is one token and has its id)
  usage      each chunk carries the running count (continuous usage), or the final usage equals the number
             of chunks that hold text, so that each of them is one token
  chunks     each chunk that holds text is taken for one token. When a final usage says another number, that
             number is `tokens`, and the difference is spread over the chunks after the first: an estimate,
             and marked as one.
A chunk that brings only a role, an empty text or usage is no token.
"""

from dataclasses import dataclass, field

import orjson

DONE = b"[DONE]"


@dataclass(slots=True)
class Stream:
    """Token-holding chunks in order: `times` (ns), `counts` (tokens of each). end: when the answer ended (ns)."""

    times: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: int = 0
    count_source: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    end: int | None = None


def one_line(text: object, limit: int = 300) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def error_text(value: dict) -> str:
    """The message of an error object in any of the engines' shapes: {"error": text[, "error_type"]},
    {"error": {"message", "type", "code"}}, {"object": "error", "message", "type"}, {"detail": …}."""
    error = value.get("error", value)
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or orjson.dumps(error).decode()
        kind = error.get("type") or error.get("http_status_code") or error.get("code")
    else:
        message, kind = error, value.get("error_type")
    return one_line(f"{message} ({kind})" if kind else message)


def is_error(value: dict) -> bool:
    return bool(value.get("error")) or value.get("object") == "error"


def read_stream(api: str, data: list[bytes], times: list[int], ended: bool) -> Stream:
    """The stream that these events make. `ended`: the answer ended as HTTP frames it, so that a stream
    without [DONE] but with a finish reason is whole."""
    return _read_tgi(data, times, ended) if api == "tgi" else _read_openai(data, times, ended)


def _loads(raw: bytes) -> dict | str:
    """The event's object, or one line that says what is wrong with it."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return one_line(f"an event is not JSON: {raw[:200].decode('utf-8', 'replace')}")
    if not isinstance(value, dict):
        return one_line(f"an event is not an object: {raw[:200].decode('utf-8', 'replace')}")
    return f"error in the stream: {error_text(value)}" if is_error(value) else value


def _read_openai(data: list[bytes], times: list[int], ended: bool) -> Stream:
    stream = Stream()
    # of each chunk with a choice: its time, whether it has text, how many token ids, the running usage
    stamps: list[int] = []
    texts: list[bool] = []
    ids: list[int] = []
    running: list[int | None] = []
    usage: dict | None = None
    any_ids = done = False
    for raw, time in zip(data, times, strict=True):
        if raw == DONE:
            done = True
            break
        value = _loads(raw)
        if isinstance(value, str):
            stream.error = value
            break
        now = value.get("usage")
        usage = now or usage
        choices = value.get("choices")
        if not choices:
            continue
        choice = choices[0]
        stamps.append(time)
        texts.append(_holds_text(choice))
        token_ids = choice.get("token_ids")
        any_ids = any_ids or bool(token_ids)
        ids.append(len(token_ids) if token_ids else 0)
        running.append(now.get("completion_tokens") if now else None)
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    if usage:
        stream.prompt_tokens = usage.get("prompt_tokens")
        stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    _count(stream, stamps, texts, ids if any_ids else None, running, (usage or {}).get("completion_tokens"))
    if stream.error is None and not done:
        stream.error = _unfinished(stream, ended, "[DONE]")
    if stream.error is None and not stream.times:
        stream.error = _tokenless(stream)
    return stream


def _holds_text(choice: dict) -> bool:
    if "delta" not in choice:
        return bool(choice.get("text"))
    delta = choice["delta"] or {}
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _count(
    stream: Stream,
    stamps: list[int],
    texts: list[bool],
    ids: list[int] | None,
    running: list[int | None],
    final: int | None,
) -> None:
    if not stamps:
        return
    if ids is not None:
        counts, stream.count_source = ids, "token_ids"
    elif _continuous(texts, running):
        counts, last = [], 0
        for total in running:
            total = last if total is None else total
            counts.append(max(total - last, 0))
            last = max(last, total)
        stream.count_source = "usage"
    else:
        counts = [int(text) for text in texts]
        chunks = sum(counts)
        stream.count_source = "usage" if final == chunks else "chunks"
        if final is not None and chunks and final > chunks:
            counts = _spread(counts, final)
        elif final is not None and chunks > final:
            stream.tokens = final  # more texts than tokens: the engine's own count stands
    kept = [(time, count) for time, count in zip(stamps, counts, strict=True) if count]
    stream.times = [time for time, _ in kept]
    stream.counts = [count for _, count in kept]
    stream.tokens = stream.tokens or sum(stream.counts)
    if not kept and final:
        stream.tokens, stream.count_source = final, "usage"


def _continuous(texts: list[bool], running: list[int | None]) -> bool:
    """Whether usage comes with every chunk. TGI sends it with the last text alone, which must not look like
    a chunk of all tokens."""
    if any(texts):
        return all(total is not None for text, total in zip(texts, running, strict=True) if text)
    return all(total is not None for total in running)


def _spread(counts: list[int], total: int) -> list[int]:
    """One token for the first chunk, and the rest of `total` over the later ones as evenly as whole numbers go."""
    chunks = sum(counts)
    if chunks == 1:
        return [count * total for count in counts]
    spread, seen, given = [], 0, 1
    for count in counts:
        if not count:
            spread.append(0)
            continue
        target = 1 + (total - 1) * seen // (chunks - 1)
        spread.append(1 if seen == 0 else target - given)
        given = max(given, target)
        seen += 1
    return spread


def _read_tgi(data: list[bytes], times: list[int], ended: bool) -> Stream:
    stream = Stream(count_source="token_ids")
    for raw, time in zip(data, times, strict=True):
        if raw == DONE:
            continue
        value = _loads(raw)
        if isinstance(value, str):
            stream.error = value
            break
        if value.get("token"):
            stream.times.append(time)
            stream.counts.append(1)
        details = value.get("details")
        if details:
            stream.finish_reason = details.get("finish_reason")
            stream.prompt_tokens = details.get("input_length")
    stream.tokens = len(stream.times)
    if stream.error is None:
        stream.error = _unfinished(stream, ended, "details")
    if stream.error is None and not stream.times:
        stream.error = _tokenless(stream)
    return stream


def _unfinished(stream: Stream, ended: bool, mark: str) -> str | None:
    if not ended:
        return f"the stream broke after {stream.tokens} tokens, before its end"
    if stream.finish_reason is None:
        return f"the stream stopped after {stream.tokens} tokens with neither a finish reason nor {mark}"
    return None


def _tokenless(stream: Stream) -> str:
    if stream.tokens:
        return (
            f"{stream.tokens} tokens by usage, but no chunk shows which it holds: "
            "ask for continuous usage or token ids, or let the engine detokenize"
        )
    return f"no token came (finish reason {stream.finish_reason})"
