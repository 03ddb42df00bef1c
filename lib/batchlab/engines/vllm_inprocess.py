"""vLLM's AsyncLLM in a process of its own, fed over a Unix socket: the `inprocess` transport.

`python -m batchlab.engines.vllm_inprocess SOCKET ENGINE_ARGS_JSON` runs under the engine's Python and imports
the standard library and vLLM only. It answers on SOCKET (multiprocessing.connection, one client at a time,
authenticated by BATCHLAB_AUTHKEY):

    ("run", {"requests": [(index, scheduled_s, prompt_ids, output_len), ...],
             "concurrency": int | None, "lead_s": float})
      -> any number of ("progress", done, total), then ("error", one line) or
         ("done", {"t0_ns": int, "requests": [dict, ...], "loop_lag_ms": [float, ...], "cpu_s": float})

A request's dict: index, sent_ns, scheduled_ns, end_ns, chunks [(time_ns, tokens), ...], finish_reason,
prompt_tokens, error.
"""

import asyncio
import gc
import json
import os
import sys
import time
from multiprocessing.connection import Listener

now = time.monotonic_ns


async def _one(llm, params_class, kind, job, t0_ns, index, scheduled_s, prompt_ids, output_len, gate):
    record = {"index": index, "chunks": [], "finish_reason": None, "prompt_tokens": None, "error": None}
    if gate is None:
        record["scheduled_ns"] = t0_ns + round(scheduled_s * 1e9)
        await asyncio.sleep(max(0.0, (record["scheduled_ns"] - now()) / 1e9))
    else:
        await gate.acquire()
        record["scheduled_ns"] = now()  # closed loop: a request is due when its slot is free
    params = params_class(
        max_tokens=output_len,
        min_tokens=output_len,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=kind,
    )
    chunks = record["chunks"]
    record["sent_ns"] = now()
    try:
        # the same spelling of the id as over HTTP, so that the trace finds the request's number
        async for output in llm.generate({"prompt_token_ids": prompt_ids}, params, f"{job}-b{index}"):
            tokens = len(output.outputs[0].token_ids)
            if tokens:
                chunks.append((now(), tokens))
            if output.finished:
                record["finish_reason"] = output.outputs[0].finish_reason
                record["prompt_tokens"] = len(output.prompt_token_ids or ())
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    record["end_ns"] = now()
    if gate is not None:
        gate.release()
    return record


async def _watch_loop(lags_ms, done, total, send):
    """How late the event loop wakes us, and a sign of life twice a second."""
    told = now()
    while True:
        before = now()
        await asyncio.sleep(0.01)
        lags_ms.append((now() - before) / 1e6 - 10.0)
        if now() - told > 500_000_000:
            told = now()
            send(("progress", done[0], total))


async def _run(llm, vllm, job, number, send):
    requests, done, lags_ms = job["requests"], [0], []
    gate = asyncio.Semaphore(job["concurrency"]) if job["concurrency"] else None
    params_class, kind = vllm.SamplingParams, vllm.sampling_params.RequestOutputKind.DELTA
    gc.collect()  # a fifth of a second with vLLM loaded: before the clock starts, not after
    gc.disable()
    cpu_before = time.process_time()
    t0_ns = now() + round(job["lead_s"] * 1e9)
    watch = asyncio.ensure_future(_watch_loop(lags_ms, done, len(requests), send))

    async def counted(*request):
        record = await _one(llm, params_class, kind, f"job{number}", t0_ns, *request, gate)
        done[0] += 1
        return record

    try:
        records = await asyncio.gather(*(counted(*request) for request in requests))
    finally:
        gc.enable()
        watch.cancel()
    return {"t0_ns": t0_ns, "requests": records, "loop_lag_ms": lags_ms, "cpu_s": time.process_time() - cpu_before}


async def _serve(socket, engine_args):
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # False for generation_config and the like arrives as JSON, so this is a plain keyword call
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
    loop = asyncio.get_running_loop()
    number = 0
    with Listener(socket, family="AF_UNIX", authkey=bytes.fromhex(os.environ["BATCHLAB_AUTHKEY"])) as listener:
        while True:
            client = await loop.run_in_executor(None, listener.accept)
            try:
                while True:
                    verb, job = await loop.run_in_executor(None, client.recv)
                    if verb != "run":
                        client.send(("error", f"unknown verb {verb}"))
                        continue
                    number += 1
                    try:
                        client.send(("done", await _run(llm, vllm, job, number, client.send)))
                    except Exception as error:
                        client.send(("error", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]))
            except (EOFError, OSError):
                continue
            finally:
                client.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
