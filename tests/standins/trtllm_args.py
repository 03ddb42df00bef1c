"""The command line and YAML of `trtllm-serve`, by version: what is there, and how the rest is refused.

After tensorrt_llm/commands/serve.py and llmapi/llm_args.py. One thing is stricter than the real ones: a key that is
given both as a flag and in YAML, or twice in YAML, is refused, for which of the two wins changed between releases.
"""

import sys
from dataclasses import dataclass
from typing import Any

import yaml

from standins.common import path

STRING, INT, FLOAT, FLAG = "TEXT", "INTEGER", "FLOAT", ""
# flag → (its LlmArgs key, type)
FLAGS = {
    "--tokenizer": ("tokenizer", STRING),
    "--host": ("host", STRING),
    "--port": ("port", INT),
    "--backend": ("backend", STRING),
    "--log_level": ("log_level", STRING),
    "--max_beam_width": ("max_beam_width", INT),
    "--max_batch_size": ("max_batch_size", INT),
    "--max_num_tokens": ("max_num_tokens", INT),
    "--max_seq_len": ("max_seq_len", INT),
    "--tp_size": ("tensor_parallel_size", INT),
    "--pp_size": ("pipeline_parallel_size", INT),
    "--ep_size": ("moe_expert_parallel_size", INT),
    "--cluster_size": ("moe_cluster_parallel_size", INT),
    "--gpus_per_node": ("gpus_per_node", INT),
    "--kv_cache_free_gpu_memory_fraction": ("kv_cache_config.free_gpu_memory_fraction", FLOAT),
    "--num_postprocess_workers": ("num_postprocess_workers", INT),
    "--trust_remote_code": ("trust_remote_code", FLAG),
    "--extra_llm_api_options": ("yaml", STRING),
    "--reasoning_parser": ("reasoning_parser", STRING),
    "--metadata_server_config_file": ("metadata_server_config_file", STRING),
    "--server_role": ("server_role", STRING),
    "--fail_fast_on_attention_window_too_large": ("fail_fast_on_attention_window_too_large", FLAG),
}
LATER_FLAGS = {  # 1.2 and later
    "--config": ("yaml", STRING),
    "--tensor_parallel_size": ("tensor_parallel_size", INT),
    "--pipeline_parallel_size": ("pipeline_parallel_size", INT),
    "--free_gpu_memory_fraction": ("kv_cache_config.free_gpu_memory_fraction", FLOAT),
    "--revision": ("revision", STRING),
    "--otlp_traces_endpoint": ("otlp_traces_endpoint", STRING),
    "--enable_chunked_prefill": ("enable_chunked_prefill", FLAG),
    "--chat_template": ("chat_template", STRING),
}
LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")

ANY = object()
COUNT, NUMBER = (int, type(None)), (int, float, type(None))
KEYS: dict[str, Any] = {
    "tokenizer": str, "tokenizer_mode": str, "skip_tokenizer_init": bool, "trust_remote_code": bool,
    "tensor_parallel_size": int, "pipeline_parallel_size": int, "gpus_per_node": COUNT, "dtype": str,
    "moe_expert_parallel_size": COUNT, "enable_attention_dp": bool, "load_format": ("auto", "dummy", "vision_only"),
    "enable_chunked_prefill": bool, "iter_stats_max_iterations": COUNT, "request_stats_max_iterations": COUNT,
    "max_batch_size": COUNT, "max_input_len": COUNT, "max_seq_len": COUNT, "max_beam_width": COUNT,
    "max_num_tokens": COUNT, "num_postprocess_workers": int, "backend": str, "attn_backend": str,
    "disable_overlap_scheduler": bool, "enable_iter_perf_stats": bool, "enable_iter_req_stats": bool,
    "print_iter_log": bool, "stream_interval": int, "enable_min_latency": bool, "enable_autotuner": bool,
    "sampler_type": str, "garbage_collection_gen0_threshold": int, "batch_wait_timeout_ms": NUMBER,
    "speculative_config": ANY, "moe_config": ANY, "torch_compile_config": ANY, "quant_config": ANY,
    "kv_cache_config": {
        "enable_block_reuse": bool, "max_tokens": COUNT, "max_attention_window": ANY, "sink_token_length": COUNT,
        "free_gpu_memory_fraction": NUMBER, "host_cache_size": COUNT, "onboard_blocks": bool,
        "enable_partial_reuse": bool, "copy_on_partial_reuse": bool, "dtype": str, "tokens_per_block": int,
        "event_buffer_max_size": int, "use_uvm": bool,
    },
    "scheduler_config": {
        "capacity_scheduler_policy": ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
        "context_chunking_policy": ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", None),
        "dynamic_batch_config": ANY,
    },
    "cuda_graph_config": {"batch_sizes": ANY, "max_batch_size": int, "enable_padding": bool},
}  # fmt: skip
LATER_KEYS = {"return_perf_metrics": bool, "perf_metrics_max_requests": COUNT, "otlp_traces_endpoint": str}
NULLABLE = ("cuda_graph_config",)


def number(version: str) -> tuple[int, int]:
    """Major and minor of a release's name, whatever follows them."""
    major, minor, *_ = version.split("+")[0].split(".")
    return int(major), int(minor.split("rc")[0])


