"""One streamed answer: an event for each engine response, and the failures that befall it on its way."""

from collections.abc import Callable
from typing import Any

from standins.faults import Faults
from standins.http import Request


class Answer:
    """Token by token. chunk(many, done, reason): the event of the last `many` of `done` tokens, reason None but at the
    end; tail(done): the events after the last; error: the event of a failure, None for an engine that just breaks off.
    """

    def __init__(
        self,
        request: Request,
        output: int,
        reason: str,
        fault: Faults,
        *,
        chunk: Callable[[int, int, str | None], Any],
        tail: Callable[[int], list[Any]] = lambda done: [],
        error: Any = None,
        merge: int = 1,
        prefix: bytes = b"data: ",
    ) -> None:
        self.request, self.output, self.reason, self.fault = request, output, reason, fault
        self.chunk, self.tail, self.error, self.merge, self.prefix = chunk, tail, error, merge, prefix
        self.sent = 0

    def token(self, left: int) -> None:
        """The engine made a token and `left` are to come; -1: it dropped the request."""
        if self.request.ended.is_set():
            return
        if not self.request.answered:
            self.request.begin()
        if left < 0:
            self._fail()
            return
        done = self.output - left
        if (done % self.merge and left) or self._befallen(done):
            return
        many, self.sent = done - self.sent, done
        self.request.event(self.chunk(many, done, None if left else self.reason), self.prefix)
        if left == 0:
            for event in self.tail(done):
                self.request.event(event, self.prefix)
            self.request.end()

    def _befallen(self, done: int) -> bool:
        fault = self.fault
        if (limit := fault.number("stall")) is not None and done > limit:
            return True
        if (limit := fault.number("break-stream")) is not None and done > limit:
            self.request.cut()
            return True
        if (limit := fault.number("error-event")) is not None and done > limit:
            self._fail()
            return True
        return False

    def _fail(self) -> None:
        if self.error is None:
            self.request.cut()
            return
        self.request.event(self.error, self.prefix)
        self.request.end()
