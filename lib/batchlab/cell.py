"""A cell: one measured point, and its name, which is a hash of exactly what it measures."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

SIMULATED = "simulated"  # the transport of a simulated engine
# limits that an engine can lower while it runs; the others, and all of the engines not named here, take a new start
WARM_LIMITS = {"vllm": ("max_batch_size", "max_num_tokens"), "sglang": ("max_batch_size",)}


class _Named:
    """Room for a cell's id beside its fields, so that it is no coordinate: neither compared, copied nor written."""

    __slots__ = ("_id",)


@dataclass(frozen=True, slots=True)
class Cell(_Named):
    """One point of a study.

    `dataset`, `arrival` and `engine_options` are the scenario's validated values; `request_rate` is requests a
    second, None when all requests are sent at once. `token_rule`: how the token budget moves from max_num_tokens on.
    """

    engine: str
    engine_version: str
    model: str
    hardware: str
    transport: str
    max_batch_size: int
    max_num_tokens: int
    dataset: dict[str, Any] = field(hash=False)
    num_requests: int
    request_rate: float | None
    arrival: dict[str, Any] | None = field(hash=False)
    engine_options: dict[str, Any] = field(hash=False)
    seed: int
    token_rule: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def id(self) -> str:
        """12 hexadecimal digits: the SHA-256 of the cell's canonical JSON, cut.

        What is absent (None, or empty) is left out, so that a coordinate added later renames no recorded cell.
        Computed once: a report asks for a cell's id some hundred times.
        """
        try:
            return self._id
        except AttributeError:
            given = {key: value for key, value in asdict(self).items() if value not in (None, {})}
            canonical = json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
            made = hashlib.sha256(canonical.encode()).hexdigest()[:12]
            object.__setattr__(self, "_id", made)
            return made

    @property
    def evidence(self) -> str:
        """What its record is worth: "measured" on a real engine, or "simulated"."""
        return "simulated" if self.transport == SIMULATED else "measured"

    def launch_key(self) -> tuple[str | int, ...]:
        """What cannot change while an engine runs: cells with the same key share one warm engine."""
        warm = WARM_LIMITS.get(self.engine, ())
        return (
            self.engine,
            self.engine_version,
            self.model,
            self.hardware,
            self.transport,
            json.dumps(self.engine_options, sort_keys=True),
            0 if "max_batch_size" in warm else self.max_batch_size,
            0 if "max_num_tokens" in warm else self.max_num_tokens,
        )

    def describe(self) -> str:
        """One line for a person who waits."""
        rate = "all at once" if self.request_rate is None else f"{self.request_rate:g} req/s"
        return (
            f"{self.engine} {self.transport} batch {self.max_batch_size}, "
            f"tokens {'from ' if self.token_rule else ''}{self.max_num_tokens}, "
            f"{shape(self.dataset)}, {rate}, seed {self.seed}"
        )


def shape(dataset: dict[str, Any]) -> str:
    """A dataset's lengths in a few characters."""
    if dataset["kind"] == "fixed":
        return f"{dataset['input_len']} in/{dataset['output_len']} out"
    return dataset["kind"]


def mean_lengths(dataset: dict[str, Any]) -> tuple[float, float]:
    """Expected (input, output) tokens of a request, for estimates only."""
    kind = dataset["kind"]
    if kind == "fixed":
        return dataset["input_len"], dataset["output_len"]
    if kind == "uniform":
        return tuple((dataset[k]["low"] + dataset[k]["high"]) / 2 for k in ("input_len", "output_len"))
    if kind == "lognormal":
        return tuple(
            min(dataset[k]["median"] * 2.718281828 ** (dataset[k]["sigma"] ** 2 / 2), dataset[k]["max"])
            for k in ("input_len", "output_len")
        )
    if kind == "mixed":
        total = sum(p["weight"] for p in dataset["parts"])
        return tuple(sum(p["weight"] * p[k] for p in dataset["parts"]) / total for k in ("input_len", "output_len"))
    return 1024.0, 256.0
