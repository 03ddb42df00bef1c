"""What TensorRT-LLM tells of an iteration: a line of its log, in two formats, and an object of GET /metrics."""

from datetime import datetime
from typing import Any

from standins.engine import Iteration

_UNUSED = ("maxBatchSizeStatic", "maxBatchSizeTunerRecommended", "maxBatchSizeRuntime", "maxNumTokensStatic",
           "maxNumTokensTunerRecommended", "maxNumTokensRuntime", "cpuMemUsage", "pinnedMemUsage")  # fmt: skip
_STATIC = ("numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots")


def say(message: str, level: str = "I", where: str = "") -> None:
    """A line of TensorRT-LLM's logger."""
    print(f"[{datetime.now():%m/%d/%Y-%H:%M:%S}] [TRT-LLM] [{level}] {where}{message}", flush=True)


def log(version: tuple[int, int], it: Iteration, host_ms: float, device_ms: float | None) -> None:
    """The line of `print_iter_log`; host_ms: host_step_time, device_ms: of the iteration before, None at the first."""
    device = "N/A" if device_ms is None else f"{device_ms:.3f}ms"
    states = {
        "num_ctx_requests": it.context,
        "num_ctx_tokens": it.context_tokens,
        "num_generation_tokens": it.generation,
    }
    stamp = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    running = it.context + it.generation
    if version < (1, 3):
        say(
            f"iter = {it.number}, global_rank = 0, rank = 0, currank_total_requests = 0/0, host_step_time = "
            f"{host_ms}ms, prev_device_step_time = {device}, timestamp = {stamp}, num_scheduled_requests: "
            f"{running}, states = {states}"
        )
        return
    say(
        f"iter = {it.number}, global_rank = 0, rank = 0, num_scheduled_requests = {running}, kv_cache_util = "
        f"{it.kv_use:.3f}, currank_total_requests = 0/{it.waiting}, host_step_time = {host_ms:.2f}ms, "
        f"prev_device_step_time = {device}, timestamp = {stamp}, states = {states | {'cached_kv_tokens': 0}}",
        where="[_torch][RANK 0] ",
    )


def stat(version: tuple[int, int], it: Iteration, blocks: int, block_size: int, completed: int) -> dict[str, Any]:
    """The object of GET /metrics; on the PyTorch backend the static figures and limits are zeros."""
    inflight = {
        "numScheduledRequests": it.context + it.generation,
        "numContextRequests": it.context,
        "numGenRequests": it.generation,
        "numPausedRequests": it.paused,
        "numCtxTokens": it.context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 0.0,
    }
    later = {}
    if version >= (1, 4):
        inflight |= {"numCtxKvTokens": 0, "numGenKvTokens": 0, "numQueuedContextRequests": it.waiting,
                     "numQueuedCtxTokens": 0, "numQueuedGenRequests": 0, "numQueuedGenKvTokens": 0,
                     "numPausedKvTokens": 0}  # fmt: skip
        later = {"schedulerMode": "overlap", "statsSequence": it.number, "statsDroppedFrames": 0, "attentionDpRank": 0}
    kv = {
        "maxNumBlocks": blocks,
        "freeNumBlocks": blocks - it.kv_used,
        "usedNumBlocks": it.kv_used,
        "tokensPerBlock": block_size,
        "allocTotalBlocks": it.kv_used,
        "allocNewBlocks": it.kv_used,
        "reusedBlocks": 0,
        "missedBlocks": it.kv_used,
        "cacheHitRate": 0.0,
    }
    return {
        "timestamp": f"{datetime.now():%m-%d-%Y %H:%M:%S.%f}",
        "iter": it.number,
        "iterLatencyMS": 1e3 * (it.ended - it.started),
        "newActiveRequestsQueueLatencyMS": 0.1,
        "numNewActiveRequests": it.context,
        "numActiveRequests": it.active,
        "numQueuedRequests": it.waiting,
        "numCompletedRequests": completed,
        "maxNumActiveRequests": 2048,
        "gpuMemUsage": 76665782272,
        **dict.fromkeys(_UNUSED, 0),
        "kvCacheStats": kv,
        "staticBatchingStats": dict.fromkeys(_STATIC, 0),
        "inflightBatchingStats": inflight,
        "specDecodingStats": None,
        **later,
    }
