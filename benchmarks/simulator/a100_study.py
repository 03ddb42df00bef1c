"""The article's whole study, simulated, and how long that takes.

    python benchmarks/simulator/a100_study.py [--processes N] [--csv FILE] [--equal-kernels]

2 datasets of 1,024 requests x 40 limits x 2 request rates x 4 engines on an A100-SXM-80G with Llama-3-8B. Prints
the seconds, and what the study says about claims 16, 24 and 29. With --equal-kernels all engines run on vLLM's
operator times: what is then left of a difference comes from scheduling.
"""

import argparse
import csv
import os
import sys
import time
from typing import Any

import numpy as np

from batchlab.sim import SimResult
from batchlab.sim.grid import simulate_many

DATASETS = {"prefill-heavy": (768, 128), "decode-heavy": (128, 768)}
ENGINES = {
    "vllm-v0": ("vllm-v0", {}),
    "vllm-v0 multi-step": ("vllm-v0", {"num_scheduler_steps": 8}),
    "vllm-v1": ("vllm-v1", {}),
    "tensorrt-llm": ("tensorrt-llm", {}),
}
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (1024, 2048, 4096, 8192, 16384)
RATES = (None, 4.0)
REQUESTS = 1024


def arrivals(rate: float | None) -> np.ndarray:
    """Poisson arrivals of the given rate, the same for every cell; all at once without a rate."""
    if rate is None:
        return np.zeros(REQUESTS)
    return np.cumsum(np.random.default_rng(0).exponential(1 / rate, REQUESTS))


def cells(equal_kernels: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(coordinates, arguments of `simulate`) of every cell, engine by engine."""
    times = {rate: arrivals(rate) for rate in RATES}
    made = []
    for name, (engine, options) in ENGINES.items():
        for dataset, (prompt, output) in DATASETS.items():
            for rate in RATES:
                for batch in BATCHES:
                    for tokens in TOKENS:
                        requests = [(float(at), prompt, output) for at in times[rate]]
                        made.append(
                            (
                                {
                                    "engine": name,
                                    "dataset": dataset,
                                    "rate": rate or "inf",
                                    "batch": batch,
                                    "tokens": tokens,
                                },
                                {
                                    "engine": engine,
                                    "hardware": "a100_sxm",
                                    "model": "llama-3-8b",
                                    "requests": requests,
                                    "max_batch_size": batch,
                                    "max_num_tokens": tokens,
                                    "policy_options": options,
                                    "kernels": "vllm" if equal_kernels else None,
                                },
                            )
                        )
    return made


def reduce(_: int, result: SimResult) -> dict[str, float]:
    """The figures of a cell that the article shows."""
    first, last, scheduled, tokens = (
        np.array([row[k] for row in result.rows], dtype=float) for k in ("first_s", "last_s", "scheduled_s", "tokens")
    )
    return {
        "throughput_tok_s": result.output_throughput_tok_s,
        "ttft_mean_ms": float(1e3 * (first - scheduled).mean()),
        "tpot_mean_ms": float(1e3 * ((last - first) / (tokens - 1)).mean()),
        "running": float(result.iterations["running"].to_numpy().mean()),
        "decoding": _mean_positive(result.iterations["decode_tokens"].to_numpy()),
        "preemptions": int(result.iterations["preemptions"].to_numpy().sum()),
    }


def _mean_positive(values: np.ndarray) -> float:
    return float(values[values > 0].mean()) if (values > 0).any() else 0.0


def report(rows: list[dict[str, Any]]) -> None:
    """Claims 16 and 29 (TTFT against max batch size at rate 4), 24 (running batch at 1,024 tokens), 28 (throughput
    ratio).
    """

    def pick(**want: Any) -> list[dict[str, Any]]:
        return [r for r in rows if all(r[k] == v for k, v in want.items())]

    for engine in ENGINES:
        print(f"\n{engine}")
        for dataset in DATASETS:
            ttft = [r["ttft_mean_ms"] for r in pick(engine=engine, dataset=dataset, rate=4.0, tokens=2048)]
            print(f"  TTFT ms at rate 4, {dataset}, batch {BATCHES}: {[round(t) for t in ttft]}")
            speed = [r["throughput_tok_s"] for r in pick(engine=engine, dataset=dataset, rate="inf", tokens=2048)]
            ratio = speed[-1] / speed[0]
            print(f"  throughput tok/s, batch {BATCHES}: {[round(s) for s in speed]}; 512 over 4: {ratio:.1f}")
        running = {
            b: [round(r["running"], 1) for r in pick(engine=engine, dataset="prefill-heavy", rate="inf", batch=b)]
            for b in (128, 256, 512)
        }
        print(
            f"  running batch, prefill-heavy, tokens {TOKENS}: "
            + "; ".join(f"batch {b}: {v}" for b, v in running.items())
        )
        tpot = [
            round(r["tpot_mean_ms"], 1) for r in pick(engine=engine, dataset="prefill-heavy", rate="inf", batch=256)
        ]
        print(f"  TPOT ms, prefill-heavy, batch 256, tokens {TOKENS}: {tpot}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--csv", help="write a row a cell there")
    parser.add_argument("--equal-kernels", action="store_true", help="vLLM's operator times for every engine")
    args = parser.parse_args()
    made = cells(args.equal_kernels)
    from a100_study import reduce as by_module  # workers import no main program

    start = time.monotonic()
    figures = simulate_many([call for _, call in made], by_module, processes=args.processes)
    took = time.monotonic() - start
    rows = [{**where, **what} for (where, _), what in zip(made, figures, strict=True)]
    each_ms = 1e3 * took * args.processes / len(rows)
    print(f"{len(rows)} cells in {took:.1f} s on {args.processes} processes: {each_ms:.0f} ms of a core each")
    report(rows)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
