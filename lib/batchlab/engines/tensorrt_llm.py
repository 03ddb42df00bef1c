"""TensorRT-LLM (`trtllm-serve`, 1.0 and later, PyTorch backend), from a Python of its own or NVIDIA's container.

Never run by us: no machine of ours can install it. It is written after its sources, and proved against a stand-in that
follows them. `max_batch_size` and `max_num_tokens` are its own names; both take a new start.

What it is started with goes into one YAML file, but for the limits and addresses, which are flags; no key is in both,
because which of the two wins changed between releases. Block reuse is off, and CUDA graphs are captured up to the batch
limit (they stop at 128 otherwise). A key of the scenario's `args` goes into the YAML; dots nest it
(`scheduler_config.capacity_scheduler_policy: MAX_UTILIZATION`). Context chunking is off, as is TensorRT-LLM's default,
so a prompt must fit into max_num_tokens.
"""

import os
import shutil
import time
from typing import Any, ClassVar

import yaml

from batchlab import models
from batchlab.client import Replay
from batchlab.engines import runtime, tensorrt_llm_log
from batchlab.engines.served import NO_REQUESTS, ServedEngine
from batchlab.engines.tools import ask, flags, python_with
from batchlab.engines.trace import Traced
from batchlab.errors import UsageError
from batchlab.scenario import EngineSpec, Limits

VARIABLE = "BATCHLAB_TENSORRT_LLM_PYTHON"
HOW = (
    "runtime: container in the scenario (docker pull nvcr.io/nvidia/tensorrt-llm/release:1.2.1), or a Python 3.12 of "
    "its own: python3.12 -m venv ~/trtllm && ~/trtllm/bin/pip install --extra-index-url https://pypi.nvidia.com "
    f"tensorrt-llm==1.2.1, then export {VARIABLE}=~/trtllm/bin/python "
    "(https://nvidia.github.io/TensorRT-LLM/installation/linux.html)"
)
# set from the limits or as flags, so never by `args`
OURS = ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size", "model", "backend")
METRICS_S = 20.0  # a read of /metrics: up to 1.2 it ends only after two seconds without news
NO_QUEUE = "how many requests waited and were paused: its /metrics gave nothing"


