"""Failures that a test asks for, in the environment variable STANDIN_FAULT: KIND[=VALUE][@LIMIT], comma separated. With
@, only a server that was started with that max_batch_size or max_num_tokens has the failure.

While starting:
  die-loading       a worker process dies
  oom               out of GPU memory
  slow-start=S      ready only after S seconds
  never-ready       never ready
While serving; those of streams befall every fourth request:
  refuse-field=F    a request that holds the field F is refused
  break-stream=N    the connection breaks after N tokens
  error-event=N     an error event after N tokens, in a stream with status 200
  stall=N           nothing more after N tokens
  stop-early=N      the stream ends after N tokens, as on an end-of-sequence token
  clamp=N           max_tokens is cut to N in silence
  new-ids           every chunk has another id, as of older builds
  merge=N           so many tokens in a chunk
  overload          the request is refused as one too many
  die=N             the server dies with the N-th request
Always:
  ignore-sigterm    SIGTERM does nothing
"""

import os
import signal
import time
from dataclasses import dataclass

KINDS = ("die-loading", "oom", "slow-start", "never-ready", "refuse-field", "break-stream", "error-event", "stall",
         "stop-early", "clamp", "new-ids", "merge", "overload", "die", "ignore-sigterm")  # fmt: skip
EVERY = 4
LIFE_S = 900  # a stand-in that nobody ended ends by itself


@dataclass(slots=True)
class Faults:
    """The failures in force."""

    given: dict[str, str]
    requests: int = 0

    def __contains__(self, kind: str) -> bool:
        assert kind in KINDS
        return kind in self.given

    def number(self, kind: str) -> float | None:
        """Its value; None when it was not asked for."""
        return float(self.given[kind]) if kind in self else None

    def text(self, kind: str) -> str | None:
        return self.given[kind] if kind in self else None

    def strikes(self) -> bool:
        """Counts a request; whether the failures of streams befall it. Dies with it when that was asked for."""
        self.requests += 1
        if self.number("die") == self.requests:
            print("Segmentation fault (core dumped)", flush=True)
            os._exit(139)
        return self.requests % EVERY == 0

    def load(self) -> None:
        """What of them comes before the port opens."""
        if "never-ready" in self:
            time.sleep(LIFE_S)
        time.sleep(self.number("slow-start") or 0.0)


def asked(*limits: int | None) -> Faults:
    """From the environment; ValueError for a kind that there is not. Arms the timer that ends a forgotten server."""
    given = {}
    for item in filter(None, os.environ.get("STANDIN_FAULT", "").split(",")):
        what, _, limit = item.partition("@")
        kind, _, value = what.partition("=")
        if kind not in KINDS:
            raise ValueError(f"STANDIN_FAULT: no failure {kind}; there are: {', '.join(KINDS)}")
        if not limit or int(limit) in limits:
            given[kind] = value
    signal.alarm(LIFE_S)
    if "ignore-sigterm" in given:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Faults(given)


NONE = Faults({})
