"""The HTTP/1.1 that the stand-ins share: small, asynchronous, and writing each event as soon as it is due."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Payload Too Large",
           422: "Unprocessable Entity", 424: "Failed Dependency", 429: "Too Many Requests",
           500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


@dataclass(slots=True)
class Request:
    """What came in, and the way back: `reply` for a whole answer, `begin` and `event` for a stream."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    answered: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def json(self) -> Any:
        """The body's value; ValueError when it is no JSON."""
        return json.loads(self.body)

    def reply(self, status: int, value: Any = b"", headers: dict[str, str] | None = None) -> None:
        """A whole answer; a value that is neither bytes nor str goes out as JSON."""
        kind = "text/plain; charset=utf-8"
        if isinstance(value, str):
            value = value.encode()
        elif not isinstance(value, bytes):
            kind, value = "application/json", json.dumps(value, separators=(",", ":")).encode()
        self._head(status, {"content-type": kind, "content-length": str(len(value)), **(headers or {})})
        self._write(value)
        self.ended.set()

    def begin(self) -> None:
        """The head of an event stream."""
        self._head(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"})

    def event(self, value: Any, prefix: bytes = b"data: ") -> None:
        """One server-sent event: a str as it is, anything else as JSON."""
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        data = prefix + text.encode() + b"\n\n"
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """The stream's orderly end."""
        self._write(b"0\r\n\r\n")
        self.ended.set()

    def cut(self) -> None:
        """The connection breaks off in the middle of the answer."""
        with contextlib.suppress(OSError):
            self.writer.transport.abort()
        self.ended.set()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.answered = True
        lines = [f"HTTP/1.1 {status} {REASONS[status]}", *(f"{key}: {value}" for key, value in headers.items())]
        self._write("\r\n".join([*lines, "", ""]).encode())

    def _write(self, data: bytes) -> None:
        if not self.writer.is_closing():  # a client that left is no error
            self.writer.write(data)


Handler = Callable[[Request], Awaitable[None]]


class Server:
    """Answers requests by a table of (method, path) → handler; `guard` may answer first, as middleware does."""

    def __init__(self, routes: dict[tuple[str, str], Handler], guard: Callable[[Request], None] | None = None) -> None:
        self.routes, self.guard = routes, guard

    async def serve(self, sock: socket.socket) -> None:
        """Listen on a bound socket until cancelled."""
        server = await asyncio.start_server(self._connection, sock=sock, limit=1 << 22, backlog=4096)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (request := await self._read(reader, writer)) is not None:
                await self._answer(request)
                if request.headers.get("connection", "").lower() == "close" or writer.is_closing():
                    break
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None
        line, *lines = head.decode("latin-1").rstrip().split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {key.strip().lower(): value.strip() for key, _, value in (item.partition(":") for item in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, path.partition("?")[0], headers, body, writer)

    async def _answer(self, request: Request) -> None:
        if self.guard:
            self.guard(request)
        if request.answered:
            return
        handler = self.routes.get((request.method, request.path))
        if handler is None:
            known = any(path == request.path for _, path in self.routes)
            request.reply(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            return
        await handler(request)
        await request.ended.wait()


def bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; OSError as bind's."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((socket.gethostbyname(host), port))
    return sock
