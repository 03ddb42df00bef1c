"""A stand-in for `text-generation-launcher`, TGI 2 and 3: launcher, shard and router as processes of their own.

    python -m standins.tgi VERSION [--model-id ...]

Each of the three is in its own process group, as TGI's are: who kills the launcher alone leaves the others.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from datetime import UTC, datetime

from standins import common, faults, tgi_args
from standins.http import Server
from standins.tgi_router import Router

KV_TOKENS = 40_000  # of a whole card; what --cuda-memory-fraction leaves of it is what warm-up finds


def say(message: str, level: str = " INFO", where: str = "text_generation_launcher") -> None:
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} {level} {where}: {message}", flush=True)


def fail(reason: str) -> None:
    """The launcher's last line."""
    print(f"Error: {reason}", flush=True)
    sys.exit(1)


def lengths(options: tgi_args.Options, longest: int) -> tuple[int, int, int]:
    """max_input_tokens, max_total_tokens and max_batch_prefill_tokens, checked as launcher and router check them."""
    if options.max_input_tokens is not None and options.max_input_length is not None:
        fail('ArgumentValidation("Both `max_input_tokens` and `max_input_length` are set.")')
    limit = min(longest, 4096)
    most_input = options.max_input_tokens or options.max_input_length or limit - 1
    total = options.max_total_tokens or limit
    prefill = options.max_batch_prefill_tokens
    if prefill is None:
        prefill = options.max_batch_size * most_input if options.max_batch_size else most_input + 50
    if most_input >= total:
        fail('ArgumentValidation("`max_input_tokens must be < `max_total_tokens`")')
    given = options.max_batch_total_tokens
    if given is not None and total > given:
        fail('ArgumentValidation("`max_total_tokens` must be <= `max_batch_total_tokens`. '
             f'Given: {total} and {given}")')  # fmt: skip
    return most_input, total, prefill


def load(options: tgi_args.Options, fault: faults.Faults) -> None:
    """The weights, then the shard; TGI takes no random weights."""
    say("Starting check and download process for " + options.model_id)
    try:
        common.config(options.model_id)
    except OSError:
        say("Download encountered an error: \nRepository Not Found for url: " + options.model_id, "ERROR", "download")
        fail("DownloadError")
    if not common.has_weights(options.model_id, (".safetensors", ".bin")):
        message = f"No local weights found in {options.model_id} with extension .bin"
        say(f"Download encountered an error: \nFileNotFoundError: {message}", "ERROR", "download")
        fail("DownloadError")
    say("Starting shard", where="shard-manager: text_generation_launcher")
    if not common.has_gpu() or "die-loading" in fault or "oom" in fault:
        what = "RuntimeError: No CUDA GPUs are available"
        if "die-loading" in fault:
            what = "Signal: 11"
        elif "oom" in fault:
            what = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total " \
                   "capacity of 79.11 GiB of which 61.75 MiB is free."  # fmt: skip
        say(f"Shard complete standard error output:\n\n{what} rank=0", "ERROR", "shard-manager")
        say("Shard 0 failed to start", "ERROR")
        say("Shutting down shards")
        fail("ShardCannotStart")


def warm_up(options: tgi_args.Options, prefill: int, total: int) -> int:
    """Tokens that the KV cache holds, as warm-up finds them: --max-batch-total-tokens counts for nothing here.

    RuntimeError with the server's words when the prefill budget or one request does not fit.
    """
    found = int(KV_TOKENS * options.cuda_memory_fraction)
    if prefill > found:
        raise RuntimeError(f"Not enough memory to handle {prefill} prefill tokens. You need to decrease "
                           "`--max-batch-prefill-tokens`")  # fmt: skip
    if total > found:
        raise RuntimeError(f"Not enough memory to handle max_total_tokens={total}. You need to decrease "
                           "`--max-total-tokens`")  # fmt: skip
    return found


def router(options: tgi_args.Options, version: str, fault: faults.Faults, sizes: tuple[int, int, int]) -> None:
    """The process that answers: `text-generation-router`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore-sigterm" in fault else lambda *_: os._exit(0))
    most_input, total, prefill = sizes
    where = "text_generation_router_v3" if version[0] >= "3" else "text_generation_router"
    say("Warming up model", where=where)
    if version[0] < "3" and prefill < most_input:
        print(f'Error: ArgumentValidation("`max_batch_prefill_tokens` must be >= `max_input_tokens`. '
              f'Given: {prefill} and {most_input}")', flush=True)  # fmt: skip
        os._exit(1)
    try:
        kv_tokens = warm_up(options, prefill, total)
    except RuntimeError as error:
        say(f"Server error: {error}", "ERROR", f"warmup: {where}_client")
        print(f'Error: Backend(Warmup(Generation("{error}")))', flush=True)
        os._exit(1)
    fault.load()
    say(f"Setting max batch total tokens to {kv_tokens}", where=where)
    say("Connected", where=f"{where}::server")
    asyncio.run(serve(options, version, fault, sizes, kv_tokens))


async def serve(
    options: tgi_args.Options, version: str, fault: faults.Faults, sizes: tuple[int, int, int], kv_tokens: int
) -> None:
    answering = Router(options, version, fault, sizes, kv_tokens)
    try:
        sock = common.listen(options.hostname, options.port)
    except OSError as error:
        print(f"Error: Axum({error})", flush=True)
        os._exit(1)
    await asyncio.gather(Server(answering.routes()).serve(sock), answering.engine.run())


def main() -> None:
    version, *arguments = sys.argv[1:]
    options = tgi_args.parse(arguments, version)
    fault = faults.asked(options.max_batch_size, options.max_batch_prefill_tokens)
    say("Args " + str({key: value for key, value in options.values.items() if value not in (None, False)}))
    try:
        longest = common.config(options.model_id)["max_position_embeddings"]
    except OSError:
        longest = 4096
    sizes = lengths(options, longest)
    load(options, fault)
    shard = common.helper(own_group=True)
    say("Shard ready in 0.1s", where="shard-manager: text_generation_launcher")
    say("Starting Webserver")
    webserver = os.fork()
    if not webserver:
        signal.alarm(faults.LIFE_S)  # a child inherits no alarm
        router(options, version, fault, sizes)
    launch(webserver, shard, fault)


def launch(webserver: int, shard: int, fault: faults.Faults) -> None:
    """The launcher's life: ends with its webserver, or both with it."""
    asked: list[int] = []
    if "ignore-sigterm" not in fault:
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    while not asked:
        if os.waitpid(webserver, os.WNOHANG)[0]:
            say("Webserver Crashed", "ERROR")
            say("Shutting down shards")
            end(shard)
            fail("WebserverFailed")
        time.sleep(0.05)
    say("Terminating webserver")
    end(webserver)
    say("Terminating shard", where="shard-manager: text_generation_launcher")
    end(shard)


def end(child: int, patience_s: float = 5.0) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
