"""A stand-in for `python -m sglang.launch_server`, SGLang 0.5 without speculation or mixed chunks.

    python -m standins.sglang VERSION --model-path ...

Its log has a line for each prefill batch, and for every --decode-log-interval-th decode batch; a line's time has
milliseconds only with SGLANG_LOG_MS. The batch limit can be lowered while it runs (/set_internal_state).
"""

import argparse
import asyncio
import os
import signal
import sys
import time
import uuid
from datetime import datetime
from typing import Any

from standins import common, faults
from standins.engine import Engine, Iteration, Speed, policies
from standins.http import Request, Server
from standins.stream import Answer

KV_TOKENS = 150_000
OUT_OF_MEMORY = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
INTERNAL = {"object": "error", "message": "CUDA error: an illegal memory access was encountered",
            "type": "InternalServerError", "param": None, "code": 500}  # fmt: skip
INTS = ("port", "context-length", "max-running-requests", "max-total-tokens", "chunked-prefill-size",
        "max-prefill-tokens", "cuda-graph-max-bs", "decode-log-interval", "stream-interval", "random-seed", "tp-size",
        "dp-size", "num-continuous-decode-steps", "watchdog-timeout", "page-size")  # fmt: skip
WORDS = ("tokenizer-path", "load-format", "host", "dtype", "quantization", "kv-cache-dtype", "served-model-name",
         "log-level", "log-level-http", "attention-backend", "sampling-backend", "sampling-defaults", "device",
         "schedule-policy", "api-key", "revision", "chat-template", "model-impl")  # fmt: skip
FLOATS = ("mem-fraction-static", "schedule-conservativeness")
SWITCHES = ("trust-remote-code", "skip-tokenizer-init", "skip-server-warmup", "disable-radix-cache",
            "disable-cuda-graph", "disable-overlap-schedule", "enable-mixed-chunk", "enable-metrics",
            "enable-cache-report", "enable-torch-compile", "log-requests", "disable-cuda-graph-padding")  # fmt: skip


