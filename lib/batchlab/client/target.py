"""Where requests go and what is written on the wire: address, path, headers and JSON body of each API."""

import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson

from batchlab.errors import UsageError
from batchlab.workload import Request

PATHS = {
    "openai-completions": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "tgi": "/generate_stream",
}


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint and how it is asked.

    base_url: http(s)://host[:port][/path], with or without a last /v1.
    api: "openai-completions" | "openai-chat" | "tgi".
    prompt_format: "ids" (openai-completions only) | "text".
    ignore_eos: the engine takes `ignore_eos` and `min_tokens`; they are sent, so that the output length is
      exact.
    continuous_usage: the engine takes `stream_options.continuous_usage_stats`; tokens are then counted
      chunk by chunk.
    extra: further keys of the body (of `parameters` for tgi); a key set to None takes a default key out.
    api_key: sent as a bearer token.
    UsageError when these do not fit together.
    """

    base_url: str
    api: str
    model: str
    prompt_format: str = "text"
    ignore_eos: bool = True
    continuous_usage: bool = False
    extra: dict = field(default_factory=dict)
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api not in PATHS:
            raise UsageError(f"api {self.api!r} is unknown; use one of {', '.join(PATHS)}")
        if self.prompt_format not in ("ids", "text"):
            raise UsageError(f"prompt format {self.prompt_format!r} is unknown; use ids or text")
        if self.prompt_format == "ids" and self.api != "openai-completions":
            raise UsageError(f"api {self.api} takes no token ids; use prompt format text")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the api key holds a character that no HTTP header may hold")
        endpoint(self.base_url, self.api)


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    tls: bool
    path: str
    host_header: str


def endpoint(base_url: str, api: str) -> Endpoint:
    """The address and path that `base_url` and `api` name; UsageError for anything but
    http(s)://host[:port][/path]."""
    try:
        url = urlsplit(base_url)
        port = url.port
    except ValueError as error:
        raise UsageError(f"base url {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"base url {base_url!r} must look like http://host:port or https://host/path")
    if url.query or url.fragment or url.username or url.password:
        raise UsageError(f"base url {base_url!r} must hold no user, query or fragment")
    if not base_url.isascii() or any(c.isspace() for c in base_url):
        raise UsageError(f"base url {base_url!r} must be plain ASCII without spaces; percent-encode the rest")
    path = url.path.rstrip("/").removesuffix("/v1") + PATHS[api]
    tls = url.scheme == "https"
    return Endpoint(url.hostname, port or (443 if tls else 80), tls, path, url.netloc)


def tls_context() -> ssl.SSLContext:
    """Verifies certificates against the system's store (SSL_CERT_FILE and SSL_CERT_DIR are honoured)."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def body(target: Target, request: Request) -> bytes:
    """The JSON body for one request; UsageError when the workload has no text and the target needs it."""
    prompt = list(request.prompt_ids) if target.prompt_format == "ids" else request.prompt_text
    if prompt is None:
        raise UsageError(f"request {request.index} has no text; build it with a tokenizer or use prompt format ids")
    if target.api == "tgi":
        parameters = {"max_new_tokens": request.output_len, "details": True, "do_sample": False}
        return orjson.dumps({"inputs": prompt, "parameters": _with_extra(parameters, target.extra)})
    stream_options = {"include_usage": True}
    if target.continuous_usage:
        stream_options["continuous_usage_stats"] = True
    fields = {
        "model": target.model,
        "max_tokens": request.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": stream_options,
    }
    if target.api == "openai-chat":
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = prompt
    if target.ignore_eos:
        fields |= {"ignore_eos": True, "min_tokens": request.output_len}
    return orjson.dumps(_with_extra(fields, target.extra))


def _with_extra(fields: dict, extra: dict) -> dict:
    return {key: value for key, value in (fields | extra).items() if value is not None}


def payload(target: Target, place: Endpoint, request: Request) -> bytes:
    """The whole HTTP request. Each has a connection of its own, and no compression is asked for: an encoder
    in the server holds tokens back."""
    content = body(target, request)
    lines = [
        f"POST {place.path} HTTP/1.1",
        f"Host: {place.host_header}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        "Connection: close",
        f"X-Request-Id: b{request.index}",
        f"Content-Length: {len(content)}",
    ]
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + content
