"""The same workloads in batchlab's simulator and in Vidur, on this machine, timed.

    python benchmarks/simulator/compare_vidur.py --vidur-python VENV/bin/python      (VENV: pip install vidur==0.0.26)

Each cell runs --runs times in either; the fastest counts. Both are timed from the first event to the last, tables and
predictors loaded, in CPU seconds of their one thread, so that a busy machine does not matter. vllm-v0 stands against
Vidur's `vllm` scheduler, vllm-v1 against its `sarathi` (chunked prefill).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from a100_study import DATASETS, REQUESTS, arrivals

from batchlab.sim import simulate

PAIRS = {"vllm-v0": "vllm", "vllm-v1": "sarathi"}
TOKENS = 2048


def ours(engine: str, prompt: int, output: int, batch: int, rate: float | None, count: int) -> float:
    requests = [(float(at), prompt, output) for at in arrivals(rate)]
    best = float("inf")
    for _ in range(count + 1):  # once more: the first reads the operator tables
        start = time.process_time()
        simulate(engine, "a100_sxm", "llama-3-8b", requests, max_batch_size=batch, max_num_tokens=TOKENS)
        best = min(best, time.process_time() - start)
    return best


def theirs(python: str, scheduler: str, prompt: int, output: int, batch: int, rate: float | None, count: int) -> float:
    command = [
        python,
        str(Path(__file__).with_name("vidur_cell.py")),
        str(prompt),
        str(output),
        str(REQUESTS),
        str(batch),
        str(TOKENS),
        "inf" if rate is None else str(rate),
        scheduler,
    ]
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    runs = [subprocess.run(command, capture_output=True, text=True, env=environment) for _ in range(count)]
    failed = [r for r in runs if r.returncode]
    if failed:
        raise SystemExit(f"vidur failed: {failed[0].stderr.strip().splitlines()[-1]}")
    return min(json.loads(r.stdout.strip().splitlines()[-1])["cpu_s"] for r in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vidur-python", required=True)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{'engine':8} {'dataset':14} {'batch':>5} {'rate':>5} {'batchlab s':>11} {'vidur s':>8} {'ratio':>6}",
        flush=True,
    )
    for engine, scheduler in PAIRS.items():
        for dataset, (prompt, output) in DATASETS.items():
            for batch in (64, 256):
                for rate in (None, 4.0):
                    a = ours(engine, prompt, output, batch, rate, args.runs)
                    b = theirs(args.vidur_python, scheduler, prompt, output, batch, rate, args.runs)
                    print(
                        f"{engine:8} {dataset:14} {batch:5} {rate or 'inf':>5} {a:11.3f} {b:8.2f} {b / a:6.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    sys.exit(main())
