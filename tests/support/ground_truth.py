"""A server whose token times are known: raw bytes over asyncio, no framework, no engine.

Speaks OpenAI completions, OpenAI chat and TGI streaming. What it does is written in the path before the
API's own, so one
server serves every test: http://host:port/first_ms=20,gap_ms=5,crlf=1/v1/completions. `GET /log` gives, for
each request, when it came, when each write was due and made (CLOCK_MONOTONIC ns), its headers and its body;
`DELETE /log` forgets them. Run by hand: python ground_truth.py [--port N] prints the port it holds.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import json
import select
import selectors
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Times in ms from the moment the whole request was read."""

    first_ms: float = 20
    gap_ms: float = 5              # between tokens; a chunk of several comes when its first is due
    cold_ms: float = 0             # added to the first request only: a warm-up that was not done
    merge: int = 1                 # tokens a chunk
    split: int = 0                 # cut each write into pieces of so many bytes, 1 ms apart
    crlf: int = 0                  # line ends of the event stream
    comments: int = 0              # a keep-alive comment before every event
    role: int = 0                  # a chunk that brings only the role, half way to the first token
    empty: int = 0                 # so many chunks of empty text before the first token
    nospace: int = 0               # data:{…} without the space
    done: int = 1                  # a last [DONE] (never for TGI)
    text: int = 1                  # 0: token ids without text, as of an engine that does not detokenize
    ids: int = 0                   # token ids in each chunk
    usage: str = "final"           # none | final | continuous | last (with the last text, as TGI does)
    lie: int = 0                   # added to the final usage's completion_tokens
    stop: int = 0                  # end early, after so many tokens, with finish reason "stop"
    cut: int = 0                   # break the connection after so many tokens
    reset: int = 0                 # cut with a reset instead of an orderly end
    error: int = 0                 # an error event after so many tokens; -1: instead of all of them
    error_form: str = "tgi"        # tgi | tgi-openai | openai
    finish: int = 1                # 0: no finish reason
    new_ids: int = 0               # another id in every chunk
    framing: str = "chunked"       # chunked | close (the connection's end is the body's end)
    keep: int = 0                  # ignore "Connection: close"
    status: int = 200
    shape: str = "openai"          # of an error body: openai | flat | pydantic | tgi | text
    silent: int = 0                # nothing more after so many tokens
    pad: int = 0                   # bytes of padding in each chunk


def parse_options(path: str) -> tuple[Options, str]:
    """Options and the API's path."""
    head, _, rest = path.lstrip("/").partition("/")
    if "=" not in head:
        return Options(), path
    kinds = {field.name: field.type for field in dataclasses.fields(Options)}
    pairs = (item.split("=", 1) for item in head.split(","))
    return Options(**{key: kinds[key](value) for key, value in pairs}), "/" + rest


