"""SGLang, from a Python of its own or its container, over HTTP. Flags and log lines as of 0.5.13.

`max_batch_size` is --max-running-requests; `max_num_tokens` bounds a prefill batch (--chunked-prefill-size and
--max-prefill-tokens): a prefill iteration runs alone and pauses decoding, unless `args` has enable-mixed-chunk. The
batch limit changes while it runs (/set_internal_state with pp_max_micro_batch_size), the token limit needs a new start.
With its radix cache off and `ignore_eos` requests, SGLang admits a request only when memory for all of its output is
left.

Its iterations come from its log: --decode-log-interval 1 makes a line of each, SGLANG_LOG_MS gives them milliseconds.
"""

import re
from calendar import timegm
from time import strptime
from typing import Any, ClassVar

from batchlab import models
from batchlab.cell import WARM_LIMITS
from batchlab.engines import runtime
from batchlab.engines.served import NO_REQUESTS, ServedEngine
from batchlab.engines.tools import ask, flags, from_wall, python_with
from batchlab.engines.trace import Traced
from batchlab.scenario import EngineSpec, Limits

VARIABLE = "BATCHLAB_SGLANG_PYTHON"
HOW = (
    "python3 -m venv ~/sglang && ~/sglang/bin/pip install sglang==0.5.13, then export "
    f"{VARIABLE}=~/sglang/bin/python (https://docs.sglang.ai/get_started/install.html), or set runtime: container"
)
_STAMP = r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{3}))?[^\]]*\] "
_BATCH = re.compile(_STAMP + r"(Prefill|Decode) batch\b(.*)$")
_FIELD = re.compile(r"#?([a-z][\w -]*?(?: \(token/s\))?): (-?[\d.]+|True|False)", re.IGNORECASE)
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_SIZES = re.compile(
    r"max_total_num_tokens=(\d+), chunked_prefill_size=(-?\d+), max_prefill_tokens=(\d+), max_running_requests=(\d+)"
)


