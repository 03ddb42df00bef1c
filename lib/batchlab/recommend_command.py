"""`python -m batchlab recommend`: the settings to use under a service's limits, from a scenario's recorded cells."""

import argparse
import json
import sys
from typing import Any

from batchlab.flags import seconds as positive
from batchlab.study import open_study


def add_parser(commands: Any) -> None:
    p = commands.add_parser("recommend", help="max_batch_size and max_num_tokens for limits on TPOT and TTFT")
    p.add_argument("scenario", metavar="SCENARIO", help="a name in data/scenarios/, or a path to a .yml file")
    p.add_argument("--tpot-ms", type=positive, help="limit on TPOT, ms")
    p.add_argument("--ttft-ms", type=positive, help="limit on TTFT, ms")
    p.add_argument("--statistic", choices=("mean", "p50", "p90", "p99"), default="mean", help="of both (default: mean)")
    p.add_argument("--json", action="store_true", help="a JSON list instead of text")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Print a recommendation for each engine, machine and dataset; 0, or 1 when no recorded cell tells any."""
    from batchlab.recommend import recommend  # pulls in matplotlib's half second
    from batchlab.service import ServiceLimits

    limits = ServiceLimits(args.tpot_ms, args.ttft_ms, args.statistic)
    study = open_study(args.scenario)
    made = recommend(study.frame(), limits)
    if args.json:
        print(json.dumps([r.as_dict() for r in made], indent=1, allow_nan=False))
    else:
        print("\n\n".join(map(_told, made)))
    if not made:
        print(
            f"{study.scenario.name}: nothing is recorded; `python -m batchlab run {study.scenario.name}` measures",
            file=sys.stderr,
        )
    return 0 if any(r.max_batch_size is not None for r in made) else 1


def _told(r: Any) -> str:
    name = f"{r.dataset}: {r.engine} {r.engine_version}, {r.evidence} on {r.hardware}, {r.model}"
    if r.max_batch_size is None:
        return f"{name}\n  {r.why}"
    lines = [name, f"  {r.as_dict()['scenario_line']}"]
    where = "all requests at once" if r.any_load else f"at {r.request_rate:g} req/s"
    left = "" if r.throughput_left is None else f", {r.throughput_left:.0%} of the best without limits"
    lines.append(f"  {where}: {r.output_throughput_tok_s:,.0f} tok/s at {r.tpot_ms:.1f} ms TPOT{left}")
    return "\n".join([*lines, f"  {r.why}"])
