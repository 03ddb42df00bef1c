"""What the ground-truth server says: the options that a base URL may ask for, and the events of one answer."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Times in ms from the arrival of the request's last byte."""

    first_ms: float = 20
    gap_ms: float = 5  # between tokens; a chunk of several comes when its first is due
    cold_ms: float = 0  # added to the first request only: a warm-up that was not done
    merge: int = 1  # tokens a chunk
    split: int = 0  # cut each write into pieces of so many bytes, 1 ms apart
    crlf: int = 0  # line ends of the event stream
    comments: int = 0  # a keep-alive comment before every event
    role: int = 0  # a chunk that brings only the role, half way to the first token
    empty: int = 0  # so many chunks of empty text before the first token
    nospace: int = 0  # data:{…} without the space
    done: int = 1  # a last [DONE] (never for TGI)
    text: int = 1  # 0: token ids without text, as of an engine that does not detokenize
    ids: int = 0  # token ids in each chunk
    usage: str = "final"  # none | final | continuous | last (with the last text, as TGI does)
    lie: int = 0  # added to the final usage's completion_tokens
    stop: int = 0  # end early, after so many tokens, with finish reason "stop"
    cut: int = 0  # break the connection after so many tokens
    reset: int = 0  # cut with a reset instead of an orderly end
    error: int = 0  # an error event after so many tokens; -1: instead of all of them
    error_form: str = "tgi"  # tgi | tgi-openai | openai
    finish: int = 1  # 0: no finish reason
    new_ids: int = 0  # another id in every chunk
    framing: str = "chunked"  # chunked | close (the connection's end is the body's end)
    keep: int = 0  # ignore "Connection: close"
    status: int = 200
    shape: str = "openai"  # of an error body: openai | flat | pydantic | tgi | text
    silent: int = 0  # nothing more after so many tokens
    pad: int = 0  # bytes of padding in each chunk


ERRORS = {
    "openai": {"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}},
    "flat": {"object": "error", "message": "the prompt is too long", "type": "BadRequestError", "code": 400},
    "pydantic": {"error": "1 validation error for CompletionRequest"},
    "tgi": {"error": "Model is overloaded", "error_type": "overloaded"},
    "text": "come back later",
}
ERROR_EVENTS = {
    "tgi": {"error": "Model is overloaded", "error_type": "overloaded"},
    "tgi-openai": {"error": {"message": "Request failed during generation", "http_status_code": 424}},
    "openai": {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
}
_HOUR_MS = 3_600_000
_serial = itertools.count(100)


def parse_options(path: str, default: Options | None = None) -> tuple[Options, str]:
    """Options and the API's path of /first_ms=20,crlf=1/v1/completions."""
    head, _, rest = path.lstrip("/").partition("/")
    if "=" not in head:
        return default or Options(), path
    kinds = {field.name: field.type for field in dataclasses.fields(Options)}
    pairs = (item.split("=", 1) for item in head.split(","))
    return Options(**{key: kinds[key](value) for key, value in pairs}), "/" + rest


def api_of(path: str) -> str:
    return "tgi" if path == "/generate_stream" else "chat" if path.endswith("/chat/completions") else "completions"


def writes(options: Options, path: str, body: dict) -> Iterator[tuple[float, list[bytes]]]:
    """(ms after the request, events that are written then). An empty event breaks the connection off."""
    o, api = options, api_of(path)
    parameters = body.get("parameters", body)
    wanted = parameters.get("max_new_tokens") or parameters.get("max_tokens")
    wanted = wanted or parameters.get("max_completion_tokens") or 16
    count = min(wanted, o.stop) if o.stop else wanted
    prompt = _prompt_tokens(body)
    if o.role:
        yield o.first_ms / 2, [_chunk(o, api, None, 0, prompt)]
    for number in range(o.empty):
        yield o.first_ms * (number + 1) / (o.empty + 2), [_chunk(o, api, "", 0, prompt)]
    if o.error == -1:
        yield o.first_ms, [_event(o, ERROR_EVENTS[o.error_form])]
        return
    sent, due = 0, o.first_ms
    while sent < count:
        many = min(o.merge, count - sent)
        due = o.first_ms + o.gap_ms * sent
        sent += many
        reason = ("stop" if count < wanted else "length") if sent == count and o.finish else None
        yield due, [_chunk(o, api, " a" * many, sent, prompt, many, reason)]
        if o.cut and sent >= o.cut:
            yield due, [b""]
            return
        if o.error and sent >= o.error:
            yield due, [_event(o, ERROR_EVENTS[o.error_form])]
            return
        if o.silent and sent >= o.silent:
            yield due + _HOUR_MS, []
    tail = []
    if o.usage in ("final", "continuous") and api != "tgi":
        usage = {"choices": [], "usage": _usage(prompt, count + o.lie)}
        tail.append(_event(o, {"id": "cmpl-7", "object": "text_completion", "created": 1, "model": "m", **usage}))
    if o.done and api != "tgi":
        tail.append(_event(o, "[DONE]"))
    yield due, tail


def _prompt_tokens(body: dict) -> int:
    prompt = body.get("prompt") or body.get("inputs") or body.get("messages", [{}])[0].get("content", "")
    if isinstance(prompt, list):
        return sum(len(part["text"].split()) for part in prompt) if isinstance(prompt[0], dict) else len(prompt)
    return len(str(prompt).split())


def _usage(prompt: int | str, tokens: int | str, total: int | str | None = None) -> dict:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + tokens if total is None else total,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _chunk(
    options: Options, api: str, text: str | None, total: int, prompt: int, many: int = 0, reason: str | None = None
) -> bytes:
    """One event; text None: the role alone. Only its numbers are written anew each time: a server that has to serialize
    could not keep to its schedule."""
    template = _template(options, api, text, many, reason)
    serial = next(_serial) if options.new_ids else 7
    return template % {b"serial": serial, b"prompt": prompt, b"count": total, b"sum": prompt + total}


@functools.cache
def _template(options: Options, api: str, text: str | None, many: int, reason: str | None) -> bytes:
    """An event with %(serial)d, %(prompt)d, %(count)d and %(sum)d in the place of numbers."""
    if api == "tgi":
        details = {
            "finish_reason": "eos_token" if reason == "stop" else reason,
            "generated_tokens": "@count@",
            "seed": None,
            "input_length": "@prompt@",
        }
        value = {
            "index": "@count@",
            "token": {"id": 264, "text": text, "logprob": -0.5, "special": False},
            "generated_text": text if reason else None,
            "details": details if reason else None,
        }
        return _with_places(_event(options, value))
    choice = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    shown = text if options.text else ""
    if api == "chat":
        choice["delta"] = {"role": "assistant", "content": ""} if text is None else {"content": shown}
    else:
        choice["text"] = shown or ""
    if options.ids and many:
        choice["token_ids"] = [264] * many
    value = {"id": "cmpl-@serial@", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    if options.usage == "continuous" or (options.usage == "last" and reason):
        value["usage"] = _usage("@prompt@", "@count@", "@sum@")
    if options.pad:
        value["pad"] = " " * options.pad
    return _with_places(_event(options, value))


def _with_places(event: bytes) -> bytes:
    event = event.replace(b"@serial@", b"%(serial)d")
    for name in (b"prompt", b"count", b"sum"):
        event = event.replace(b'"@%b@"' % name, b"%%(%b)d" % name)
    return event


def _event(options: Options, value: dict | str) -> bytes:
    end = "\r\n" if options.crlf else "\n"
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    comment = f": keep-alive{end}{end}" if options.comments else ""
    return f"{comment}data:{'' if options.nospace else ' '}{text}{end}{end}".encode()
