"""vLLM, CPU and CUDA builds, over HTTP or in process."""

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from batchlab.cell import WARM_LIMITS
from batchlab.client import Replay, Target, replay
from batchlab.engines import inprocess, process, weights
from batchlab.engines.token_rule import adjusting
from batchlab.engines.trace import Traced, TraceReader, set_limits
from batchlab.engines.vllm_install import KNOWN_FAILURES, environment, is_cpu, python_for
from batchlab.errors import EngineError
from batchlab.models import ModelFiles
from batchlab.scenario import EngineSpec, Limits
from batchlab.workload import Workload


class VllmEngine:
    """One warm vLLM. Start it with the largest limits of the sweep; `reconfigure` lowers them while it runs."""

    name = "vllm"
    warm_limits = WARM_LIMITS["vllm"]
    text_prompts = False

    @staticmethod
    def find(spec: EngineSpec) -> Path:
        """The Python that holds this vLLM; UsageError when there is none."""
        return python_for(spec.version)

    def __init__(
        self, spec: EngineSpec, options: dict[str, Any], model: ModelFiles, transport: str, *, log: Path
    ) -> None:
        self.spec, self.options, self.model, self.transport, self.log = spec, options, model, transport, log
        # Weights from a file (args: {load_format: safetensors}) for a model that has none: the check that they
        # do not matter to speed, since dummy ones are a thousandth in size and a model's are not.
        if self.options.get("args", {}).get("load_format", "dummy") != "dummy":
            self.model = weights.with_weights(model)
        self.python = python_for(spec.version)
        self.limits: Limits | None = None
        self.started_with: Limits | None = None
        self.start_s = 0.0
        self.attention: str | None = None
        self.process: process.EngineProcess | None = None
        self._work: Path | None = None
        self._connection: Connection | None = None
        self._port = 0

    # life ----------------------------------------------------------------------------------------------------------
    def start(self, limits: Limits, tick: Callable[[float], None] | None = None) -> None:
        """Launch and wait until it answers. EngineError with the reason and its own last lines otherwise."""
        self._work = Path(tempfile.mkdtemp(prefix="batchlab-"))
        self.reader = TraceReader(self._work / "trace.csv")
        set_limits(self._work / "control.json", limits)
        env = {
            "BATCHLAB_TRACE": str(self.reader.path),
            "BATCHLAB_CONTROL": str(self._work / "control.json"),
            "VLLM_LOGGING_LEVEL": "INFO",
            **self._device_environment(),
            **self.spec.env,
        }
        if self.transport == "http":
            self._port = process.free_port(self.spec.port)
            command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *self._flags(limits)]
            ready = self._http_ready
        else:
            self._socket = str(self._work / "jobs.sock")
            self._authkey = secrets.token_bytes(32)
            env["BATCHLAB_AUTHKEY"] = self._authkey.hex()
            command = [
                str(self.python),
                "-m",
                "batchlab.engines.vllm_inprocess",
                self._socket,
                json.dumps(self.arguments(limits)),
            ]
            ready = Path(self._socket).exists
        self.command = command
        self.process = process.launch(command, env=environment(env), log=self.log)
        try:
            self.start_s = process.wait_ready(
                self.process, ready, timeout_s=self.spec.startup_timeout_s, known=KNOWN_FAILURES, name="vLLM", tick=tick
            )
            if self.transport == "inprocess":
                self._connection = Client(self._socket, family="AF_UNIX", authkey=self._authkey)
        except BaseException:
            self.stop()
            raise
        self.limits = self.started_with = limits
        self.attention = self.reader.attention()

    def _http_ready(self) -> bool:
        assert self.process
        if not process.healthy(f"http://127.0.0.1:{self._port}/health"):
            return False
        if not process.owns_port(self.process, self._port):
            raise EngineError(
                f"port {self._port} is answered by a process that is not ours; choose another `port` or drop it",
                self.process.tail(),
            )
        return True

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def stop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self.process:
            self.process.stop()
        if self._work:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

    # arguments -----------------------------------------------------------------------------------------------------
    def arguments(self, limits: Limits) -> dict[str, Any]:
        """vLLM's engine arguments by their Python names."""
        args: dict[str, Any] = {
            "model": str(self.model.path),
            "served_model_name": self.model.name,
            "max_num_seqs": limits.max_batch_size,
            "max_num_batched_tokens": limits.max_num_tokens,
            "enable_prefix_caching": False,
            "generation_config": "vllm",
            "scheduler_cls": "batchlab.engines.vllm_trace.TracingScheduler",
        }
        if self.model.is_random:
            args["load_format"] = "dummy"
        if self.transport == "inprocess":
            args["skip_tokenizer_init"] = True
        if "kv_cache_gib" in self.options and not is_cpu(self.python):
            args["kv_cache_memory_bytes"] = round(self.options["kv_cache_gib"] * 2**30)
        elif "kv_cache_gib" in self.options:
            # the KV cache's size is given, and vLLM would still refuse a machine without 92% of its memory free
            args["gpu_memory_utilization"] = 0.2
        for key in ("max_model_len", "gpu_memory_utilization", "dtype", "quantization", "tensor_parallel_size"):
            if key in self.options:
                args[key] = self.options[key]
        return args | {k.replace("-", "_"): v for k, v in self.options.get("args", {}).items()}

    def _flags(self, limits: Limits) -> list[str]:
        flags = ["--host", "127.0.0.1", "--port", str(self._port), "--disable-uvicorn-access-log"]
        for key, value in self.arguments(limits).items():
            flag = key.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                flags += [f"--{flag}", str(value)]
        return flags

    def _device_environment(self) -> dict[str, str]:
        if not is_cpu(self.python):
            return {}
        space = (
            {"VLLM_CPU_KVCACHE_SPACE": str(max(1, round(self.options["kv_cache_gib"])))}
            if "kv_cache_gib" in self.options
            else {}
        )
        # A core (an eighth of many) stays with the server and the client, whom the engine's spinning would hold up.
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) == 1:
            return space
        reserved = max(1, len(cores) // 8)
        engine_cores = ",".join(str(core) for core in cores[: len(cores) - reserved])
        return {**space, "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved), "BATCHLAB_CORES": engine_cores}

    # measuring -----------------------------------------------------------------------------------------------------
    def reconfigure(self, limits: Limits) -> None:
        """New limits for the requests to come. Call it while nothing runs."""
        assert self._work and self.started_with
        if (
            limits.max_batch_size > self.started_with.max_batch_size
            or limits.max_num_tokens > self.started_with.max_num_tokens
        ):
            raise ValueError(f"{limits} is above the limits this engine was started with, {self.started_with}")
        set_limits(self._work / "control.json", limits)
        self.limits = limits

    def replay(
        self,
        workload: Workload,
        *,
        timeout_s: float,
        keep_chunks: bool,
        progress: Callable[[int, int], None] | None = None,
        token_rule: dict[str, Any] | None = None,
    ) -> Replay:
        """Send a workload and wait for all of it. EngineError when the engine dies under it.

        `token_rule` moves the token budget meanwhile (engines/token_rule.py); the limits are back afterwards.
        """
        self.reader.mark()
        assert self._work and self.limits
        moving = (
            adjusting(self.reader.path, self._work / "control.json", self.limits, token_rule)
            if token_rule
            else nullcontext()
        )
        with moving:
            return self._replay(workload, timeout_s, keep_chunks, progress)

    def _replay(
        self,
        workload: Workload,
        timeout_s: float,
        keep_chunks: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Replay:
        try:
            if self.transport == "http":
                result = replay(
                    self.target(),
                    workload,
                    timeout_s=timeout_s,
                    keep_chunks=keep_chunks,
                    streams=self.limits.max_batch_size,
                    progress=progress,
                )
            else:
                assert self._connection
                result = inprocess.replay(
                    self._connection, workload, timeout_s=timeout_s, keep_chunks=keep_chunks, progress=progress
                )
        except (EOFError, OSError) as error:
            raise self.failure(str(error) or "it closed the connection") from None
        if not self.alive():
            raise self.failure("it exited")
        return result

    def failure(self, what: str) -> EngineError:
        assert self.process
        time.sleep(0.5)  # let a dying process finish its last lines
        reason = self.process.search_log(KNOWN_FAILURES) or what
        return EngineError(f"vLLM died while measuring: {reason}", self.process.tail())

    def target(self) -> Target:
        return Target(
            base_url=f"http://127.0.0.1:{self._port}",
            api="openai-completions",
            model=self.model.name,
            prompt_format="ids",
            ignore_eos=True,
            continuous_usage=True,
        )

    def take_trace(self, t0_ns: int, finished: int) -> Traced:
        """The engine's own account of the last replay, once its requests have left it (5 s at most)."""
        self.reader.wait_finished(finished, 5.0)
        return self.reader.take(t0_ns)

    def describe(self) -> dict[str, Any]:
        """For the provenance: what was started, with what, and how long that took."""
        return {
            "name": self.name,
            "version": self.spec.version,
            "arguments": self.arguments(self.started_with or self.limits),
            "environment": {**self._device_environment(), **self.spec.env},
            "start_s": round(self.start_s, 1),
            "attention": self.attention,
            "started_with": self.started_with.model_dump() if self.started_with else None,
            "model": {"name": self.model.name, "random_weights": self.model.is_random},
        }
