"""One request and, during the run, nothing of its answer but the bytes of each read and when it was read."""

import enum
import socket


class State(enum.IntEnum):
    WAITING = 0  # no connection yet
    CONNECTING = 1
    SECURING = 2  # TLS handshake
    OPEN = 3  # connected ahead of its time, nothing sent
    SENDING = 4  # part of the request is still to be written
    READING = 5
    ENDED = 6  # the answer looks whole; the server is yet to close
    CLOSED = 7


class Exchange:
    """`due_ns` is an offset from t0 until the run starts, and a CLOCK_MONOTONIC time after."""

    __slots__ = (
        "checked",
        "closed_ns",
        "due_ns",
        "error",
        "index",
        "input_len",
        "output_len",
        "payload",
        "reads",
        "sent_ns",
        "sock",
        "stamps",
        "started",
        "state",
        "times",
        "unsent",
    )

    def __init__(self, index: int, input_len: int, output_len: int, due_ns: int, payload: bytes) -> None:
        self.index = index
        self.input_len = input_len
        self.output_len = output_len
        self.due_ns = due_ns
        self.payload = payload
        self.unsent: memoryview | None = None
        self.sock: socket.socket | None = None
        self.state = State.WAITING
        self.started = False  # its time has come: sent as soon as it is connected
        self.sent_ns: int | None = None
        self.times: list[int] = []  # when each read was made
        self.stamps: list[bytes] = []  # when the kernel got its bytes, as a timespec; none through TLS
        self.reads: list[bytes] = []
        self.checked = 0  # reads when a silent connection was last looked at
        self.closed_ns: int | None = None  # when the server ended the connection
        self.error: str | None = None

    def forget(self) -> None:
        """Frees what was read."""
        self.times, self.stamps, self.reads = [], [], []
