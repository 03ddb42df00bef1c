"""The event loop of one worker: epoll, non-blocking sockets, and per read nothing but its time and its bytes.

What a read costs decides what the client can keep up with, so nothing is parsed, counted or called back here.
Connections of an open loop are made AHEAD of their time, so that handshakes are no part of what is measured
and a listen queue that overflows (a second a retry) delays none of the sends.

Where the kernel stamps the packets, waking up for each is waste: after a wake the loop sleeps out GATHER_NS
and then reads all that came, as a network card coalesces its interrupts. That costs the recorded times
nothing.
"""

import select
import time
from array import array
from collections import deque
from collections.abc import Callable

from batchlab.client.exchange import Exchange, State
from batchlab.client.http import is_complete
from batchlab.client.wire import Broken, Wire

AHEAD_NS = 250_000_000
OPEN_LIMIT_NS = 10_000_000_000  # to open the first connections
HOUSEKEEPING_NS = 250_000_000
LINGER_NS = 1_000_000_000  # for a server that ends its answer and keeps the connection
GATHER_NS = 500_000
SENDS_A_TURN = 32  # between two polls, so that a burst of sends delays no answer's time
CHUNKED_END = b"\r\n0\r\n\r\n"


class Abandoned(Exception):
    """The parent is gone, or wants the run to end."""