ERRORS = {
    "openai": {"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}},
    "flat": {"object": "error", "message": "the prompt is too long", "type": "BadRequestError", "code": 400},
    "pydantic": {"error": "1 validation error for CompletionRequest"},
    "tgi": {"error": "Model is overloaded", "error_type": "overloaded"},
}
ERROR_EVENTS = {
    "tgi": {"error": "Model is overloaded", "error_type": "overloaded"},
    "tgi-openai": {"error": {"message": "Request failed during generation", "http_status_code": 424}},
    "openai": {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
}


class Answer:
    """The writes of one streamed answer: `writes()` yields (ms after the request, pieces of the event
    stream)."""

    def __init__(self, options: Options, path: str, body: dict) -> None:
        self.options = options
        self.tgi = path == "/generate_stream"
        self.chat = path.endswith("/chat/completions")
        parameters = body.get("parameters", body)
        self.wanted = parameters.get("max_new_tokens") or parameters.get("max_tokens") or 16
        prompt = body.get("prompt") or body.get("inputs") or body.get("messages", [{}])[0].get("content", "")
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        self.pad = " " * options.pad

    def writes(self) -> Iterator[tuple[float, list[bytes]]]:
        o = self.options
        count = min(self.wanted, o.stop) if o.stop else self.wanted
        if o.role:
            yield o.first_ms / 2, [self.event(self.chunk(None, 0, role=True))]
        for number in range(o.empty):
            yield o.first_ms * (number + 1) / (o.empty + 2), [self.event(self.chunk("", 0))]
        if o.error == -1:
            yield o.first_ms, [self.event(ERROR_EVENTS[o.error_form])]
            return
        sent = 0
        while sent < count:
            many = min(o.merge, count - sent)
            due = o.first_ms + o.gap_ms * sent
            sent += many
            last = sent == count
            reason = ("stop" if count < self.wanted else "length") if last and o.finish else None
            yield due, [self.event(self.chunk(" a" * many, sent, many, reason))]
            if o.cut and sent >= o.cut:
                yield due, [b""]
                return
            if o.error and sent >= o.error:
                yield due, [self.event(ERROR_EVENTS[o.error_form])]
                return
            if o.silent and sent >= o.silent:
                yield due + 3_600_000, []
        tail = []
        if o.usage in ("final", "continuous") and not self.tgi:
            tail.append(self.event({**self.base(), "choices": [], "usage": self.usage(count + o.lie)}))
        if o.done and not self.tgi:
            tail.append(self.event("[DONE]"))
        yield due, tail

    def base(self) -> dict:
        serial = next(_serial) if self.options.new_ids else 7
        return {"id": f"cmpl-{serial}", "object": "text_completion", "created": 1700000000, "model": "m"}

    def usage(self, tokens: int) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + tokens,
            "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0},
        }

    def chunk(
        self, text: str | None, total: int, many: int = 0, reason: str | None = None, role: bool = False
    ) -> dict:
        o = self.options
        if self.tgi:
            details = {
                "finish_reason": "eos_token" if reason == "stop" else reason, "generated_tokens": total,
                "seed": None, "input_length": self.prompt_tokens,
            }
            return {
                "index": total, "token": {"id": 264, "text": text, "logprob": -0.5, "special": False},
                "generated_text": text if reason else None, "details": details if reason else None,
            }
        shown = text if o.text else ""
        choice = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": ""} if role else {"content": shown}
        else:
            choice["text"] = "" if role else shown
        if o.ids and many:
            choice["token_ids"] = [264] * many
        value = {**self.base(), "choices": [choice]}
        if o.usage == "continuous" or (o.usage == "last" and reason):
            value["usage"] = self.usage(total)
        if o.pad:
            value["pad"] = self.pad
        return value

    def event(self, value: dict | str) -> bytes:
        end = "\r\n" if self.options.crlf else "\n"
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        comment = f": keep-alive{end}{end}" if self.options.comments else ""
        return f"{comment}data:{'' if self.options.nospace else ' '}{text}{end}{end}".encode()


_serial = itertools.count(100)


class PunctualSelector(selectors.EpollSelector):
    """epoll counts in milliseconds; select() on the epoll itself counts in microseconds."""

    def select(self, timeout: float | None = None) -> list:
        if timeout is not None and timeout > 0:
            select.select((self.fileno(),), (), (), timeout)
            timeout = 0
        return super().select(timeout)


class Server:
    """All connections, one heap of what is due, and the log."""

    def __init__(self) -> None:
        self.log: list[dict] = []
        self.heap: list[tuple[int, int, Connection]] = []
        self.order = itertools.count()
        self.timer: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        self.served = 0

    def schedule(self, due_ns: int, connection: "Connection") -> None:
        heapq.heappush(self.heap, (due_ns, next(self.order), connection))
        if self.heap[0][0] == due_ns:
            self.arm()

    def arm(self) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_at(self.heap[0][0] / 1e9, self.fire)

    def fire(self) -> None:
        self.timer = None
        heap, now_ns = self.heap, time.monotonic_ns
        while heap and heap[0][0] <= now_ns():
            due_ns, _, connection = heapq.heappop(heap)
            due_ns = connection.write_due(due_ns)
            if due_ns is not None:
                heapq.heappush(heap, (due_ns, next(self.order), connection))
        if heap:
            self.arm()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.held = b""
        self.writes: Iterator | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error) -> None:
        self.writes = None

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, mark, body = self.held.partition(b"\r\n\r\n")
        if not mark:
            return
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (item.partition(":") for item in lines)}
        if len(body) < int(headers.get("content-length", 0)):
            return
        self.held = b""
        method, path, _ = line.split(" ", 2)
        self.answer(method, path, headers, body)

    def answer(self, method: str, path: str, headers: dict, body: bytes) -> None:
        now = time.monotonic_ns()
        log = self.server.log
        if method != "POST":
            options, path = parse_options(path)
            content = json.dumps(log if path == "/log" else {"object": "list", "data": [{"id": "m"}]})
            if method == "DELETE":
                log.clear()
            self.plain(200, content)
            return
        options, path = parse_options(path)
        self.entry = {
            "id": headers.get("x-request-id"), "received_ns": now, "due_ns": [], "written_ns": [],
            "path": path, "headers": headers, "body": json.loads(body),
        }
        log.append(self.entry)
        self.options = options
        if options.status != 200:
            text = options.shape == "text"
            self.plain(options.status, "come back later" if text else json.dumps(ERRORS[options.shape]))
            return
        self.start_ns = now + (round(options.cold_ms * 1e6) if self.server.served == 0 else 0)
        self.server.served += 1
        framing = "transfer-encoding: chunked\r\n" if options.framing == "chunked" else ""
        self.transport.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{framing}\r\n".encode()
        )
        self.writes = self.cut(Answer(options, path, self.entry["body"]).writes())
        self.pending: list[bytes] = []
        self.next_due()

    def plain(self, status: int, content: str) -> None:
        data = content.encode()
        self.transport.write(
            f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        if not getattr(self, "options", Options()).keep:
            self.transport.close()

    def cut(self, writes) -> Iterator[tuple[int, list[bytes]]]:
        """(due ns, pieces as HTTP frames them); a split write becomes several, 1 ms apart."""
        size, chunked = self.options.split, self.options.framing == "chunked"
        for due_ms, events in writes:
            due_ns = self.start_ns + round(due_ms * 1e6)
            framed = [b"%x\r\n%b\r\n" % (len(e), e) if chunked and e else e for e in events]
            if not size:
                yield due_ns, framed
                continue
            data = b"".join(framed)
            for at in range(0, max(len(data), 1), size):
                yield due_ns, [data[at : at + size]]
                due_ns += 1_000_000
        yield due_ns, [b"0\r\n\r\n"] if chunked else []

    def next_due(self) -> None:
        due_ns, self.pending = next(self.writes)
        self.server.schedule(due_ns, self)

    def write_due(self, due_ns: int) -> int | None:
        """Writes what is due and returns when the next is, None after the last."""
        if self.writes is None:
            return None
        self.entry["due_ns"].append(due_ns)
        self.entry["written_ns"].append(time.monotonic_ns())
        for piece in self.pending:
            if piece:
                self.transport.write(piece)
            else:
                self.break_off()
                return None
        try:
            due_ns, self.pending = next(self.writes)
        except StopIteration:
            if not self.options.keep:
                self.transport.close()
            return None
        return due_ns

    def break_off(self) -> None:
        self.writes = None
        if self.options.reset:
            linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.close()


async def serve(host: str, port: int, certificate: str | None) -> None:
    server = Server()
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    listener = await server.loop.create_server(
        lambda: Connection(server), host, port, backlog=4096, ssl=context, reuse_address=True
    )
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


@dataclass(frozen=True, slots=True)
class Running:
    """A server process that this process started."""

    root: str
    process: subprocess.Popen

    def url(self, **options) -> str:
        """A base URL that asks for these Options."""
        asked = ",".join(f"{key}={value}" for key, value in options.items())
        return f"{self.root}/{asked}" if options else self.root

    def log(self) -> list[dict]:
        with urllib.request.urlopen(f"{self.root}/log", timeout=60) as answer:
            return json.load(answer)

    def forget(self) -> None:
        request = urllib.request.Request(f"{self.root}/log", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()


@contextlib.contextmanager
def running(
    host: str = "127.0.0.1", certificate: str | None = None, prefix: tuple[str, ...] = ()
) -> Iterator[Running]:
    """Starts the server in a process of its own (`prefix`: taskset, say) and ends it."""
    command = [*prefix, sys.executable, __file__, "--host", host]
    if certificate:
        command += ["--certificate", certificate]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            name = f"[{host}]" if ":" in host else "localhost" if certificate else host
            yield Running(f"{'https' if certificate else 'http'}://{name}:{port}", process)
        finally:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--certificate")
    arguments = parser.parse_args()
    loop_factory = lambda: asyncio.SelectorEventLoop(PunctualSelector())  # noqa: E731
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(arguments.host, arguments.port, arguments.certificate))
