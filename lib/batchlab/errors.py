"""Errors that a person can mend, and errors of one cell that must not stop a sweep."""


class UsageError(Exception):
    """Bad input. The message is one line that names the file, key or flag, and the mend. The command line exits 2."""


class EngineError(Exception):
    """An engine that could not start, died or stopped answering.

    `reason` is one line; `tail` holds the engine's own last log lines.
    """

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.tail = tail

    def told(self) -> str:
        """The reason, and under it the engine's last lines where it left any."""
        return f"{self.reason}\n--- the engine's last lines\n{self.tail}" if self.tail else self.reason
