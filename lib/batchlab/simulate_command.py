"""`python -m batchlab simulate`: one cell on a simulated engine."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from batchlab import metrics, paths
from batchlab.errors import UsageError
from batchlab.flags import count, print_summary, rate
from batchlab.scenario import POLICIES
from batchlab.store import DamagedCell, Recorded, Store
from batchlab.workload.arrivals import arrival_times


def add_parser(commands: Any) -> None:
    p = commands.add_parser("simulate", help="one cell on a simulated engine: real scheduling, measured operator times")
    p.add_argument("--engine", required=True, choices=POLICIES)
    p.add_argument("--hardware", required=True, help="aiconfigurator's name of a card: h200_sxm, a100_sxm, …")
    p.add_argument("--model", required=True, help="a name in data/models/, or a folder with a config.json")
    p.add_argument("--input-len", required=True, type=count)
    p.add_argument("--output-len", required=True, type=count)
    p.add_argument("--num-requests", required=True, type=count)
    p.add_argument("--request-rate", required=True, type=rate, help="requests a second, or inf: all at once")
    p.add_argument("--max-batch-size", required=True, type=count)
    p.add_argument("--max-num-tokens", required=True, type=count)
    p.add_argument("--quantization", choices=("none", "fp8"), default="none")
    p.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="cards that the model is spread over")
    p.add_argument("--seed", type=int, default=0, help="of the arrivals at a finite rate")
    p.add_argument("--unfitted", action="store_true", help="leave out the constants that were fitted to measured cells")
    p.add_argument("--host-of", metavar="CELL", help="simulate the host that this recorded cell shows: id, or .zip")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, print the summary, in JSON with its provenance. UsageError for names that there are not, which lists
    those there are.
    """
    from batchlab.sim import simulate  # the operator tables take a second to import
    from batchlab.sim.fitted import fitted_constants

    if args.max_num_tokens < args.max_batch_size:
        raise UsageError(
            f"--max-num-tokens {args.max_num_tokens} is below --max-batch-size {args.max_batch_size}; raise the one or "
            "lower the other"
        )
    offered = None if math.isinf(args.request_rate) else args.request_rate
    times, _ = arrival_times(None, offered, args.num_requests, args.seed)
    constants = {} if args.unfitted else fitted_constants(args.engine, args.hardware, args.quantization)
    shown = _host_of(args) if args.host_of is not None else None
    result = simulate(
        args.engine,
        args.hardware,
        args.model,
        [(float(at), args.input_len, args.output_len) for at in times],
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        quantization=args.quantization,
        tp=args.tp,
        **constants | (shown.constants() if shown else {}),
    )
    summary = metrics.summary(
        result.requests.to_pandas(), result.iterations.to_pandas(), max_batch_size=args.max_batch_size
    )
    if args.json:
        summary["provenance"] = result.provenance | ({"host_of": shown.provenance()} if shown else {})
    print_summary(summary, as_json=args.json)
    fitted = "with constants fitted to measured cells" if constants else "nothing fitted"
    if shown:
        fitted = f"with {', '.join(shown.shown) or 'nothing'} read off cell {shown.cell}, the rest as fitted"
    print(f"simulated, not measured: {args.engine} on {args.hardware}, {fitted}", file=sys.stderr)
    return 0


def _host_of(args: argparse.Namespace) -> Any:
    """The calibration on the cell that --host-of names. UsageError where it is none for what is simulated."""
    from batchlab.sim.calibration import ENGINE, calibrate

    if args.unfitted:
        raise UsageError("--host-of and --unfitted exclude each other; drop one")
    if args.engine != ENGINE:
        raise UsageError(f"--host-of: only {ENGINE} has a host that cells show, not --engine {args.engine}")
    recorded = _recorded(args.host_of)
    cell = recorded.meta["cell"]
    if cell["hardware"] != args.hardware:
        raise UsageError(f"--host-of: cell {recorded.id} is of {cell['hardware']}, not of --hardware {args.hardware}")
    if recorded.meta["invalid_reasons"]:
        raise UsageError(f"--host-of: cell {recorded.id} is invalid: {recorded.meta['invalid_reasons'][0]}")
    return calibrate(recorded)


def _recorded(named: str) -> Recorded:
    """A cell's record by the path of its .zip, or by its id or the beginning of it."""
    file = Path(named)
    if named.endswith(".zip"):
        found = [file] if file.is_file() else []
    else:
        found = sorted(p for p in paths.RESULTS.glob("*/*.zip") if p.stem.startswith(named))
    if len(found) != 1:
        many = f"{len(found)} cells begin so; give more of the id" if found else "there is no such cell"
        raise UsageError(f"--host-of {named}: {many} (an id in {paths.RESULTS}, or the path of a cell's .zip)")
    try:
        return Store(found[0].parent).load(found[0].stem)
    except DamagedCell as error:
        raise UsageError(f"--host-of: {error}") from None