class TensorRtLlmEngine(ServedEngine):
    """One trtllm-serve, started anew for each pair of limits."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    _since = 0.0  # when the last replay began, seconds since 1970
    container_flags = ("--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
    known: ClassVar = {
        r"No GPU devices found on the node": "it sees no GPU",
        r"Failed to bind socket to": "its port was taken while it started",
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory": "out of GPU memory",
        r"No such option: (\S+)": "this trtllm-serve has no option {0}",
        r"([\w.]+)\n\s+Extra inputs are not permitted": (
            "this TensorRT-LLM does not know the key {0}; correct engines.tensorrt-llm.args"
        ),
        r"([\w.]+)\n\s+(Input should be [^\[\n]+)": "key {0}: {1}; correct engines.tensorrt-llm.args",
        r"max_num_tokens \((\d+)\) (?:should be|must be)[^\n]*": "max_num_tokens {0} is too small",
        r"(?:ValueError|RuntimeError|OSError): (?!Executor worker)(.{10,200})": "{0}",
        r"Executor worker died during initialization": "its executor died while it loaded",
        r"Executor worker returned error": "its executor failed",
    }

    @classmethod
    def find(cls, spec: EngineSpec) -> list[str]:
        for key in spec.args:
            _nest({}, key, None)
        if spec.runtime == "container":
            runtime.find_image(cls.image(spec))
            return ["trtllm-serve"]
        if not os.environ.get(VARIABLE):
            found = shutil.which("trtllm-serve")
            if not found:
                raise UsageError(f"no TensorRT-LLM here: {VARIABLE} is not set and no trtllm-serve on the PATH; {HOW}")
            return [found]  # whose release is asked for once it answers
        python = python_with(VARIABLE, cls.title, "tensorrt_llm", spec.version, HOW)
        serve = python.parent / "trtllm-serve"
        if not serve.exists():
            raise UsageError(f"{VARIABLE}: no trtllm-serve beside {python}; install tensorrt-llm there again")
        return [str(serve)]

    @classmethod
    def image_of(cls, version: str) -> str:
        return f"nvcr.io/nvidia/tensorrt-llm/release:{version}"

    def arguments(self, limits: Limits, host: str, port: int) -> list[str]:
        file = self.work / "trtllm.yml"
        file.write_text(yaml.safe_dump(self.yaml(limits), sort_keys=False))
        values = {
            "host": host,
            "port": port,
            "log_level": "info",
            "max_batch_size": limits.max_batch_size,
            "max_num_tokens": limits.max_num_tokens,
            "max_seq_len": self.options.get("max_model_len"),
            "tp_size": self.options.get("tensor_parallel_size"),
            "extra_llm_api_options": file,
        }
        return [str(self.model.path), *flags(values, separator="_")]

    def yaml(self, limits: Limits) -> dict[str, Any]:
        """What goes into the file, nested as TensorRT-LLM's LlmArgs. UsageError for a key that is ours to set."""
        kv: dict[str, Any] = {
            "enable_block_reuse": False,
            # written out: a section in YAML takes the place of the flag's whole section, and so of its fraction
            "free_gpu_memory_fraction": self.options.get("gpu_memory_utilization", 0.9),
        }
        if "kv_cache_gib" in self.options:
            shape = models.shape(self.model.name if self.model.is_random else str(self.model.path))
            kv["max_tokens"] = int(self.options["kv_cache_gib"] * 2**30 // shape.kv_bytes_per_token)
        keys: dict[str, Any] = {
            "print_iter_log": True,
            "enable_iter_perf_stats": True,
            "iter_stats_max_iterations": 200_000,  # of a whole cell: it keeps the last 1000 otherwise
            "kv_cache_config": kv,
            "cuda_graph_config": {"max_batch_size": limits.max_batch_size, "enable_padding": True},
            # also takes the place of trtllm-serve's own section, which lets the batch size be tuned at run time
            "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        }
        if self.model.is_random:
            keys["load_format"] = "dummy"
        if "dtype" in self.options:
            keys["dtype"] = self.options["dtype"]
        if "quantization" in self.options:
            keys["quant_config"] = {"quant_algo": self.options["quantization"].upper()}
        for key, value in self.options.get("args", {}).items():
            _nest(keys, key.replace("-", "_"), value)
        return keys

    def environment(self) -> dict[str, str]:
        return {"TZ": "UTC"}  # its lines' times are local ones

    def release(self) -> str | None:
        told = ask(f"{self.url}/version")
        return told.get("version") if isinstance(told, dict) else None

    def learned(self) -> dict[str, Any]:
        file = self.work / "trtllm.yml"
        return {"yaml": yaml.safe_load(file.read_text()) if file.exists() else None}

    def replay(self, *args: Any, **more: Any) -> Replay:
        self._since = time.time()
        return super().replay(*args, **more)

    def read(self, t0_ns: int) -> Traced:
        assert self.limits
        stats = ask(f"{self.url}/metrics", timeout_s=METRICS_S)
        stats = [s for s in stats if isinstance(s, dict) and "iter" in s] if isinstance(stats, list) else []
        steps = tensorrt_llm_log.steps(self.lines())
        limits = (self.limits.max_batch_size, self.limits.max_num_tokens)
        rows = tensorrt_llm_log.rows(steps, stats, t0_ns, limits, self._since)
        unchecked = (NO_REQUESTS,) if stats else (NO_REQUESTS, NO_QUEUE)
        source = "log" if steps else "metrics" if rows else "none"
        return Traced(rows, {}, [limits], source=source, unchecked=unchecked)


def _nest(keys: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key of `args`; its dots are levels of the YAML."""
    first, *rest = dotted.split(".")
    if first in OURS:
        raise UsageError(
            f"engines.tensorrt-llm.args.{dotted}: set by the sweep's limits or a key of the engine itself "
            "(max_model_len, tensor_parallel_size); remove it"
        )
    if not rest:
        keys[first] = value
        return
    section = keys.setdefault(first, {})
    for part in rest[:-1]:
        section = section.setdefault(part, {})
    section[rest[-1]] = value
