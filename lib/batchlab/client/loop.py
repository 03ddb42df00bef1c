"""The event loop of one worker: epoll, non-blocking sockets, and per read nothing but its time and its bytes.

What a read costs decides what the client can keep up with, so nothing is parsed, counted or scheduled by
callbacks here. Connections of an open loop are made AHEAD of their time, so that handshakes are no part of
what is measured and a listen queue that overflows (a second a retry) delays none of the sends.
"""

import errno
import os
import select
import socket
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from batchlab.client.exchange import Exchange, State
from batchlab.client.http import is_complete
from batchlab.errors import UsageError

AHEAD_NS = 250_000_000
OPEN_LIMIT_NS = 10_000_000_000     # to open the first connections
HOUSEKEEPING_NS = 250_000_000
LINGER_NS = 1_000_000_000          # for a server that ends its answer and keeps the connection
SENDS_A_TURN = 32                  # between two polls, so that a burst of sends delays no answer's time
READ_SIZE = 16384                  # the largest TLS record: one read leaves nothing behind in the TLS layer
CHUNKED_END = b"\r\n0\r\n\r\n"

_IN = select.EPOLLIN if hasattr(select, "epoll") else 0
_OUT = select.EPOLLOUT if hasattr(select, "epoll") else 0


class Abandoned(Exception):
    """The parent is gone, or wants the run to end."""


