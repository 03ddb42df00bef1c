"""A scenario: one YAML file that holds one question. Everything a person may write in it is declared here."""

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from batchlab import paths
from batchlab.cell import SIMULATED
from batchlab.errors import UsageError
from batchlab.scenario_engines import (
    ENGINES,
    POLICIES,
    EngineOptions,
    EngineSpec,
    Limits,
    Positive,
    PositiveNumber,
    Strict,
    real_engines,
)


def _rate(value: Any) -> Any:
    """`inf`, `.inf` and null all mean: every request at once."""
    if value is None or value == float("inf") or str(value).lower() in ("inf", "infinite"):
        return math.inf
    return value


Rate = Annotated[float, Field(gt=0, allow_inf_nan=True), BeforeValidator(_rate)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class Range(Strict):
    """Lengths drawn uniformly from [low, high], both included."""

    low: Positive
    high: Positive

    @model_validator(mode="before")
    @classmethod
    def _from_pair(cls, value: Any) -> Any:
        return {"low": value[0], "high": value[1]} if isinstance(value, list) and len(value) == 2 else value

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Lognormal(Strict):
    """Lengths with this median and the sigma of their logarithm, cut at max."""

    median: PositiveNumber
    sigma: PositiveNumber
    max: Positive


class _Dataset(Strict):
    shared_prefix: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each prompt that all prompts have in common


class Fixed(_Dataset):
    kind: Literal["fixed"] = "fixed"
    input_len: Positive
    output_len: Positive


class Uniform(_Dataset):
    kind: Literal["uniform"]
    input_len: Range
    output_len: Range


class LognormalLengths(_Dataset):
    kind: Literal["lognormal"]
    input_len: Lognormal
    output_len: Lognormal


class Part(Strict):
    weight: PositiveNumber
    input_len: Positive
    output_len: Positive


class Mixed(_Dataset):
    kind: Literal["mixed"]
    parts: Annotated[list[Part], Field(min_length=1)]


class Trace(_Dataset):
    kind: Literal["trace"]
    file: str
    format: Literal["azure", "burstgpt", "mooncake"]
    rate_scale: PositiveNumber = 1.0
    clip: Positive | None = None


def _with_kind(value: Any) -> Any:
    return {"kind": "fixed", **value} if isinstance(value, dict) else value


Dataset = Annotated[
    Annotated[Fixed | Uniform | LognormalLengths | Mixed | Trace, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]


class Arrival(Strict):
    kind: Literal["infinite", "constant", "poisson", "gamma", "ramp", "closed", "trace"]
    burstiness: PositiveNumber | None = None
    to: PositiveNumber | None = None
    concurrency: Positive | None = None

    @model_validator(mode="after")
    def _complete(self) -> "Arrival":
        needs = {"gamma": "burstiness", "ramp": "to", "closed": "concurrency"}
        for kind, key in needs.items():
            given = getattr(self, key) is not None
            if given != (self.kind == kind):
                raise ValueError(f"`{key}` {'belongs to' if given else 'is needed by'} kind `{kind}`")
        return self


class TokenRule(Strict):
    """A token budget that follows the load (engines/token_rule.py). It starts at the cell's max_num_tokens."""

    waiting_above: Annotated[int, Field(ge=0, strict=True)]
    grow: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    most: Positive
    kv_use_above: Annotated[float, Field(gt=0, le=1)]
    shrink: Annotated[float, Field(gt=0, lt=1)]
    every_s: PositiveNumber


class NumRequests(Strict):
    """How many requests a cell sends, but at least min and at most max.

    `waves` times the batch size; at a finite rate what arrives in `seconds`, where that is given.
    """

    waves: PositiveNumber
    seconds: PositiveNumber | None = None
    min: Positive
    max: Positive

    @model_validator(mode="before")
    @classmethod
    def _from_int(cls, value: Any) -> Any:
        return {"waves": 1, "min": value, "max": value} if isinstance(value, int) else value

    def of(self, max_batch_size: int, request_rate: float = math.inf) -> int:
        timed = self.seconds is not None and math.isfinite(request_rate)
        wanted = request_rate * self.seconds if timed else self.waves * max_batch_size
        return min(self.max, max(self.min, round(wanted)))


class Sweep(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    question: str = ""
    engines: list[str] | None = None
    datasets: list[str] | None = None
    max_batch_size: Annotated[list[Positive], BeforeValidator(_as_list)] | None = None
    max_num_tokens: Annotated[list[Positive], BeforeValidator(_as_list)] | None = None
    combine: Literal["cross", "grid"] = "cross"
    request_rate: Annotated[list[Rate], BeforeValidator(_as_list)] = Field(default=[math.inf], min_length=1)
    arrival: Arrival | None = None
    transport: Literal["http", "inprocess", "simulated"] = "http"
    repeats: Positive | None = None
    num_requests: NumRequests | None = None
    model: str | None = None
    token_rule: TokenRule | None = None
    engine_options: EngineOptions | None = None

    @property
    def varies_a_limit(self) -> bool:
        return len(self.max_batch_size or ()) > 1 or len(self.max_num_tokens or ()) > 1


class Scenario(Strict):
    """A validated scenario. `name` and `path` come from the file, the rest from its keys."""

    name: str
    path: Path
    title: str
    question: str = ""
    hardware: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    model: str
    engines: Annotated[dict[str, EngineSpec], Field(min_length=1)]
    datasets: Annotated[dict[str, Dataset], Field(min_length=1)]
    defaults: Limits
    num_requests: NumRequests
    sweeps: Annotated[list[Sweep], Field(min_length=1)]
    repeats: Positive = 3
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    keep_chunks: bool = False
    cell_timeout_s: PositiveNumber = 600.0

    @model_validator(mode="after")
    def _names_exist(self) -> "Scenario":
        for name, spec in self.engines.items():
            if spec.engine and spec.engine not in POLICIES:
                raise ValueError(_unknown(f"engines.{name}.engine", spec.engine, POLICIES))
            if not spec.engine and name not in (*ENGINES, *POLICIES):
                raise ValueError(_unknown("engines", name, dict.fromkeys((*ENGINES, *POLICIES))))
            if fault := spec.fault(name):
                raise ValueError(f"engines.{name}.{fault}")
        seen: set[str] = set()
        for sweep in self.sweeps:
            if sweep.name in seen:
                raise ValueError(f"sweeps: two are named `{sweep.name}`; rename one")
            seen.add(sweep.name)
            for key, known in (("engines", self.engines), ("datasets", self.datasets)):
                for name in getattr(sweep, key) or ():
                    if name not in known:
                        raise ValueError(_unknown(f"sweeps.{sweep.name}.{key}", name, known))
            for name in self.engines_of(sweep) or self.engines:
                if not self.runs(name, sweep.transport):
                    can = POLICIES if sweep.transport == SIMULATED else real_engines(sweep.transport)
                    raise ValueError(
                        f"sweeps.{sweep.name}: engine `{name}` has no transport `{sweep.transport}`; these have it: "
                        f"{', '.join(can)}"
                    )
        return self

    def runs(self, engine: str, transport: str) -> bool:
        """Whether an engine of this scenario can be asked over a transport."""
        spec = self.engines[engine]
        if transport == SIMULATED:
            return (spec.engine or engine) in POLICIES
        return not spec.engine and engine in real_engines(transport)

    def engines_of(self, sweep: Sweep) -> list[str]:
        """The engines that a sweep asks: those it names, else all that its transport can run."""
        return sweep.engines or [name for name in self.engines if self.runs(name, sweep.transport)]


def _unknown(where: str, name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(known)}"
    return f"{where}: unknown name `{name}`; {hint}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would settle silently."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def names(folder: Path | None = None) -> list[str]:
    """The scenarios there are, by name."""
    return sorted(p.stem for p in (folder or paths.SCENARIOS).glob("*.yml"))


def load(name: str | Path) -> Scenario:
    """Read and check a scenario, by name (data/scenarios/NAME.yml) or by path.

    Raises UsageError, one line that names the file, the key and the mend.
    """
    path = Path(name) if str(name).endswith((".yml", ".yaml")) else paths.SCENARIOS / f"{name}.yml"
    if not path.is_file():
        raise UsageError(_unknown(f"scenario {path.name}", str(name), names()))
    try:
        raw = yaml.load(path.read_text(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: holds no keys; copy data/scenarios/cpu.yml to begin with")
    for key in ("name", "path"):
        if key in raw:
            raise UsageError(f"{path}: {key}: unknown key; a scenario's name is its file's name")
    try:
        return Scenario(name=path.stem, path=path, **raw)
    except ValidationError as error:
        raise UsageError(f"{path}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first finding as `key: what is wrong; the mend`."""
    finding = error.errors()[0]
    kinds = ("fixed", "uniform", "lognormal", "mixed", "trace")
    where = ".".join(str(p) for p in finding["loc"] if p not in (*kinds, "constrained-int", "constrained-float"))
    if finding["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(finding["loc"][-1]), _known_keys(), n=1)
        return f"{where}: unknown key" + (f"; did you mean `{close[0]}`?" if close else "; remove it")
    if finding["type"] == "missing":
        return f"{where}: missing; add this key"
    message = finding["msg"].removeprefix("Value error, ")
    value = finding.get("input")
    shown = f" (it is {value!r})" if isinstance(value, str | int | float) else ""
    return f"{where}: {message}{shown}" if where else message


def _known_keys() -> set[str]:
    plain = (Scenario, Sweep, EngineSpec, NumRequests, TokenRule, Limits, Arrival)
    return {key for model in (*plain, Fixed, Trace, Mixed, Part, Lognormal) for key in model.model_fields}