class SglangEngine(ServedEngine):
    """One SGLang server, warm in its batch limit."""

    name = "sglang"
    title = "SGLang"
    warm_limits = WARM_LIMITS["sglang"]
    inner_port = 30000
    highest_port = 55535  # it keeps the port 10,000 above for gRPC, and refuses to start where that is none (0.5.13)
    container_flags = ("--shm-size", "32g")
    largest: Limits | None = None  # what a release without warm limits was first started with
    known: ClassVar = {
        r"Not enough memory\. Please try to increase --mem-fraction-static": (
            "no memory is left for the KV cache; raise gpu_memory_utilization (--mem-fraction-static)"
        ),
        r"Capture cuda graph failed: (.{5,160})": "its CUDA graphs could not be captured: {0}",
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory": "out of GPU memory",
        r"[Uu]nrecognized arguments: (.+)": "this SGLang does not know {0}; correct engines.sglang.args",
        r"address already in use": "its port was taken while it started",
        r"No module named '?(sglang[\w.]*)": "its Python holds no {0}",
        r"Scheduler hit an exception: (?:.*\n)*?(\w+(?:Error|Exception): .{3,200})": "{0}",
        r"(?:ValueError|RuntimeError|OSError): (.{10,200})": "{0}",
        r"Rank (\d+) scheduler is dead": "its scheduler (rank {0}) died",
    }

    @classmethod
    def find(cls, spec: EngineSpec) -> list[str]:
        if spec.runtime == "container":
            runtime.find_image(cls.image(spec))
            return ["python3", "-m", "sglang.launch_server"]
        return [str(python_with(VARIABLE, cls.title, "sglang", spec.version, HOW)), "-m", "sglang.launch_server"]

    @classmethod
    def image_of(cls, version: str) -> str:
        return f"lmsysorg/sglang:v{version}"

    def arguments(self, limits: Limits, host: str, port: int) -> list[str]:
        args: dict[str, Any] = {
            "model-path": str(self.model.path),
            "served-model-name": self.model.name,
            "host": host,
            "port": port,
            "max-running-requests": limits.max_batch_size,
            "chunked-prefill-size": limits.max_num_tokens,
            "max-prefill-tokens": limits.max_num_tokens,
            "disable-radix-cache": True,
            # graphs for every batch of the sweep: the default stops at 256 on one GPU
            "cuda-graph-max-bs": limits.max_batch_size,
            "decode-log-interval": 1,
            "stream-interval": 1,
            "sampling-defaults": "openai",
            "random-seed": 0,
            "enable-cache-report": True,
            "log-level-http": "warning",
        }
        if self.model.is_random:
            args["load-format"] = "dummy"
            # the model's own length, said aloud: only then does 0.5.13 keep its warm-up of prefill graphs, as long as a
            # chunk, within the positions that the model has; past them cuBLAS fails (SGLang's issue 21112)
            args["context-length"] = models.shape(self.model.name).max_len
        for key, flag in (
            ("max_model_len", "context-length"),
            ("gpu_memory_utilization", "mem-fraction-static"),
            ("dtype", "dtype"),
            ("quantization", "quantization"),
            ("tensor_parallel_size", "tp-size"),
        ):
            if key in self.options:
                args[flag] = self.options[key]
        if "kv_cache_gib" in self.options:
            shape = models.shape(self.model.name if self.model.is_random else str(self.model.path))
            args["max-total-tokens"] = int(self.options["kv_cache_gib"] * 2**30 // shape.kv_bytes_per_token)
        return flags(args | {key.replace("_", "-"): value for key, value in self.options.get("args", {}).items()})

    def environment(self) -> dict[str, str]:
        return {
            "SGLANG_LOG_MS": "1",
            "TZ": "UTC",  # its lines' times are local ones
            # a health check would otherwise generate a token, and take a second
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }

    def release(self) -> str | None:
        told = self._info()
        return told.get("version")

    def _info(self) -> dict[str, Any]:
        for path in ("/server_info", "/get_server_info"):  # the name of before 0.5.5
            told = ask(f"{self.url}{path}")
            if isinstance(told, dict):
                return told
        return {}

    def reconfigure(self, limits: Limits) -> None:
        """A lower batch limit at once; another token limit is a ValueError."""
        assert self.started_with and self.limits
        if limits == self.limits:
            return
        most = self.largest or self.started_with
        if limits.max_num_tokens != most.max_num_tokens or limits.max_batch_size > most.max_batch_size:
            raise ValueError(f"SGLang was started with {most} and cannot go on with {limits}")
        if self.largest:
            self.start(limits)
            return
        wanted = limits.max_batch_size
        ask(f"{self.url}/set_internal_state", {"server_args": {"pp_max_micro_batch_size": wanted}})
        # its answer is `true` even for a value that it refuses
        states = self._info().get("internal_states") or [{}]
        if states[0].get("pp_max_micro_batch_size") != wanted:
            self.largest = self.started_with
            self.start(limits)  # a release that cannot: the slow way, from now on
        self.limits = limits

    def learned(self) -> dict[str, Any]:
        found = _SIZES.search(self.log.read_text(errors="replace"))
        if not found:
            return {}
        names = ("kv_tokens", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests")
        return dict(zip(names, map(int, found.groups()), strict=True))

    def read(self, t0_ns: int) -> Traced:
        assert self.limits and self.started_with
        batch, tokens = self.limits.max_batch_size, self.limits.max_num_tokens
        if self.told:
            tokens = min(self.told["chunked_prefill_size"], self.told["max_prefill_tokens"])
            if self.limits == self.started_with:
                batch = self.told["max_running_requests"]
        rows = iterations(
            self.lines(),
            t0_ns,
            limits=(batch, tokens),
            kv_tokens=self.told.get("kv_tokens"),
            mixed=bool(self.options.get("args", {}).get("enable-mixed-chunk")),
        )
        return Traced(rows, {}, [(batch, tokens)], source="log", unchecked=(NO_REQUESTS,))


def iterations(
    lines: list[str], t0_ns: int, *, limits: tuple[int, int], kv_tokens: int | None, mixed: bool = False
) -> list[dict]:
    """Rows for ITERATIONS from SGLang's log lines, in UTC.

    A line is written when its iteration's result is there. An iteration is taken to begin with the end of the one
    before it, the first with its own end. Decoding requests that a prefill iteration leaves waiting are not `running`
    in it; `admitted` counts them. limits: in force. kv_tokens: what the KV cache holds. mixed: prefill iterations
    decode too (--enable-mixed-chunk).
    """
    rows, before, retracted = [], None, 0
    for line in lines:
        if found := _RETRACTED.search(line):
            retracted += int(found[1])
        found = _BATCH.search(line)
        if not found:
            continue
        day, millis, kind, rest = found.groups()
        at = from_wall(timegm(strptime(day, "%Y-%m-%d %H:%M:%S")) + int(millis or 0) / 1e3, t0_ns)
        told = {key.lower(): value for key, value in _FIELD.findall(rest)}
        decoding, new = int(told["running-req"]), int(told.get("new-seq", 0))
        prefill = kind == "Prefill"
        together = decoding if mixed or not prefill else 0
        used = float(told["token usage"]) if "token usage" in told else None
        if "token" in told and kv_tokens:
            used = int(told["token"]) / kv_tokens
        rows.append(
            {
                "scheduled_s": at if before is None else before,
                "output_s": at,
                "running": new + together,
                "admitted": new + decoding,
                "waiting": int(told.get("queue-req", 0)),
                "prefill_tokens": int(told.get("new-token", 0)),
                "decode_tokens": together,
                "kv_use": used,
                "preemptions": retracted,
                "max_batch_size": limits[0],
                "max_num_tokens": limits[1],
            }
        )
        before, retracted = at, 0
    return rows
