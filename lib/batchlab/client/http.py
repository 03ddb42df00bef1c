"""An HTTP/1 response, parsed after the run from the reads that were stored: status, headers, body pieces
with times."""

from collections.abc import Sequence

import httptools


class Response:
    """`status` is None when no whole status line came; `complete` says that the message ended as HTTP
    frames it; `end` is the time of the read that ended it; `fault` is one line when the bytes are not HTTP."""

    __slots__ = (
        "_now",
        "_parser",
        "complete",
        "end",
        "fault",
        "framed",
        "headers",
        "pieces",
        "status",
        "times",
    )

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.times: list[int] = []
        self.complete = False
        self.framed = False  # by length or chunks; else the connection's end is the body's
        self.end: int | None = None
        self.fault: str | None = None
        self._now = 0
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers.clear()
            return
        self.status = status
        coding = self.headers.get("transfer-encoding", "").lower()
        self.framed = "content-length" in self.headers or "chunked" in coding

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.times.append(self._now)

    def on_message_complete(self) -> None:
        if self.status is not None and not self.complete:
            self.complete = True
            self.end = self._now


def parse(reads: Sequence[bytes], times: Sequence[int], closed: int | None) -> Response:
    """The response in `reads`, each with its time; `closed`: when the server ended the connection, None if
    it did not."""
    response = Response()
    feed = response._parser.feed_data
    for data, time in zip(reads, times, strict=True):
        response._now = time
        try:
            feed(data)
        except httptools.HttpParserError as error:
            if not response.complete:  # bytes after a whole answer are the server's affair
                response.fault = f"not an HTTP answer: {error}"
            break
        if response.complete:
            break
    if closed is not None and response.status is not None and not response.framed and response.fault is None:
        response.complete = True
        response.end = closed
    return response


def is_complete(reads: Sequence[bytes]) -> bool:
    """Whether these reads already hold a whole answer: asked for a silent connection that the server keeps open."""
    return parse(reads, [0] * len(reads), closed=None).complete