@dataclass(slots=True)
class Loop:
    """exchanges: in the order of their times. tls: context and server name. concurrency: most requests in
    flight.
    closed_loop: a request's time is when its slot became free. abandon_fd: readable when the run is to be
      given up."""

    exchanges: list[Exchange]
    family: int
    address: tuple
    tls: tuple[ssl.SSLContext, str] | None
    concurrency: int | None
    closed_loop: bool
    timeout_ns: int
    silence_ns: int
    abandon_fd: int
    progress: Callable[[int], None]
    finished: int = 0
    peak: int = 0
    wakes: array = None            # pairs: ns from a wake to the end of its handling, sockets handled
    _poller: "select.epoll" = None
    _by_fd: dict = None
    _opened: int = 0
    _started: int = 0
    _slots: deque | None = None

    def __post_init__(self) -> None:
        self.wakes = array("q")
        self._by_fd = {}
        self._poller = select.epoll()
        self._poller.register(self.abandon_fd, _IN | select.EPOLLHUP)

    def open_first(self) -> None:
        """Makes the connections of the run's first moments; what fails here is tried again at its time."""
        first = self.exchanges[: self.concurrency] if self.closed_loop else self.exchanges
        for exchange in first:
            if exchange.due_ns > AHEAD_NS:
                break
            self._open(exchange)
            self._opened += 1
        limit = time.monotonic_ns() + OPEN_LIMIT_NS
        while time.monotonic_ns() < limit and any(
            x.state in (State.CONNECTING, State.SECURING) for x in first[: self._opened]
        ):
            for fd, _ in self._poller.poll(0.05):
                self._turn(self._exchange(fd))

    def run(self, t0_ns: int) -> None:
        """Sends every request at its time and reads until all answers ended or the time is up."""
        count = len(self.exchanges)
        for exchange in self.exchanges:
            exchange.due_ns += t0_ns
        if self.concurrency is not None:
            self._slots = deque([t0_ns] * self.concurrency)
        by_fd, reading, ended, now_ns = self._by_fd, State.READING, State.ENDED, time.monotonic_ns
        note = self.wakes.append
        care = now_ns() + HOUSEKEEPING_NS
        while self.finished < count or self._reopen_unfinished():
            events = self._wait(care)
            wake = now_ns()
            for fd, _ in events:
                exchange = by_fd.get(fd)
                if exchange is None or (exchange.state is not reading and exchange.state is not ended):
                    self._turn(self._exchange(fd))
                    continue
                try:
                    data = exchange.sock.recv(READ_SIZE)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError as error:
                    self._lost(exchange, _reason(error))
                    continue
                if data:
                    exchange.times.append(now_ns())
                    exchange.reads.append(data)
                    if data.endswith(CHUNKED_END) or data == b"0\r\n\r\n":
                        self._end(exchange)
                else:
                    exchange.closed_ns = now_ns()
                    self._end(exchange)
                    self._close(exchange)
            self._start_due(now_ns())
            now = now_ns()
            if events:
                note(now - wake)
                note(len(events))
            if now >= care:
                if now - t0_ns > self.timeout_ns:
                    self._give_up()
                    break
                self._keep_house(now)
                care = now + HOUSEKEEPING_NS
        for exchange in list(self._by_fd.values()):
            self._close(exchange)
        self._poller.close()

    def _wait(self, care: int) -> list[tuple[int, int]]:
        """Polls until something is ready or the next thing is due. epoll counts in milliseconds, so the
        last of the wait for a send is left to select() on the epoll itself, which counts in
        microseconds."""
        now, due = time.monotonic_ns(), care
        if self._started < len(self.exchanges) and (self._slots is None or self._slots):
            due = min(due, 0 if self.closed_loop else self.exchanges[self._started].due_ns)
        if not self.closed_loop and self._opened < len(self.exchanges):
            due = min(due, self.exchanges[self._opened].due_ns - AHEAD_NS)
        left = due - now
        if left > 3_000_000:
            return self._poller.poll((left - 1_500_000) / 1e9)
        if left > 0:
            select.select((self._poller,), (), (), left / 1e9)
        return self._poller.poll(0)

    def _start_due(self, now: int) -> None:
        exchanges, slots = self.exchanges, self._slots
        if not self.closed_loop:
            while self._opened < len(exchanges) and exchanges[self._opened].due_ns - AHEAD_NS <= now:
                if exchanges[self._opened].state is State.WAITING:
                    self._open(exchanges[self._opened])
                self._opened += 1
        for _ in range(SENDS_A_TURN):
            if self._started == len(exchanges) or (slots is not None and not slots):
                return
            exchange = exchanges[self._started]
            if self.closed_loop:
                exchange.due_ns = slots[0]
            elif exchange.due_ns > now:
                return
            if slots is not None:
                slots.popleft()
            self._started += 1
            exchange.started = True
            if exchange.state is State.WAITING:
                self._open(exchange)
            elif exchange.state is State.OPEN:
                self._send(exchange)

    def _open(self, exchange: Exchange) -> None:
        try:
            sock = socket.socket(self.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise UsageError(
                    f"{len(self._by_fd)} connections are open and the system allows no more: "
                    "raise the limit of open files (ulimit -Hn), or lower the request rate"
                ) from None
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange.sock, exchange.state = sock, State.CONNECTING
        self._by_fd[sock.fileno()] = exchange
        self.peak = max(self.peak, len(self._by_fd))
        self._poller.register(sock.fileno(), _OUT)
        code = sock.connect_ex(self.address)
        if code not in (0, errno.EINPROGRESS):
            self._lost(exchange, f"cannot connect: {_reason(OSError(code, None))}")

    def _exchange(self, fd: int) -> Exchange:
        if fd == self.abandon_fd:
            raise Abandoned
        return self._by_fd[fd]

    def _turn(self, exchange: Exchange) -> None:
        """One step of a connection that is not yet being read."""
        try:
            if exchange.state is State.CONNECTING:
                code = exchange.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._lost(exchange, f"cannot connect: {_reason(OSError(code, None))}")
                elif self.tls:
                    context, name = self.tls
                    exchange.sock = context.wrap_socket(
                        exchange.sock, server_hostname=name, do_handshake_on_connect=False
                    )
                    exchange.state = State.SECURING
                    self._secure(exchange)
                else:
                    self._ready(exchange)
            elif exchange.state is State.SECURING:
                self._secure(exchange)
            elif exchange.state is State.OPEN:
                self._idle(exchange)
            elif exchange.state is State.SENDING:
                self._send(exchange)
        except OSError as error:
            self._lost(exchange, _reason(error))

    def _secure(self, exchange: Exchange) -> None:
        try:
            exchange.sock.do_handshake()
        except ssl.SSLWantReadError:
            self._poller.modify(exchange.sock.fileno(), _IN)
        except ssl.SSLWantWriteError:
            self._poller.modify(exchange.sock.fileno(), _OUT)
        else:
            self._ready(exchange)

    def _ready(self, exchange: Exchange) -> None:
        exchange.state = State.OPEN
        self._poller.modify(exchange.sock.fileno(), _IN)
        if exchange.started:
            self._send(exchange)

    def _idle(self, exchange: Exchange) -> None:
        """A connection that waits for its time became readable: TLS session tickets, or the server took it
        back."""
        try:
            if not exchange.sock.recv(READ_SIZE):
                self._lost(exchange, "the server closed the connection before the request")
        except (BlockingIOError, ssl.SSLWantReadError):
            pass

    def _send(self, exchange: Exchange) -> None:
        """Writes what the socket takes; the rest goes when it is writable. An answer that comes first is
        read then."""
        if exchange.sent_ns is None:
            exchange.sent_ns = time.monotonic_ns()
            exchange.unsent = memoryview(exchange.payload)
        try:
            sent = exchange.sock.send(exchange.unsent)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        except OSError as error:
            self._refused(exchange, error)
            return
        exchange.unsent = exchange.unsent[sent:]
        if not exchange.unsent:
            if exchange.state is State.SENDING:
                self._poller.modify(exchange.sock.fileno(), _IN)
            exchange.state, exchange.unsent, exchange.payload = State.READING, None, b""
        elif exchange.state is not State.SENDING:
            exchange.state = State.SENDING
            self._poller.modify(exchange.sock.fileno(), _OUT)

    def _refused(self, exchange: Exchange, error: OSError) -> None:
        """The server stopped reading: it may have said why (413, 429) before it closed."""
        try:
            data = exchange.sock.recv(READ_SIZE)
        except OSError:
            data = b""
        if data:
            exchange.times.append(time.monotonic_ns())
            exchange.reads.append(data)
        self._lost(exchange, _reason(error))

    def _end(self, exchange: Exchange) -> None:
        if exchange.state is State.READING:
            exchange.state = State.ENDED
            self.finished += 1
            if self._slots is not None:
                self._slots.append(time.monotonic_ns())

    def _lost(self, exchange: Exchange, reason: str) -> None:
        """The connection broke. Before its time the request just waits for another; after, it failed."""
        started, ended = exchange.started, exchange.state is State.ENDED
        self._close(exchange)
        if not started:
            exchange.state = State.WAITING
        elif not ended:
            exchange.error = reason
            exchange.state = State.READING
            self._end(exchange)
            exchange.state = State.CLOSED

    def _close(self, exchange: Exchange) -> None:
        del self._by_fd[exchange.sock.fileno()]
        exchange.sock.close()
        exchange.sock, exchange.state = None, State.CLOSED

    def _reopen_unfinished(self) -> bool:
        """An answer may look whole and not be. Asked when all look whole: parsing costs nobody anything
        then."""
        before = self.finished
        for exchange in self._by_fd.values():
            self._doubt(exchange)
        return self.finished < before

    def _doubt(self, exchange: Exchange) -> bool:
        """Takes the end back from an exchange whose answer is not whole."""
        if exchange.state is not State.ENDED or is_complete(exchange.reads):
            return False
        exchange.state = State.READING
        self.finished -= 1
        if self._slots:
            self._slots.pop()
        return True

    def _keep_house(self, now: int) -> None:
        self.progress(self.finished)
        for exchange in list(self._by_fd.values()):
            if not exchange.started:
                continue
            last = exchange.times[-1] if exchange.times else exchange.sent_ns or exchange.due_ns
            if exchange.state is State.ENDED:
                if now - last > LINGER_NS and not self._doubt(exchange):
                    self._close(exchange)
            elif now - last > self.silence_ns:
                self._lost(exchange, f"no byte for {self.silence_ns / 1e9:g} s")
            elif now - last > LINGER_NS and len(exchange.reads) > exchange.checked:
                exchange.checked = len(exchange.reads)
                if is_complete(exchange.reads):
                    self._end(exchange)

    def _give_up(self) -> None:
        limit = f"{self.timeout_ns / 1e9:g} s"
        for exchange in self.exchanges:
            if exchange.state in (State.ENDED, State.CLOSED):
                continue
            if exchange.started:
                exchange.error = f"not finished within the run's {limit}"
            else:
                exchange.error = f"not sent within the run's {limit}"
            self.finished += 1


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    name = errno.errorcode.get(error.errno or 0, "")
    known = {"ECONNREFUSED": "connection refused", "ECONNRESET": "the server reset the connection",
             "EPIPE": "the server closed the connection", "EADDRNOTAVAIL": "no local port is free"}
    return known.get(name) or (os.strerror(error.errno) if error.errno else str(error))
