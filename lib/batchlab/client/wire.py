"""The sockets of one worker: connect, TLS, send, read, without ever blocking.

Reads of plain sockets carry the kernel's own time stamp of the packet (SO_TIMESTAMPNS), so that what is
recorded is when the bytes arrived, not when this process got round to them.
"""

import errno
import os
import select
import socket
import ssl
import time

from batchlab.client.exchange import Exchange, State
from batchlab.errors import UsageError

READ_SIZE = 16384  # the largest TLS record: one read leaves nothing behind in the TLS layer
_STAMP = getattr(socket, "SO_TIMESTAMPNS", 35)
_STAMP_SPACE = socket.CMSG_SPACE(16)
_RETRY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_KNOWN = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "the server reset the connection",
    errno.EPIPE: "the server closed the connection",
    errno.EADDRNOTAVAIL: "no local port is free",
}


class Broken(Exception):
    """A connection that is of no more use; the message is one line."""


class Wire:
    """tls: context and server name, None for plain sockets. `by_fd` holds every open connection, `peak` the
    most at once."""

    __slots__ = ("_address", "_family", "_tls", "by_fd", "peak", "poller", "read")

    def __init__(self, family: int, address: tuple, tls: tuple[ssl.SSLContext, str] | None) -> None:
        self._family, self._address, self._tls = family, address, tls
        self.by_fd: dict[int, Exchange] = {}
        self.peak = 0
        self.poller = select.epoll()
        self.read = read_secure if tls else read_plain

    def open(self, exchange: Exchange) -> None:
        """Begins to connect. Broken when that fails at once, UsageError when the system allows no more sockets."""
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise UsageError(
                f"{len(self.by_fd)} connections are open and the system allows no more: "
                "raise the limit of open files (ulimit -Hn) or lower the request rate"
            ) from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._tls:
            sock.setsockopt(socket.SOL_SOCKET, _STAMP, 1)
        exchange.sock, exchange.state = sock, State.CONNECTING
        self.by_fd[sock.fileno()] = exchange
        self.peak = max(self.peak, len(self.by_fd))
        self.poller.register(sock.fileno(), select.EPOLLOUT)
        code = sock.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            raise Broken(f"cannot connect: {_reason(OSError(code, None))}")

    def advance(self, exchange: Exchange) -> None:
        """One step, after the poller reported it, of a connection that is not yet being read."""
        state = exchange.state
        if state is State.CONNECTING:
            code = exchange.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise Broken(f"cannot connect: {_reason(OSError(code, None))}")
            if not self._tls:
                self._opened(exchange)
                return
            context, name = self._tls
            exchange.sock = context.wrap_socket(exchange.sock, server_hostname=name, do_handshake_on_connect=False)
            exchange.state = State.SECURING
            self._secure(exchange)
        elif state is State.SECURING:
            self._secure(exchange)
        elif state is State.SENDING:
            self.send(exchange)
        elif state is State.OPEN:
            self._check_idle(exchange)

    def _secure(self, exchange: Exchange) -> None:
        try:
            exchange.sock.do_handshake()
        except ssl.SSLWantReadError:
            self.poller.modify(exchange.sock.fileno(), select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self.poller.modify(exchange.sock.fileno(), select.EPOLLOUT)
        except OSError as error:
            raise Broken(_reason(error)) from None
        else:
            self._opened(exchange)

    def _opened(self, exchange: Exchange) -> None:
        exchange.state = State.OPEN
        self.poller.modify(exchange.sock.fileno(), select.EPOLLIN)
        if exchange.started:
            self.send(exchange)

    def _check_idle(self, exchange: Exchange) -> None:
        """A connection that waits for its time became readable: TLS session tickets, or the server took it back."""
        try:
            if exchange.sock.recv(READ_SIZE):
                return
        except _RETRY:
            return
        except OSError as error:
            raise Broken(_reason(error)) from None
        raise Broken("the server closed the connection before the request")

    def send(self, exchange: Exchange) -> None:
        """Writes what the socket takes; the rest goes when it is writable, and the answer is read after that."""
        if exchange.sent_ns is None:
            exchange.sent_ns = time.monotonic_ns()
            exchange.unsent = memoryview(exchange.payload)
        try:
            sent = exchange.sock.send(exchange.unsent)
        except _RETRY:
            sent = 0
        except OSError as error:
            self._read_refusal(exchange)
            raise Broken(_reason(error)) from None
        exchange.unsent = exchange.unsent[sent:]
        if not exchange.unsent:
            if exchange.state is State.SENDING:
                self.poller.modify(exchange.sock.fileno(), select.EPOLLIN)
            exchange.state, exchange.unsent, exchange.payload = State.READING, None, b""
        elif exchange.state is not State.SENDING:
            exchange.state = State.SENDING
            self.poller.modify(exchange.sock.fileno(), select.EPOLLOUT)

    def _read_refusal(self, exchange: Exchange) -> None:
        """The server stopped reading: it may have said why (413, 429) before it closed."""
        try:
            while self.read(exchange):
                pass
        except Broken:
            pass

    def close(self, exchange: Exchange) -> None:
        del self.by_fd[exchange.sock.fileno()]
        exchange.sock.close()
        exchange.sock, exchange.state = None, State.CLOSED

    def close_all(self) -> None:
        for exchange in list(self.by_fd.values()):
            self.close(exchange)
        self.poller.close()


def read_plain(exchange: Exchange) -> bytes | None:
    """What arrived, stored with its times; b"" when the server closed, None when there was nothing after all."""
    try:
        data, extra, _, _ = exchange.sock.recvmsg(READ_SIZE, _STAMP_SPACE)
    except BlockingIOError:
        return None
    except OSError as error:
        raise Broken(_reason(error)) from None
    if data:
        exchange.times.append(time.monotonic_ns())
        exchange.stamps.append(extra[0][2] if extra else b"")
        exchange.reads.append(data)
    else:
        exchange.closed_ns = time.monotonic_ns()
    return data


def read_secure(exchange: Exchange) -> bytes | None:
    """The same through TLS, which has no packet's time."""
    try:
        data = exchange.sock.recv(READ_SIZE)
    except _RETRY:
        return None
    except OSError as error:
        raise Broken(_reason(error)) from None
    if data:
        exchange.times.append(time.monotonic_ns())
        exchange.reads.append(data)
    else:
        exchange.closed_ns = time.monotonic_ns()
    return data


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    return _KNOWN.get(error.errno) or (os.strerror(error.errno) if error.errno else str(error))
