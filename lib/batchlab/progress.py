"""What a person sees while cells are measured: which one, how many are done, about how long is left."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from batchlab.cell import Cell
from batchlab.estimate import Estimator, clock
from batchlab.scenario import Limits


@dataclass(slots=True)
class Progress:
    """A line a cell to a stream. On a terminal, and in a notebook, the line of the running cell is rewritten in
    place."""

    total: int
    estimator: Estimator
    left: list[Cell]
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0
    invalid: int = 0
    _spent_s: float = 0.0
    _expected_s: float = 0.0
    _began: float = 0.0
    _now: str = ""
    _told: float = 0.0
    _engine: tuple | None = None  # launch key of the one that runs
    _starts_s: dict[str, float] = field(default_factory=dict)  # how long each engine's last start took

    def _rewrites(self) -> bool:
        return self.stream.isatty() or type(self.stream).__module__.startswith("ipykernel")

    def line(self, text: str) -> None:
        """A line that stays."""
        self.stream.write(("\r\x1b[K" if self._rewrites() else "") + text + "\n")
        self.stream.flush()

    def _passing(self, text: str) -> None:
        """A line that the next one replaces; where that is impossible, one is written every 15 seconds at most."""
        now = time.monotonic()
        if self._rewrites():
            if now - self._told >= 0.2:
                self._told = now
                self.stream.write("\r\x1b[K" + text)
                self.stream.flush()
        elif now - self._told >= 15.0:
            self._told = now
            self.line(text)

    def remaining_s(self) -> float:
        """Estimated seconds for what is left, corrected by how wrong the estimates have been so far, and for the engine
        starts still to come, each as long as that engine's last one."""
        correction = self._spent_s / self._expected_s if self._expected_s > 0 else 1.0
        starts = {cell.launch_key() for cell in self.left} - {self._engine}
        return correction * sum(self.estimator.seconds(cell) for cell in self.left) + sum(
            self._start_s(engine) for engine, *_ in starts
        )

    def _start_s(self, engine: str) -> float:
        return self._starts_s.get(engine, self.estimator.start_of(engine))

    def starting(self, cell: Cell, limits: Limits) -> None:
        self._told, self._engine = time.monotonic(), cell.launch_key()
        self.line(
            f"starting {cell.engine} {cell.engine_version} ({cell.transport}) with {cell.model}, "
            f"batch ≤ {limits.max_batch_size}, tokens ≤ {limits.max_num_tokens}: "
            f"about {clock(self._start_s(cell.engine))}"
        )

    def waiting(self, waited_s: float) -> None:
        self._passing(f"  starting, {waited_s:.0f} s")

    def started(self, took_s: float) -> None:
        if self._engine:
            self._starts_s[self._engine[0]] = took_s
        self.line(f"  ready after {took_s:.0f} s; {self.total - self.done} cells, about {clock(self.remaining_s())}")

    def begin(self, cell: Cell) -> None:
        self._began = time.monotonic()
        self._now = f"[{self.done + 1}/{self.total}] {cell.describe()}"
        self._passing(f"{self._now} …")

    def requests(self, done: int, total: int) -> None:
        self._passing(f"{self._now}: {done}/{total} requests")

    def end(self, cell: Cell, reasons: list[str]) -> None:
        took = time.monotonic() - self._began
        self._spent_s += took
        self._expected_s += self.estimator.seconds(cell)
        self.done += 1
        self.invalid += bool(reasons)
        self.left = [c for c in self.left if c.id != cell.id]
        verdict = f"invalid: {reasons[0]}" if reasons else "valid"
        rest = f"about {clock(self.remaining_s())} left" if self.left else "all done"
        self.line(f"{self._now}: {took:.1f} s, {verdict}; {rest}")

    @contextmanager
    def simulating(self) -> Iterator[Callable[[int], None]]:
        """Lines about cells that are simulated; gives the function to call with the number done."""
        what, began = f"simulating {self.total} cell{'s' * (self.total != 1)}", time.monotonic()
        self._told = began
        yield lambda done: self._passing(f"{what}: {done} done")
        self.line(f"{what}: {time.monotonic() - began:.1f} s")

    def failed(self, reason: str, cells: list[Cell]) -> None:
        """The engine of these cells is given up; those that it has not measured are left out."""
        given_up = {cell.id for cell in cells}
        left = [cell for cell in self.left if cell.id not in given_up]
        self.line(f"{reason}; {len(self.left) - len(left)} cells are not measured")
        self.left = left
