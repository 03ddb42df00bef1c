"""How a scenario declares an engine: what it is started with, where it runs, and what it is called."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ENGINES = ("vllm", "tensorrt-llm", "tgi", "sglang", "attach")  # real ones, see measure.ENGINES
IN_PROCESS = ("vllm",)  # the real ones that have the transport `inprocess`
POLICIES = ("vllm-v1", "vllm-v0", "tensorrt-llm", "tgi", "sglang", "static")  # simulated ones, see sim.POLICIES
Positive = Annotated[int, Field(gt=0, strict=True)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Refuses a key that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(Strict):
    max_batch_size: Positive
    max_num_tokens: Positive


class EngineOptions(Strict):
    """What an engine is started with, besides the limits of the sweep. Part of a cell's identity."""

    max_model_len: Positive | None = None
    kv_cache_gib: PositiveNumber | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    quantization: str | None = None
    tensor_parallel_size: Positive | None = None
    args: dict[str, str | int | float | bool | None] = {}


class EngineSpec(EngineOptions):
    """An engine of a scenario, under a name of one's own when `engine` says which it is (simulated ones only)."""

    engine: str | None = None
    version: Annotated[str, Field(min_length=1)]
    env: dict[str, str] = {}
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    startup_timeout_s: PositiveNumber = 900.0
    runtime: Literal["local", "container"] = "local"
    image: str | None = None  # of the container, instead of the release's own
    # of an engine that already runs (`attach`)
    base_url: str | None = None
    api: Literal["openai-completions", "openai-chat", "tgi"] | None = None
    served_model_name: str | None = None
    limits: Limits | None = None  # what it was started with: the user's word, which nothing can check

    def fault(self, name: str) -> str | None:
        """What does not fit the engine of this name, as `key: what is wrong; the mend`."""
        attached = {"base_url", "api", "served_model_name", "limits"}
        given = {key for key in (*attached, "image") if getattr(self, key) is not None}
        if name != "attach" and given & attached:
            return f"{min(given & attached)}: belongs to the engine `attach`; remove it"
        if name == "attach":
            for key in ("base_url", "limits"):
                if key not in given:
                    return f"{key}: missing; say where the engine runs (base_url) and its limits as it was started"
            if self.runtime == "container" or "image" in given:
                return "runtime: `attach` starts nothing; remove runtime and image"
        if name == "vllm" and self.runtime == "container":
            return "runtime: vllm runs in a Python of its own (its scheduler is ours); remove it"
        if "image" in given and self.runtime != "container":
            return "image: belongs to runtime `container`; add `runtime: container` or remove it"
        return None

    def options(self, override: EngineOptions | None = None) -> dict[str, Any]:
        """The identity-relevant options, without those left at their default."""
        merged = {k: v for k, v in self.model_dump().items() if k in EngineOptions.model_fields}
        for key, value in (override.model_dump(exclude_unset=True) if override else {}).items():
            merged[key] = {**merged[key], **value} if key == "args" else value
        return {k: v for k, v in merged.items() if v not in (None, {})}


def real_engines(transport: str) -> tuple[str, ...]:
    """The real engines that a transport can reach."""
    return IN_PROCESS if transport == "inprocess" else ENGINES
