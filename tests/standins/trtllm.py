"""A stand-in for `trtllm-serve`, TensorRT-LLM 1.0 and later with the PyTorch backend.

    python -m standins.trtllm VERSION [serve] MODEL [--host ...]

What differs by version: flags and keys (trtllm_args.py), the iteration log's format (trtllm_reports.py), a new id in
every chunk (1.0), the shape of the 400 body (1.1 has the other), what GET /metrics does, 503 while loading (1.4).
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from typing import Any

from standins import common, faults, trtllm_args, trtllm_reports
from standins.engine import Engine, Iteration, Speed
from standins.http import Request, Server
from standins.stream import Answer
from standins.trtllm_reports import say

KV_TOKENS = 200_000  # of a card that holds nothing else
QUIET_S = 2.0  # what GET /metrics waits for in 1.0 to 1.2
FIELDS = """
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user lora_request use_beam_search top_k top_p_min min_p repetition_penalty
length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens return_context_logits detokenize add_special_tokens
response_format disaggregated_params
"""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.43 GiB is free. Including non-PyTorch memory, this process has 77.67 GiB memory in use."
)


class TrtLlm:
    """The server. `stats` holds what /metrics has not given away yet."""

    def __init__(self, options: trtllm_args.Options, release: str, fault: faults.Faults) -> None:
        self.options, self.fault, self.release = options, fault, release
        self.version = trtllm_args.number(release)
        get = options.get
        self.max_seq_len = get("max_seq_len") or common.config(options.model)["max_position_embeddings"]
        self.max_num_tokens = get("max_num_tokens", 8192)
        self.block_size = get("kv_cache_config.tokens_per_block", 32)
        self.chunking = get("enable_chunked_prefill", False)
        fraction = get("kv_cache_config.free_gpu_memory_fraction", 0.9)
        kv_tokens = min(int(KV_TOKENS * fraction), get("kv_cache_config.max_tokens", 1 << 40))
        self.blocks = kv_tokens // self.block_size
        self.cache = common.PrefixCache(self.block_size, get("kv_cache_config.enable_block_reuse", True))
        self.stats: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.serial = itertools.count(7)
        self.completed = 0
        self.last_ended: float | None = None
        self.device_ms: float | None = None  # of the last iteration
        self.loading = True
        self.engine = Engine(
            "tensorrt-llm",
            max_batch_size=get("max_batch_size", 2048),
            max_num_tokens=self.max_num_tokens,
            kv_tokens=kv_tokens,
            block_size=self.block_size,
            options={
                "capacity_scheduler_policy": get("scheduler_config.capacity_scheduler_policy", "GUARANTEED_NO_EVICT"),
                "enable_chunked_context": self.chunking,
                "overlap_scheduler": not get("disable_overlap_scheduler", False),
            },
            speed=Speed(step_ms=3.0),
            tell=self.iterated,
        )

    def iterated(self, it: Iteration) -> None:
        self.completed += it.ended_requests
        # measured from the end of the one before, so that it holds the wait of an idle engine too
        host_ms = 1e3 * (it.ended - (self.last_ended or it.started))
        if self.options.get("print_iter_log"):
            trtllm_reports.log(self.version, it, host_ms, self.device_ms)
        self.last_ended, self.device_ms = it.ended, 950 * (it.ended - it.started)
        if self.options.get("enable_iter_perf_stats"):
            self.stats.append(trtllm_reports.stat(self.version, it, self.blocks, self.block_size, self.completed))
            self.news.set()

    async def metrics(self, request: Request) -> None:
        """Drained by the read, in one of three ways."""
        if (1, 2) <= self.version < (1, 3) and self.options.get("return_perf_metrics"):
            self.stats.clear()  # the collector of Prometheus took them first
        elif self.version < (1, 3):
            with contextlib.suppress(TimeoutError):
                while True:
                    self.news.clear()
                    await asyncio.wait_for(self.news.wait(), QUIET_S)
        taken, self.stats = self.stats, []
        request.reply(200, taken)

    # requests ----------------------------------------------------------------------------------------------------
    def guard(self, request: Request) -> None:
        """Every route while loading, in versions that answer then."""
        if self.loading:
            error = {
                "message": "The server is still initializing. Please retry after a few seconds.",
                "type": "ServiceUnavailableError",
                "code": "starting",
            }
            request.reply(503, {"error": error}, {"retry-after": "1", "x-trtllm-server-state": "starting"})

    def refuse(self, request: Request, message: str, *, validation: bool) -> None:
        body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
        request.reply(400, {"error": message} if validation and self.version != (1, 1) else body)

    async def completions(self, request: Request) -> None:
        try:
            body = request.json()
        except ValueError:
            body = None
        strikes = self.fault.strikes()
        if problem := self._problem(body):
            self.refuse(request, problem, validation=True)
            return
        prompt_len = common.count(body["prompt"])
        if not self.chunking and prompt_len > self.max_num_tokens:
            message = f"The sum of prompt length ({float(prompt_len)}), query length (0) should not exceed "
            self.refuse(request, f"{message}max_num_tokens ({self.max_num_tokens})", validation=False)
            return
        if prompt_len >= self.max_seq_len:
            message = f"The prompt length ({prompt_len}) exceeds max_seq_len ({self.max_seq_len})"
            self.refuse(request, message, validation=False)
            return
        output = min(body.get("max_tokens") or 16, self.max_seq_len - prompt_len)  # cut without a word
        fault = self.fault if strikes else faults.NONE
        output = min(output, int(fault.number("clamp") or output))
        stop = fault.number("stop-early")
        answer = self._answer(request, body, prompt_len, int(stop or output), "stop" if stop else "length", fault)
        if refusal := self.engine.submit(prompt_len, answer.output, answer.token):
            self.refuse(request, refusal, validation=False)

    def _problem(self, body: Any) -> str | None:
        if not isinstance(body, dict):
            return "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a valid dictionary'}]"
        for key in ("model", "prompt"):
            if key not in body:
                return f"[{{'type': 'missing', 'loc': ('body', '{key}'), 'msg': 'Field required'}}]"
        refused = self.fault.text("refuse-field")
        inner = {f"stream_options.{key}" for key in body.get("stream_options") or ()}
        known = {*FIELDS.split(), "stream_options.include_usage", "stream_options.continuous_usage_stats"}
        for key in (*body, *inner):
            if key not in known or key == refused:
                where = ", ".join(f"'{part}'" for part in ("body", *key.split(".")))
                return f"[{{'type': 'extra_forbidden', 'loc': ({where}), 'msg': 'Extra inputs are not permitted'}}]"
        if inner and not body.get("stream"):
            return "[{'type': 'value_error', 'loc': ('body',), 'msg': 'Stream options can only be set if stream=True'}]"
        if not body.get("stream"):
            return "stand-in: it streams only"
        return None

    def _answer(
        self, request: Request, body: dict, prompt_len: int, output: int, reason: str, fault: faults.Faults
    ) -> Answer:
        cached, detokenize = self.cache.hit(body["prompt"]), body.get("detokenize", True)
        options = body.get("stream_options")
        final = options is not None and options.get("include_usage", True)
        continuous = options is not None and options.get("continuous_usage_stats", False)
        fixed = f"cmpl-{next(self.serial)}"

        def head() -> dict[str, Any]:
            changes = self.version < (1, 1) or "new-ids" in self.fault
            name = f"cmpl-{next(self.serial)}" if changes else fixed
            return {"id": name, "object": "text_completion", "created": int(time.time()), "model": body["model"]}

        def usage(done: int) -> dict[str, Any]:
            return {
                "prompt_tokens": prompt_len,
                "total_tokens": prompt_len + done,
                "completion_tokens": done,
                "prompt_tokens_details": {"cached_tokens": cached},
            }

        def chunk(many: int, done: int, reason: str | None) -> dict[str, Any]:
            choice = {
                "index": 0,
                "text": " a" * many if detokenize else "",
                "token_ids": None if detokenize else [264] * many,
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
                "avg_decoded_tokens_per_iter": 1.0,
            }
            return head() | {"choices": [choice]} | ({"usage": usage(done)} if continuous else {})

        def tail(done: int) -> list[Any]:
            return [*([head() | {"choices": [], "usage": usage(done)}] if final else []), "[DONE]"]

        merge = int(self.fault.number("merge") or 1)
        return Answer(request, output, reason, fault, chunk=chunk, tail=tail, merge=merge)

    async def health(self, request: Request) -> None:
        request.reply(200)

    async def models(self, request: Request) -> None:
        name = self.options.model.rstrip("/").rsplit("/", 1)[-1]
        request.reply(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "tensorrt_llm"}]})

    async def release_name(self, request: Request) -> None:
        request.reply(200, {"version": self.release})

    async def prometheus(self, request: Request) -> None:
        name = "trtllm_request_success" if self.version >= (1, 2) else "request_success"
        lines = [
            f"# HELP {name}_total Count of successfully processed requests.",
            f"# TYPE {name}_total counter",
            f'{name}_total{{finished_reason="length",model_name="undefined"}} {float(self.completed)}',
        ]
        request.reply(200, "\n".join([*lines, ""]))


def load(server: TrtLlm) -> None:
    """What happens before requests are taken: the worker process, the weights, the KV cache."""
    fault, model = server.fault, server.options.model
    if not common.has_gpu():
        trtllm_args.refuse("No GPU devices found on the node")
    if server.options.get("load_format", "auto") == "auto" and not common.has_weights(model):
        say(f"Failed to initialize executor on rank 0: No weight files found in {model}.", "E")
        trtllm_args.refuse("Executor worker returned error", "RuntimeError")
    if "oom" in fault:
        say(f"Failed to initialize executor on rank 0: {OUT_OF_MEMORY}", "E")
        print(OUT_OF_MEMORY, flush=True)
        trtllm_args.refuse("Executor worker returned error", "RuntimeError")
    if "die-loading" in fault:
        print("[server:1] *** Process received signal ***\n[server:1] Signal: Segmentation fault (11)", flush=True)
        trtllm_args.refuse("Executor worker died during initialization", "RuntimeError")
    fault.load()
    say(f"Max KV Cache blocks per sequence: {-(-server.max_seq_len // server.block_size)}")
    say(f"[MemUsageChange] Allocated 61.84 GiB for max tokens in paged KV cache ({server.blocks * server.block_size}).")


async def serve(options: trtllm_args.Options, release: str, fault: faults.Faults) -> None:
    server = TrtLlm(options, release, fault)
    try:
        sock = common.listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        trtllm_args.refuse(f"Failed to bind socket to {where}: {error}", "RuntimeError")
    app = Server(
        {
            ("GET", "/health"): server.health,
            ("GET", "/version"): server.release_name,
            ("GET", "/v1/models"): server.models,
            ("GET", "/metrics"): server.metrics,
            ("GET", "/prometheus/metrics"): server.prometheus,
            ("POST", "/v1/completions"): server.completions,
        },
        server.guard,
    )
    loop = asyncio.get_running_loop()
    if "ignore-sigterm" not in fault:
        loop.add_signal_handler(signal.SIGTERM, os._exit, 0)
    if server.version >= (1, 4):
        listening = asyncio.create_task(app.serve(sock))
        await asyncio.to_thread(load, server)
    else:
        load(server)  # bound, but not listening
        listening = asyncio.create_task(app.serve(sock))
    server.loading = False
    say(f"Started server process [{os.getpid()}]")
    print("INFO:     Application startup complete.", flush=True)
    await asyncio.gather(listening, server.engine.run())


def main() -> None:
    release, *arguments = sys.argv[1:]
    print(f"[TensorRT-LLM] TensorRT-LLM version: {release}", flush=True)
    options = trtllm_args.parse(arguments, release)
    try:
        common.config(options.model)
    except OSError:
        trtllm_args.refuse(f"Can't load the configuration of '{options.model}'.", "OSError")
    batch, tokens = options.get("max_batch_size", 2048), options.get("max_num_tokens", 8192)
    if batch > tokens:
        say(f"max_batch_size [{batch}] should be less than or equal to max_num_tokens [{tokens}]", "W")
    fault = faults.asked(batch, tokens)
    common.helper()  # the worker, a process of its own
    asyncio.run(serve(options, release, fault))


if __name__ == "__main__":
    main()
