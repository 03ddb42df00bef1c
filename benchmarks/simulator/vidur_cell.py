"""A grid cell in Vidur, timed; for `compare_vidur.py`. Run with the Python of an environment that holds `vidur`
0.0.26.

    VIDUR_PYTHON benchmarks/simulator/vidur_cell.py INPUT_LEN OUTPUT_LEN NUM_REQUESTS BATCH TOKENS RATE|inf vllm|sarathi

Vidur fetches the operator times it predicts from at each start, from a hub. Without one, a table of plausible times
in its own format takes their place here: what is timed (scheduling, events, prediction look-ups) is the same, and
nothing is said about its results. It keeps its metrics of requests and batches, as batchlab's simulator keeps its
rows; plots, traces and everything that is written at the end are off, and the setup before the first event is not
counted. Prints one JSON line: CPU seconds of the run, and simulated seconds.
"""

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

OPERATORS = (
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "attn_rope",
    "attn_kv_cache_save",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
LAYERS = 32


def plausible_times(max_tokens: int, max_batch: int, granularity: int) -> dict[str, dict[tuple[int, ...], float]]:
    """Milliseconds a layer, of the size of an A100's with Llama-3-8B."""
    times = {name: {(n,): (0.03 + 0.0002 * n) / LAYERS for n in range(1, max_tokens + 1)} for name in OPERATORS}
    for name in ("send_recv", "all_reduce"):  # asked for even on one card
        times[name] = {(n,): 0.0 for n in range(1, max_tokens + 1)}
    contexts = range(0, max_tokens + 1, granularity)
    times["attn_decode"] = {(b, c): (0.4 + 8e-5 * b * c) / LAYERS for b in range(1, max_batch + 1) for c in contexts}
    times["attn_prefill"] = {
        (c, n): (0.5 + 2e-6 * n * (n + 2 * c)) / LAYERS for c in contexts for n in range(32, 4096 + 1, 32)
    }
    return times


def main() -> None:
    prompt, output, requests, batch, tokens = map(int, sys.argv[1:6])
    rate, scheduler = sys.argv[6], sys.argv[7]
    from vidur.config import SimulationConfig
    from vidur.execution_time_predictor.sklearn_execution_time_predictor import SklearnExecutionTimePredictor
    from vidur.simulator import Simulator

    logging.disable(logging.CRITICAL)
    longest = max(tokens, prompt + output) + 1024
    times = plausible_times(longest, max(batch, 128), 256)
    SklearnExecutionTimePredictor._load_predictions_from_hf = lambda self: times
    with tempfile.TemporaryDirectory() as folder:
        limit = (
            {
                "vllm": [
                    "--vllm_scheduler_config_batch_size_cap",
                    str(batch),
                    "--vllm_scheduler_config_max_tokens_in_batch",
                    str(tokens),
                ],
                "sarathi": [
                    "--sarathi_scheduler_config_batch_size_cap",
                    str(batch),
                    "--sarathi_scheduler_config_chunk_size",
                    str(tokens),
                ],
            }
        )[scheduler]
        arrivals = (
            ["--interval_generator_config_type", "static"]
            if rate == "inf"
            else [
                "--interval_generator_config_type",
                "poisson",
                "--poisson_request_interval_generator_config_qps",
                rate,
            ]
        )
        sys.argv = [
            "vidur",
            "--replica_config_device",
            "a100",
            "--replica_config_model_name",
            "meta-llama/Llama-3-8B",
            "--replica_config_network_device",
            "a100_dgx",
            "--cluster_config_num_replicas",
            "1",
            "--request_generator_config_type",
            "synthetic",
            "--length_generator_config_type",
            "fixed",
            "--synthetic_request_generator_config_num_requests",
            str(requests),
            "--fixed_request_length_generator_config_prefill_tokens",
            str(prompt),
            "--fixed_request_length_generator_config_decode_tokens",
            str(output),
            "--fixed_request_length_generator_config_max_tokens",
            str(prompt + output),
            *arrivals,
            "--replica_scheduler_config_type",
            scheduler,
            *limit,
            "--random_forrest_execution_time_predictor_config_prediction_max_tokens_per_request",
            str(longest),
            "--random_forrest_execution_time_predictor_config_prediction_max_batch_size",
            str(max(batch, 128)),
            "--random_forrest_execution_time_predictor_config_cache_dir",
            str(Path(folder) / "cache"),
            "--no-metrics_config_enable_chrome_trace",
            "--no-metrics_config_store_plots",
            "--no-metrics_config_store_utilization_metrics",
            "--metrics_config_output_dir",
            folder,
        ]
        simulator = Simulator(SimulationConfig.create_from_cli_args())
        simulator._write_output = lambda: None
        start = time.process_time()
        simulator.run()
        took = time.process_time() - start
    print(json.dumps({"cpu_s": took, "simulated_s": simulator._time, "scheduler": scheduler}))


if __name__ == "__main__":
    main()