def arguments(words: list[str]) -> argparse.Namespace:
    """As argparse does it in SGLang; exits with 2."""
    parser = argparse.ArgumentParser(prog="launch_server.py", usage="launch_server.py [-h] --model-path MODEL_PATH …")
    parser.add_argument("--model-path", "--model", required=True)
    for kind, names in ((int, INTS), (str, WORDS), (float, FLOATS)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.set_defaults(host="127.0.0.1", port=30000, max_prefill_tokens=16384, chunked_prefill_size=8192,
                        decode_log_interval=40, load_format="auto", stream_interval=1)  # fmt: skip
    given = parser.parse_args(words)
    if given.load_format not in ("auto", "pt", "safetensors", "dummy"):
        parser.error(f"argument --load-format: invalid choice: '{given.load_format}'")
    if given.enable_mixed_chunk:
        parser.error("stand-in: --enable-mixed-chunk is not modelled")
    return given


def say(message: str) -> None:
    """A line of SGLang's logger."""
    now = datetime.now()
    stamp = f"{now:%Y-%m-%d %H:%M:%S}"
    if os.environ.get("SGLANG_LOG_MS", "").lower() in ("1", "true"):
        stamp += f".{now.microsecond // 1000:03d}"
    print(f"[{stamp}] {message}", flush=True)


class SgLang:
    """The server."""

    def __init__(self, args: argparse.Namespace, version: str, fault: faults.Faults) -> None:
        self.args, self.version, self.fault = args, version, fault
        self.context = args.context_length or common.config(args.model_path)["max_position_embeddings"]
        fraction = args.mem_fraction_static or 0.88
        self.kv_tokens = min(int(KV_TOKENS * fraction), args.max_total_tokens or 1 << 40)
        self.batch = min(args.max_running_requests or 1 << 40, self.kv_tokens // 2, 4096)
        self.micro_batch = self.batch
        chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else 1 << 40
        self.cache = common.PrefixCache(1, not args.disable_radix_cache)
        self.engine = Engine(
            "sglang",
            max_batch_size=self.batch,
            max_num_tokens=chunk,
            kv_tokens=self.kv_tokens,
            block_size=1,
            options={
                "max_prefill_tokens": args.max_prefill_tokens,
                "overlap_schedule": not args.disable_overlap_schedule,
            },
            speed=Speed(step_ms=3.5),
            tell=self.iterated,
        )
        self.decodes = 0
        self.starting = True
        self.name = args.served_model_name or args.model_path

    def iterated(self, it: Iteration) -> None:
        usage = f"{it.kv_used / self.kv_tokens:.2f}"
        spent = it.ended - it.started
        if it.context:
            say(
                f"Prefill batch, #new-seq: {it.context}, #new-token: {it.context_tokens}, #cached-token: 0, token "
                f"usage: {usage}, #running-req: {it.held_back}, #queue-req: {it.waiting}, "
            )
            return
        self.decodes += 1
        if self.decodes % self.args.decode_log_interval:
            return
        graph = not self.args.disable_cuda_graph and it.generation <= (self.args.cuda_graph_max_bs or 256)
        say(
            f"Decode batch, #running-req: {it.generation}, #token: {it.kv_used}, token usage: {usage}, cuda graph: "
            f"{graph}, gen throughput (token/s): {it.generation / spent:.2f}, #queue-req: {it.waiting}, "
        )

    # requests ----------------------------------------------------------------------------------------------------
    def refuse(self, request: Request, message: str) -> None:
        body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
        request.reply(400, body)

    async def completions(self, request: Request) -> None:
        strikes = self.fault.strikes()
        body = request.json()
        refused = self.fault.text("refuse-field")
        if refused in body:
            self.refuse(request, f"1 validation error: {{'loc': ('body', '{refused}')}}")
            return
        length, output = common.count(body["prompt"]), body.get("max_tokens") or 16
        if length >= self.context:
            self.refuse(
                request,
                f"The input ({length} tokens) is longer than the model's context length ({self.context} tokens).",
            )
            return
        if length + output > self.context:
            self.refuse(
                request,
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens. You "
                f"requested a total of {length + output} tokens: {length} tokens from the input messages and {output} "
                "tokens for the completion.",
            )
            return
        fault = self.fault if strikes else faults.NONE
        output = min(output, int(fault.number("clamp") or output))
        stop = fault.number("stop-early")
        answer = self._answer(request, body, length, int(stop or output), "stop" if stop else "length", fault)
        if refusal := self.engine.submit(length, answer.output, answer.token):
            self.refuse(request, refusal)

    def _answer(
        self, request: Request, body: dict, length: int, output: int, reason: str, fault: faults.Faults
    ) -> Answer:
        cached = self.cache.hit(body["prompt"])
        options = body.get("stream_options") or {}
        fixed = uuid.uuid4().hex

        def head() -> dict[str, Any]:
            name = uuid.uuid4().hex if "new-ids" in self.fault else fixed
            return {"id": name, "object": "text_completion", "created": int(time.time()), "model": body["model"]}

        def usage(done: int) -> dict[str, Any]:
            details = {"cached_tokens": cached} if self.args.enable_cache_report else None
            return {
                "prompt_tokens": length,
                "total_tokens": length + done,
                "completion_tokens": done,
                "prompt_tokens_details": details,
            }

        def chunk(many: int, done: int, reason: str | None) -> dict[str, Any]:
            choice = {"index": 0, "text": " a" * many, "logprobs": None, "finish_reason": reason, "matched_stop": None}
            continuous = options.get("continuous_usage_stats", False)
            return head() | {"choices": [choice], "usage": usage(done) if continuous else None}

        def tail(done: int) -> list[Any]:
            final = [head() | {"choices": [], "usage": usage(done)}] if options.get("include_usage") else []
            return [*final, "[DONE]"]

        merge = max(int(self.fault.number("merge") or 1), self.args.stream_interval)
        return Answer(request, output, reason, fault, chunk=chunk, tail=tail, error={"error": INTERNAL}, merge=merge)

    # what it says of itself --------------------------------------------------------------------------------------
    async def health(self, request: Request) -> None:
        request.reply(503 if self.starting else 200)

    async def server_info(self, request: Request) -> None:
        state = {
            "last_gen_throughput": 0.0,
            "memory_usage": {"kvcache": 1.0, "token_capacity": self.kv_tokens},
            "pp_max_micro_batch_size": self.micro_batch,
        }
        request.reply(200, vars(self.args) | {"internal_states": [state], "version": self.version})

    async def set_internal_state(self, request: Request) -> None:
        """Answers `true` for whatever it is asked, also for what it does not do."""
        wanted = request.json().get("server_args", {}).get("pp_max_micro_batch_size")
        if isinstance(wanted, int) and 0 < wanted <= self.batch:
            self.micro_batch = wanted
            policy = self.engine.policy
            policy.limits = policies.Limits(wanted, policy.limits.max_num_tokens)
            policy.batch_is_full = False
        request.reply(200, [{"updated": True, "server_args": vars(self.args)}])

    async def models(self, request: Request) -> None:
        request.reply(200, {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "sglang"}]})

    async def metrics(self, request: Request) -> None:
        if not self.args.enable_metrics:
            request.reply(404, {"detail": "Not Found"})
            return
        policy, label = self.engine.policy, f'{{model_name="{self.name}"}}'
        gauges = {
            "num_running_reqs": len(policy.decodes),
            "num_queue_reqs": policy.queue_length,
            "token_usage": policy.kv.used / self.kv_tokens,
        }
        lines = [f"# TYPE sglang:{name} gauge\nsglang:{name}{label} {float(value)}" for name, value in gauges.items()]
        request.reply(200, "\n".join([*lines, ""]))


