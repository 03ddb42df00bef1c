"""What replay() gives to a worker and gets back, pickled over their link."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """items: (index, input_len, output_len, scheduled_s, HTTP request) in the order of their times."""

    api: str
    family: int
    address: tuple
    server_name: str | None  # for TLS
    items: list[tuple[int, int, int, float, bytes]]
    concurrency: int | None
    closed_loop: bool
    timeout_s: float
    silence_s: float
    keep_chunks: bool


@dataclass(frozen=True, slots=True)
class Result:
    rows: list[dict]
    cpu_s: float  # of the loop alone
    wall_s: float
    loop_lag_p99_ms: float
    receive_lag_p99_ms: float | None  # from a packet's arrival to its read; None: the reads' own times are used
    merged_chunks: int  # that were read together with the next one of their stream
    bytes: int
    connections_peak: int
