"""What vLLM's own scheduler decides, without a model: the reference for the policy `vllm-v1`.

Run with the Python of an environment that holds vLLM (0.26 or newer; the CPU build will do):

    ENGINE_PYTHON benchmarks/simulator/vllm_schedule.py CASES.json > DECISIONS.json

A case: {"name", "requests": [[iteration, input_len, output_len], ...], "max_num_seqs", "max_num_batched_tokens",
"num_blocks", "async_scheduling"}. A request is added just before that iteration is scheduled. The decisions: for
each iteration of a case the [request, tokens] pairs in the scheduler's order, and the requests preempted in it.
Iterations without tokens are left out.

The engine's loop is kept, with its batch queue of two when scheduling is asynchronous: schedule until the queue is
full, then take the oldest output. Each request samples one token when its prompt is done.
"""

import json
import sys
import tempfile
from collections import deque
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def make_scheduler(case: dict, folder: Path):
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(
        model=str(folder), tokenizer_mode="auto", skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=8192
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    cache.num_gpu_blocks = case["num_blocks"]
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["max_num_batched_tokens"],
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=case["async_scheduling"],
        ),
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv = KVCacheConfig(
        num_blocks=case["num_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    kind = AsyncScheduler if case["async_scheduling"] else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        log_stats=False,
    )


def make_request(index: int, prompt: int, output: int):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(
        request_id=str(index),
        prompt_token_ids=[7] * prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(index),
    )


def output_of(planned, requests):
    """One sampled token for each request whose known tokens are all computed by this iteration."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(planned.num_scheduled_tokens)
    sampled = [[9] if planned.done[i] else [] for i in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={r: k for k, r in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def decisions(case: dict, folder: Path) -> list[list]:
    scheduler = make_scheduler(case, folder)
    arrivals = deque(sorted((at, k, p, o) for k, (at, p, o) in enumerate(case["requests"])))
    depth = 2 if case["async_scheduling"] else 1
    queue: deque = deque()
    log: list[list] = []
    requests = {}
    for _ in range(100000):
        while arrivals and (arrivals[0][0] <= len(log) or not requests):
            _, k, prompt, output = arrivals.popleft()
            requests[str(k)] = make_request(k, prompt, output)
            scheduler.add_request(requests[str(k)])
        if not requests and not arrivals:
            break
        planned = scheduler.schedule()
        if planned.total_num_scheduled_tokens:
            planned.done = {r: not requests[r].is_prefill_chunk for r in planned.num_scheduled_tokens}
            log.append(
                [
                    [[int(r), n] for r, n in planned.num_scheduled_tokens.items()],
                    sorted(int(r) for r in planned.preempted_req_ids or ()),
                ]
            )
        else:
            planned.done = {}
        queue.append(planned)
        if len(queue) < depth and (planned.total_num_scheduled_tokens or scheduler.has_requests()):
            continue
        oldest = queue.popleft()
        scheduler.update_from_output(oldest, output_of(oldest, requests))
        for r in [r for r, req in requests.items() if req.is_finished()]:
            del requests[r]
    return log


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        result = {case["name"]: decisions(case, Path(folder)) for case in cases}
    lines = ",\n".join(f'"{name}": {json.dumps(log, separators=(",", ":"))}' for name, log in result.items())
    print(f'{{"vllm": "{vllm.__version__}", "decisions": {{\n{lines}\n}}}}')


if __name__ == "__main__":
    main()
