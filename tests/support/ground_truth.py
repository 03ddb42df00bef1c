"""A server whose token times are known: raw bytes on non-blocking sockets, no framework, no engine.

Speaks OpenAI completions, OpenAI chat and TGI streaming. What it does is written in the path before the API's own, so
one server serves every test: http://host:port/first_ms=20,gap_ms=5,crlf=1/v1/completions (see answers.Options).
`GET /log` gives, for each request, when its last byte arrived (the kernel's time), when each write was due and when it
was made (CLOCK_MONOTONIC ns), its headers and body; `DELETE /log` forgets them.
By hand: python ground_truth.py [--host H] [--port N] [--options first_ms=20,gap_ms=5] prints the port that it holds.
"""

import argparse
import contextlib
import gc
import heapq
import itertools
import json
import select
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from answers import ERRORS, Options, parse_options, writes

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate_stream")
STAMP = getattr(socket, "SO_TIMESTAMPNS", 35)
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s


class Connection:
    """Reads one request after the other and writes each answer on its schedule."""

    def __init__(self, server: "Server", sock: socket.socket) -> None:
        self.server, self.sock = server, sock
        self.held = bytearray()
        self.needed = 0
        self.unsent = b""
        self.writes: Iterator | None = None
        self.pending: list[bytes] = []
        self.last = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, STAMP, 1)

    def readable(self) -> None:
        try:
            data, extra, _, _ = self.sock.recvmsg(1 << 20, 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        now = time.monotonic_ns()
        if extra:
            seconds, ns = struct.unpack("qq", extra[0][2])
            # a reading that is interrupted between its two clocks comes out too low, so the highest of a few is right
            offset = max(time.monotonic_ns() - time.time_ns() for _ in range(3))
            now = min(now, seconds * 1_000_000_000 + ns + offset)
        self.held += data
        if len(self.held) < self.needed or (end := self.held.find(b"\r\n\r\n")) < 0:
            return
        line, *lines = self.held[:end].decode("latin-1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (item.partition(":") for item in lines)}
        self.needed = end + 4 + int(headers.get("content-length", 0))
        if len(self.held) < self.needed:
            return
        body = bytes(self.held[end + 4 : self.needed])
        del self.held[: self.needed]
        self.needed = 0
        method, path, _ = line.split(" ", 2)
        self.last = headers.get("connection", "").lower() == "close"
        self.answer(method, path, headers, body, now)

    def answer(self, method: str, path: str, headers: dict, body: bytes, now: int) -> None:
        log = self.server.log
        options, path = parse_options(path, self.server.options)
        self.options = options
        if method != "POST":
            self.plain(200, log if path == "/log" else {"object": "list", "data": [{"id": "m", "object": "model"}]})
            if method == "DELETE":
                log.clear()
            return
        if path not in PATHS:
            self.plain(404, {"detail": "Not Found"})
            return
        self.entry = {
            "id": headers.get("x-request-id"),
            "received_ns": now,
            "due_ns": [],
            "written_ns": [],
            "path": path,
            "headers": headers,
            "body": json.loads(body),
        }
        log.append(self.entry)
        if options.status != 200:
            self.plain(options.status, ERRORS[options.shape])
            return
        self.start_ns = now + (round(options.cold_ms * 1e6) if not self.server.served else 0)
        self.server.served += 1
        framing = b"transfer-encoding: chunked\r\n" if options.framing == "chunked" else b""
        self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n%b\r\n" % framing)
        self.writes = self.framed(writes(options, path, self.entry["body"]))
        due_ns, self.pending = next(self.writes)
        self.server.schedule(due_ns, self)

    def plain(self, status: int, value: object) -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.send(head.encode() + data)
        self.finish()

    def framed(self, events: Iterator) -> Iterator[tuple[int, list[bytes]]]:
        """(due ns, bytes of each write); a split write becomes several, 1 ms apart."""
        size, chunked = self.options.split, self.options.framing == "chunked"
        due_ns = self.start_ns
        for due_ms, parts in events:
            due_ns = self.start_ns + round(due_ms * 1e6)
            pieces = [b"%x\r\n%b\r\n" % (len(part), part) if chunked and part else part for part in parts]
            if not size:
                yield due_ns, pieces
                continue
            data = b"".join(pieces)
            for at in range(0, max(len(data), 1), size):
                yield due_ns, [data[at : at + size]]
                due_ns += 1_000_000
        yield due_ns, [b"0\r\n\r\n"] if chunked else []

    def write_due(self, due_ns: int) -> int | None:
        """Makes the write that is due and returns when the next one is, None after the last."""
        if self.writes is None:
            return None
        self.entry["due_ns"].append(due_ns)
        self.entry["written_ns"].append(time.monotonic_ns())
        for piece in self.pending:
            if not piece:
                if self.options.reset:
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.close()
                return None
            self.send(piece)
        try:
            due_ns, self.pending = next(self.writes)
        except StopIteration:
            self.writes = None
            self.finish()
            return None
        return due_ns

    def send(self, data: bytes) -> None:
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self.unsent = data[sent:]
            self.server.poller.modify(self.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def writable(self) -> None:
        data, self.unsent = self.unsent, b""
        self.send(data)
        if not self.unsent and self.sock.fileno() >= 0:
            self.server.poller.modify(self.sock.fileno(), select.EPOLLIN)
            if self.last and self.writes is None:
                self.finish()

    def finish(self) -> None:
        close = (self.last and not self.options.keep) or self.options.framing == "close"
        if close and not self.unsent:
            self.close()

    def close(self) -> None:
        self.writes, self.unsent = None, b""
        if self.sock.fileno() >= 0:
            self.server.connections.pop(self.sock.fileno())
            self.sock.close()


class Server:
    """All connections, one heap of what is due, and the log."""

    def __init__(self, host: str, port: int, options: Options) -> None:
        self.options = options  # of requests whose path asks for none
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, backlog=4096)
        self.listener.setblocking(False)
        self.log: list[dict] = []
        self.connections: dict[int, Connection] = {}
        self.served = 0
        self.heap: list[tuple[int, int, Connection]] = []
        self.order = itertools.count()
        self.poller = select.epoll()
        self.poller.register(self.listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        while True:
            for fd, event in self.wait():
                if fd == self.listener.fileno():
                    self.accept()
                elif connection := self.connections.get(fd):
                    if event & select.EPOLLOUT:
                        connection.writable()
                    if event & ~select.EPOLLOUT and self.connections.get(fd) is connection:
                        connection.readable()
            heap, now_ns = self.heap, time.monotonic_ns
            while heap and heap[0][0] <= now_ns():
                due_ns, _, connection = heap[0]
                due_ns = connection.write_due(due_ns)
                if due_ns is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (due_ns, next(self.order), connection))

    def wait(self) -> list[tuple[int, int]]:
        """epoll counts in milliseconds; select() on the epoll itself counts in microseconds."""
        left = (self.heap[0][0] - time.monotonic_ns()) / 1e9 if self.heap else None
        if left is None or left > 0:
            select.select((self.poller,), (), (), left)
        return self.poller.poll(0)

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                self.connections[sock.fileno()] = Connection(self, sock)
                self.poller.register(sock.fileno(), select.EPOLLIN)

    def schedule(self, due_ns: int, connection: Connection) -> None:
        heapq.heappush(self.heap, (due_ns, next(self.order), connection))


@dataclass(frozen=True, slots=True)
class Running:
    """A server process that this process started."""

    root: str
    process: subprocess.Popen

    def url(self, **options: object) -> str:
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
def running(host: str = "127.0.0.1", prefix: tuple[str, ...] = (), options: str = "") -> Iterator[Running]:
    """Starts the server in a process of its own (`prefix`: taskset, say; `options`: of paths that hold none) and ends
    it."""
    command = [*prefix, sys.executable, __file__, "--host", host, "--options", options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            yield Running(f"http://{f'[{host}]' if ':' in host else host}:{port}", process)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--options", default="", help="of requests whose path holds none: first_ms=20,gap_ms=5")
    arguments = parser.parse_args()
    server = Server(arguments.host, arguments.port, parse_options("/" + arguments.options)[0])
    print(server.listener.getsockname()[1], flush=True)
    gc.freeze()
    gc.disable()  # a collection among many connections would show as lateness
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
