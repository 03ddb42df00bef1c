"""Server-sent events, incrementally: pieces of a body in, (data, time) of each event out.

Follows the WHATWG grammar (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines end in
LF, CRLF or CR, `data:` may be followed by one space, lines of comments and other fields are skipped,
several data lines make one event. An event's time is that of the piece that completed its last data line.
"""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Events:
    """Feed pieces with their times; `data` and `times` grow by one entry an event. Call `close` at the end
    of the body."""

    __slots__ = ("_after_cr", "_field", "_field_time", "_held", "data", "times")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.times: list[int] = []
        self._held: list[bytes] = []  # pieces of a line that has not ended, joined when it does
        self._after_cr = False  # the last piece ended in CR, so a first LF belongs to it
        self._field: bytes | None = None  # data of the event that no blank line has ended yet
        self._field_time = 0

    def feed(self, piece: bytes, time: int) -> None:
        if self._after_cr and piece:
            self._after_cr = False
            if piece[0] == 10:
                piece = piece[1:]
        if b"\r" in piece:
            self._after_cr = piece[-1] == 13
            lines = _LINE_END.split(piece)
        else:
            lines = piece.split(b"\n")
        rest = lines.pop()
        if lines and self._held:
            lines[0] = b"".join(self._held) + lines[0]
            self._held.clear()
        if rest:
            self._held.append(rest)
        for line in lines:
            if not line:
                if self._field is not None:
                    self._emit()
            elif line[:5] == b"data:":
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._field = value if self._field is None else self._field + b"\n" + value
                self._field_time = time
            elif line == b"data":
                self._field = b"" if self._field is None else self._field + b"\n"
                self._field_time = time

    def close(self) -> bool:
        """Ends the body: an event whose line was ended counts even without its blank line, as several
        servers leave the last one out. False when the body stopped inside a line."""
        if self._field is not None:
            self._emit()
        return not self._held

    def _emit(self) -> None:
        self.data.append(self._field)
        self.times.append(self._field_time)
        self._field = None