@dataclass(slots=True)
class Options:
    """The server's own options, and LlmArgs flattened to dotted keys."""

    model: str
    host: str
    port: int
    llm: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.llm.get(key)
        return default if value is None else value


def parse(arguments: list[str], version: str) -> Options:
    """As click does it; prints what is wrong and exits with 2 (flags) or 1 (YAML)."""
    known = FLAGS | (LATER_FLAGS if number(version) >= (1, 2) else {})
    given: dict[str, Any] = {}
    positional = []
    rest = list(arguments)
    if rest[:1] == ["serve"]:  # the default command of the group, and its full name
        rest.pop(0)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            positional.append(word)
            continue
        flag, has_value, value = word.partition("=")
        if flag not in known:
            _usage(f"No such option: {flag}")
        key, kind = known[flag]
        if kind == FLAG:
            given[key] = True
            continue
        if not has_value:
            if not rest:
                _usage(f"Option '{flag}' requires an argument.")
            value = rest.pop(0)
        given[key] = _converted(flag, kind, value)
    if not positional:
        _usage("Missing argument 'MODEL'.")
    if len(positional) > 1:
        _usage(f"Got unexpected extra argument ({' '.join(positional[1:])})")
    if given.get("log_level", "info") not in LOG_LEVELS:
        _usage(f"Invalid value for '--log_level': {given['log_level']!r} is not one of {', '.join(LOG_LEVELS)}.")
    if given.get("backend", "pytorch") not in ("pytorch", "_autodeploy", "tensorrt", "trt"):
        _usage(f"Invalid value for '--backend': {given['backend']!r} is not one of 'pytorch', '_autodeploy'.")
    options = Options(positional[0], given.pop("host", "localhost"), given.pop("port", 8000), {})
    file = given.pop("yaml", None)
    extra = _checked(_load(file), version) if file else {}
    sections = {key.split(".")[0] for key in extra}
    for key in given:
        if key.split(".")[0] in sections:  # a section in YAML takes the place of the whole one of the flags
            refuse(f"stand-in: {key} is given as a flag and in {file}; which of them wins differs between releases")
    options.llm = given | extra
    return options


def _usage(message: str) -> None:
    print(f"Usage: trtllm-serve serve [OPTIONS] MODEL\nTry 'trtllm-serve serve --help' for help.\n\nError: {message}",
          file=sys.stderr)  # fmt: skip
    sys.exit(2)


def refuse(message: str, kind: str = "ValueError") -> None:
    print('Traceback (most recent call last):\n  File "/usr/local/bin/trtllm-serve", line 8, in <module>\n'
          f"    sys.exit(main())\n{kind}: {message}", file=sys.stderr)  # fmt: skip
    sys.exit(1)


def _converted(flag: str, kind: str, value: str) -> Any:
    try:
        return {STRING: str, INT: int, FLOAT: float}[kind](value)
    except ValueError:
        _usage(f"Invalid value for '{flag}': {value!r} is not a valid {kind.lower()}.")


class _Loader(yaml.SafeLoader):
    pass


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            refuse(f"stand-in: YAML key {key} is given twice; PyYAML would silently take the last")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _load(file: str) -> dict:
    try:
        return yaml.load(path(file).read_text(), Loader=_Loader) or {}
    except FileNotFoundError:
        refuse(f"[Errno 2] No such file or directory: '{file}'", "FileNotFoundError")


def _checked(values: dict, version: str) -> dict[str, Any]:
    known = KEYS | (LATER_KEYS if number(version) >= (1, 1) else {})
    flat, wrong = _flatten(values, known, "")
    if wrong:
        lines = [f"{len(wrong)} validation error{'s' * (len(wrong) > 1)} for TorchLlmArgs", *wrong]
        refuse("\n".join(lines), "pydantic_core._pydantic_core.ValidationError")
    return flat


def _flatten(values: dict, known: dict, prefix: str) -> tuple[dict[str, Any], list[str]]:
    flat, wrong = {}, []
    for key, value in values.items():
        dotted, kind = f"{prefix}{key}", known.get(key)
        if key not in known:
            wrong.append(_finding(dotted, "Extra inputs are not permitted", "extra_forbidden", value))
        elif isinstance(kind, dict) and isinstance(value, dict):
            inner, inner_wrong = _flatten(value, kind, f"{dotted}.")
            flat, wrong = flat | inner, wrong + inner_wrong
        elif isinstance(kind, dict):
            if value is not None or key not in NULLABLE:
                wrong.append(_finding(dotted, "Input should be a valid dictionary", "model_type", value))
            flat[dotted] = value
        elif kind is ANY or (_allowed(kind, value)):
            flat[dotted] = value
        else:
            wrong.append(_finding(dotted, "Input should be valid", "type", value))
    return flat, wrong


def _allowed(kind: Any, value: Any) -> bool:
    if isinstance(kind, tuple) and not all(isinstance(k, type) for k in kind):
        return value in kind
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _finding(key: str, message: str, kind: str, value: Any) -> str:
    return (
        f"{key}\n  {message} [type={kind}, input_value={value!r}, input_type={type(value).__name__}]\n"
        f"    For further information visit https://errors.pydantic.dev/2.11/v/{kind}"
    )