class Loop:
    """exchanges: in the order of their times. concurrency: most requests in flight. closed_loop: a
    request's time is when its slot became free. abandon_fd: readable when the run is to be given up.
    gather: sleep between wakes. `wakes` holds pairs: ns from a wake to the end of its handling, sockets handled."""

    def __init__(
        self,
        exchanges: list[Exchange],
        wire: Wire,
        *,
        concurrency: int | None,
        closed_loop: bool,
        timeout_ns: int,
        silence_ns: int,
        abandon_fd: int,
        gather: bool,
        progress: Callable[[int], None],
    ) -> None:
        self.exchanges = exchanges
        self.wakes = array("q")
        self.finished = 0
        self._wire = wire
        self._concurrency = concurrency
        self._closed_loop = closed_loop
        self._timeout_ns = timeout_ns
        self._silence_ns = silence_ns
        self._abandon_fd = abandon_fd
        self._gather_ns = GATHER_NS if gather else 0
        self._progress = progress
        self._opened = 0
        self._started = 0
        self._woke = 0
        self._slots: deque[int] | None = None  # when each free slot became free
        wire.poller.register(abandon_fd, select.EPOLLIN | select.EPOLLHUP)

    def open_first(self) -> None:
        """Makes the connections of the run's first moments; what fails here is tried again at its time."""
        first = self.exchanges[: self._concurrency] if self._closed_loop else self.exchanges
        first = [exchange for exchange in first if exchange.due_ns <= AHEAD_NS]
        for exchange in first:
            self._open(exchange)
        self._opened = len(first)
        limit = time.monotonic_ns() + OPEN_LIMIT_NS
        opening = (State.CONNECTING, State.SECURING)
        while time.monotonic_ns() < limit and any(exchange.state in opening for exchange in first):
            for fd, _ in self._wire.poller.poll(0.05):
                self._advance(fd)

    def run(self, t0_ns: int) -> None:
        """Sends every request at its time and reads until all answers ended or the time is up."""
        count = len(self.exchanges)
        for exchange in self.exchanges:
            exchange.due_ns += t0_ns
        if self._concurrency is not None:
            self._slots = deque([t0_ns] * self._concurrency)
        by_fd, read, now_ns, note = self._wire.by_fd, self._wire.read, time.monotonic_ns, self.wakes.append
        reading, ended = State.READING, State.ENDED
        care = now_ns() + HOUSEKEEPING_NS
        while self.finished < count or self._doubt_all():
            events = self._wait(care)
            self._woke = wake = now_ns()
            for fd, _ in events:
                exchange = by_fd.get(fd)
                if exchange is None or (exchange.state is not reading and exchange.state is not ended):
                    self._advance(fd)
                    continue
                try:
                    data = read(exchange)
                except Broken as broken:
                    self._lost(exchange, str(broken))
                    continue
                if data == b"":
                    self._end(exchange)
                    self._wire.close(exchange)
                elif data and (data.endswith(CHUNKED_END) or data == b"0\r\n\r\n"):
                    self._end(exchange)
            self._start_due(now_ns())
            now = now_ns()
            if events:
                note(now - wake)
                note(len(events))
            if now >= care:
                if now - t0_ns > self._timeout_ns:
                    self._give_up()
                    break
                self._keep_house(now)
                care = now + HOUSEKEEPING_NS
        self._wire.close_all()

    def _wait(self, care: int) -> list[tuple[int, int]]:
        """Polls until something is ready or the next thing is due. epoll counts in milliseconds, so the
        last of the wait for a send is left to select() on the epoll itself, which counts in microseconds."""
        due = min(care, self._next_due())
        poller = self._wire.poller
        now = time.monotonic_ns()
        rest = min(self._woke + self._gather_ns, due) - now
        if rest > 0:
            time.sleep(rest / 1e9)
            now = time.monotonic_ns()
        left = due - now
        if left > 3_000_000:
            return poller.poll((left - 1_500_000) / 1e9)
        if left > 0:
            select.select((poller,), (), (), left / 1e9)
        return poller.poll(0)

    def _next_due(self) -> int:
        due = 2**63
        if self._started < len(self.exchanges) and (self._slots is None or self._slots):
            due = 0 if self._closed_loop else self.exchanges[self._started].due_ns
        if not self._closed_loop and self._opened < len(self.exchanges):
            due = min(due, self.exchanges[self._opened].due_ns - AHEAD_NS)
        return due

    def _start_due(self, now: int) -> None:
        exchanges, slots = self.exchanges, self._slots
        if not self._closed_loop:
            while self._opened < len(exchanges) and exchanges[self._opened].due_ns - AHEAD_NS <= now:
                if exchanges[self._opened].state is State.WAITING:
                    self._open(exchanges[self._opened])
                self._opened += 1
        for _ in range(SENDS_A_TURN):
            if self._started == len(exchanges) or (slots is not None and not slots):
                return
            exchange = exchanges[self._started]
            if self._closed_loop:
                exchange.due_ns = slots[0]
            if exchange.due_ns > now:
                return
            if slots is not None:
                slots.popleft()
            self._started += 1
            exchange.started = True
            if exchange.state is State.WAITING:
                self._open(exchange)
            elif exchange.state is State.OPEN:
                self._try(self._wire.send, exchange)

    def _open(self, exchange: Exchange) -> None:
        self._try(self._wire.open, exchange)

    def _advance(self, fd: int) -> None:
        if fd == self._abandon_fd:
            raise Abandoned
        exchange = self._wire.by_fd.get(fd)
        if exchange is not None:
            self._try(self._wire.advance, exchange)

    def _try(self, step: Callable[[Exchange], None], exchange: Exchange) -> None:
        try:
            step(exchange)
        except Broken as broken:
            self._lost(exchange, str(broken))

    def _end(self, exchange: Exchange) -> None:
        """The answer is whole as far as a look at its last bytes tells."""
        if exchange.state is State.READING:
            exchange.state = State.ENDED
            self.finished += 1
            if self._slots is not None:
                self._slots.append(time.monotonic_ns())

    def _lost(self, exchange: Exchange, reason: str) -> None:
        """The connection broke. Before its time the request waits for another; after, it failed."""
        ended = exchange.state is State.ENDED
        self._wire.close(exchange)
        if not exchange.started:
            exchange.state = State.WAITING
        elif not ended:
            exchange.error, exchange.state = reason, State.READING
            self._end(exchange)
            exchange.state = State.CLOSED

    def _doubt_all(self) -> bool:
        """Whether some answer only looked whole. Asked when all look whole: parsing delays nobody then."""
        return any([self._doubt(exchange) for exchange in self._wire.by_fd.values()])

    def _doubt(self, exchange: Exchange) -> bool:
        """Takes the end back from an answer that only looked whole."""
        if exchange.state is not State.ENDED or is_complete(exchange.reads):
            return False
        exchange.state = State.READING
        self.finished -= 1
        if self._slots:
            self._slots.pop()
        return True

    def _keep_house(self, now: int) -> None:
        """Silent connections: those that the server leaves open after its answer, and those that hang."""
        self._progress(self.finished)
        for exchange in list(self._wire.by_fd.values()):
            if not exchange.started:
                continue
            silent = now - (exchange.times[-1] if exchange.times else exchange.sent_ns or exchange.due_ns)
            if exchange.state is State.ENDED:
                if silent > LINGER_NS and not self._doubt(exchange):
                    self._wire.close(exchange)
            elif silent > self._silence_ns:
                self._lost(exchange, f"no byte for {self._silence_ns / 1e9:g} s")
            elif silent > LINGER_NS and len(exchange.reads) > exchange.checked:
                exchange.checked = len(exchange.reads)
                if is_complete(exchange.reads):
                    self._end(exchange)

    def _give_up(self) -> None:
        limit = f"{self._timeout_ns / 1e9:g} s"
        for exchange in self.exchanges:
            if exchange.state not in (State.ENDED, State.CLOSED):
                what = "finished" if exchange.started else "sent"
                exchange.error = f"not {what} within the run's {limit}"
