"""TGI, from `text-generation-launcher` or its container, versions 2 and 3.

Never run by us: its image cannot be had where we work. It is written after its sources, and proved against a stand-in
that follows them. TGI is in maintenance mode since December 2025.

`max_batch_size` is --max-batch-size; `max_num_tokens` is --max-batch-prefill-tokens: a prefill runs alone and pauses
decoding. Both take a new start. What it makes hard:

* Version 3 prefills in chunks, and then --max-batch-size does not hold back those who join a running batch. So
  PREFILL_CHUNKING=0 is set, and a cell with it on is invalid.
* --max-batch-total-tokens is ignored for flash models: the memory that warm-up found decides, and is recorded.
* It takes text only, has no dummy weights and no `ignore_eos`: prompts come from the model's own tokenizer, random
  weights are written to disk such that no special token is ever the likeliest (weights.py), and lengths are checked.
* More than --max-concurrent-requests are refused, not queued, so that limit is set out of reach.
* A stream has status 200 even where it brings an error; the client reads that.
* It does not tell its iterations: the running batch is a gauge, polled.
"""

import os
import re
import shutil
from collections.abc import Callable
from typing import Any, ClassVar

from batchlab import models
from batchlab.client import Replay, Target
from batchlab.engines import polling, runtime, weights
from batchlab.engines.served import NO_REQUESTS, ServedEngine
from batchlab.engines.tools import ask, flags
from batchlab.engines.trace import Traced
from batchlab.errors import EngineError, UsageError
from batchlab.scenario import EngineSpec, Limits
from batchlab.scrape import Samples

HOW = (
    "set runtime: container in the scenario and docker pull ghcr.io/huggingface/text-generation-inference:3.3.5, or "
    "build the launcher and put it on the PATH (https://huggingface.co/docs/text-generation-inference/installation)"
)
OUT_OF_REACH = 65536  # requests in flight
CHUNKING = (
    "TGI prefills in chunks (PREFILL_CHUNKING), where requests join a running batch beyond --max-batch-size: "
    "take PREFILL_CHUNKING out of engines.tgi.env"
)
_CAPACITY = re.compile(r"[Ss]etting max batch total tokens to (\d+)")


class TgiEngine(ServedEngine):
    """One TGI, started anew for each pair of limits."""

    name = "tgi"
    title = "TGI"
    text_prompts = True
    inner_port = 80
    container_flags = ("--shm-size", "1g")
    known: ClassVar = {
        r"Not enough memory to handle (\d+) prefill tokens": (
            "out of GPU memory: it cannot prefill {0} tokens at once; lower max_num_tokens"
        ),
        r"Not enough memory to handle max_total_tokens=(\d+)": (
            "the KV cache is too small for one request of {0} tokens; lower max_model_len or raise "
            "gpu_memory_utilization"
        ),
        r"CUDA out of memory|OutOfMemoryError": "out of GPU memory",
        r"ArgumentValidation\(\"([^\"]+)\"\)": "{0}",
        r"error: (unexpected argument '[^']+'|invalid value [^\n]+|the argument [^\n]+)": (
            "the launcher says: {0}; correct engines.tgi.args"
        ),
        r"(?:RuntimeError|ValueError|OSError): (.{10,200})": "{0}",
        r"Shard (\d+) failed to start": "its shard {0} failed to start",
        r"Shard cannot start": "its shard cannot start",
        r"Webserver Crashed": "its web server crashed",
        r"[Aa]ddress already in use": "its port was taken while it started",
    }
    _samples: Samples | None = None

    @classmethod
    def find(cls, spec: EngineSpec) -> list[str]:
        if spec.dtype not in (None, "auto", "bfloat16", "float16"):
            raise UsageError(f"engines.tgi.dtype: TGI takes bfloat16 and float16, not {spec.dtype}")
        if spec.runtime == "container":
            runtime.find_image(cls.image(spec))
            return []  # the image's entrypoint is the launcher
        found = shutil.which(os.environ.get("BATCHLAB_TGI_LAUNCHER") or "text-generation-launcher")
        if not found:
            raise UsageError(f"no TGI here: no text-generation-launcher on the PATH; {HOW}")
        return [found]  # whose release is asked for once it answers

    @classmethod
    def image_of(cls, version: str) -> str:
        return f"ghcr.io/huggingface/text-generation-inference:{version}"

    def start(self, limits: Limits, tick: Callable[[float], None] | None = None) -> None:
        """As for every engine; random weights are written first, where there are none yet."""
        if "kv_cache_gib" in self.options:
            raise EngineError(
                "TGI takes no size for its KV cache, its warm-up decides; give it gpu_memory_utilization "
                "(--cuda-memory-fraction) instead of kv_cache_gib"
            )
        self.model = weights.with_weights(self.model)
        super().start(limits, tick)

    def arguments(self, limits: Limits, host: str, port: int) -> list[str]:
        total = self.options.get("max_model_len") or models.shape(str(self.model.path)).max_len
        args: dict[str, Any] = {
            "model-id": self.model.path,
            "hostname": host,
            "port": port,
            "max-batch-size": limits.max_batch_size,
            "max-batch-prefill-tokens": limits.max_num_tokens,
            # a prompt must fit into one prefill, and leave room for a token
            "max-input-tokens": min(total - 1, limits.max_num_tokens),
            "max-total-tokens": total,
            "max-concurrent-requests": OUT_OF_REACH,
            "shard-uds-path": self.work / "shard",
        }
        for key, flag in (
            ("gpu_memory_utilization", "cuda-memory-fraction"),
            ("quantization", "quantize"),
            ("tensor_parallel_size", "num-shard"),
        ):
            if key in self.options:
                args[flag] = self.options[key]
        if self.options.get("dtype", "auto") != "auto" and "quantization" not in self.options:
            args["dtype"] = self.options["dtype"]
        return flags(args | {key.replace("_", "-"): value for key, value in self.options.get("args", {}).items()})

    def environment(self) -> dict[str, str]:
        return {"PREFILL_CHUNKING": "0", "PREFIX_CACHING": "0", "USAGE_STATS": "off"}

    def target(self) -> Target:
        return Target(base_url=self.url, api="tgi", model=self.model.name, prompt_format="text", ignore_eos=False)

    def release(self) -> str | None:
        told = ask(f"{self.url}/info")
        return told.get("version") if isinstance(told, dict) else None

    def learned(self) -> dict[str, Any]:
        """The token budget of a batch, prompts and answers reserved, that warm-up found."""
        found = _CAPACITY.findall(self.log.read_text(errors="replace"))
        if found:
            return {"kv_tokens": int(found[-1])}
        told = re.search(r"^tgi_batch_max_total_tokens (\d+)", str(ask(f"{self.url}/metrics")), re.MULTILINE)
        return {"kv_tokens": int(told[1])} if told else {}

    def chunks(self) -> bool:
        """Whether it prefills in chunks, so that the batch limit does not hold."""
        return self.spec.version >= "3" and self.spec.env.get("PREFILL_CHUNKING", "0").lower() not in ("0", "false")

    def replay(self, *args: Any, **more: Any) -> Replay:
        with polling.polling(f"{self.url}/metrics") as self._samples:
            return super().replay(*args, **more)

    def read(self, t0_ns: int) -> Traced:
        assert self.limits
        reasons = (CHUNKING,) if self.chunks() else ()
        return polling.traced(self._samples, t0_ns, self.limits, (NO_REQUESTS,), reasons=reasons, facts=dict(self.told))