def die(*lines: str) -> None:
    """The scheduler process failed, and takes the server with it."""
    for line in lines:
        print(line, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def load(args: argparse.Namespace, fault: faults.Faults) -> None:
    say(f"server_args=ServerArgs({', '.join(f'{key}={value!r}' for key, value in vars(args).items())})")
    trace = "Scheduler hit an exception: Traceback (most recent call last):\n"
    failed = "Received sigquit from a child process. It usually means the child failed."
    if not common.has_gpu():
        die(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {trace}RuntimeError: No CUDA GPUs are available", failed)
    if args.load_format == "auto" and not common.has_weights(args.model_path):
        say(f"{trace}RuntimeError: Cannot find any model weights with `{args.model_path}`")
        die(failed)
    if "die-loading" in fault:
        say("Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -11")
        die(failed)
    if "oom" in fault:
        say(f'{trace}  File "model_runner.py", line 1217, in init_memory_pool\n{OUT_OF_MEMORY}')
        die(failed)
    fault.load()


async def serve(args: argparse.Namespace, version: str, fault: faults.Faults) -> None:
    server = SgLang(args, version, fault)
    limits = f"chunked_prefill_size={args.chunked_prefill_size}, max_prefill_tokens={args.max_prefill_tokens}"
    say(
        f"max_total_num_tokens={server.kv_tokens}, {limits}, max_running_requests={server.batch}, "
        f"context_len={server.context}, available_gpu_mem=9.95 GB"
    )
    if "ignore-sigterm" not in fault:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    try:
        sock = common.listen(args.host, args.port)
    except OSError as error:
        where = f"('{args.host}', {args.port}): address already in use"
        print(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {where}", flush=True)
        sys.exit(1)
    app = Server(
        {
            ("GET", "/health"): server.health,
            ("GET", "/server_info"): server.server_info,
            ("GET", "/get_server_info"): server.server_info,
            ("POST", "/set_internal_state"): server.set_internal_state,
            ("GET", "/v1/models"): server.models,
            ("GET", "/metrics"): server.metrics,
            ("POST", "/v1/completions"): server.completions,
        }
    )
    await asyncio.gather(app.serve(sock), server.engine.run(), warm_up(server))


async def warm_up(server: SgLang) -> None:
    """One request of its own before it is ready."""
    print("INFO:     Application startup complete.", flush=True)
    if not server.args.skip_server_warmup:
        done = asyncio.Event()
        server.engine.submit(4, 8, lambda left: done.set() if left == 0 else None)
        await done.wait()
    server.starting = False
    say("The server is fired up and ready to roll!")


def main() -> None:
    version, *words = sys.argv[1:]
    args = arguments(words)
    try:
        common.config(args.model_path)
    except OSError:
        print(f"OSError: Can't load the configuration of '{args.model_path}'.", flush=True)
        sys.exit(1)
    if hasattr(time, "tzset"):
        time.tzset()
    fault = faults.asked(args.max_running_requests, args.chunked_prefill_size)
    common.helper()  # the scheduler, a process of its own
    load(args, fault)
    asyncio.run(serve(args, version, fault))


if __name__ == "__main__":
    main()
