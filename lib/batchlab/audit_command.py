"""`python -m batchlab audit`: a table of serving numbers, held against arithmetic and against its card."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from batchlab.flags import share


def add_parser(commands: Any) -> None:
    p = commands.add_parser("audit", help="is a table of serving numbers (CSV) possible? arithmetic, the card, itself")
    p.add_argument(
        "file", metavar="FILE.csv", help="a row a run; columns carry their units: tpot_mean_ms, … (see --columns)"
    )
    p.add_argument("--hardware", help="the card, where the file has no such column: a100_sxm, h200_sxm, a10g, …")
    p.add_argument("--model", help="a name in data/models/, or a folder with a config.json; likewise")
    p.add_argument(
        "--quantization", choices=("none", "fp8"), default="none", help="of weights, KV cache and arithmetic"
    )
    p.add_argument("--tolerance", type=share, default=0.05, help="of arithmetic between printed values (default 0.05)")
    p.add_argument("--json", action="store_true", help="a JSON list of findings instead of lines")
    p.add_argument("--columns", action=_Columns, nargs=0, help="list the columns that a file may have, and exit")
    p.set_defaults(command=run)


class _Columns(argparse.Action):
    """Prints the columns and ends, like --help."""

    def __call__(self, *_: Any, **__: Any) -> None:
        from batchlab.audit import COLUMNS
        from batchlab.audit.table import TEXT

        width = max(map(len, COLUMNS))
        print("\n".join(f"{name:<{width}}  {what}" for name, what in (TEXT | COLUMNS).items()))
        raise SystemExit(0)


def run(args: argparse.Namespace) -> int:
    """Print the findings, in the order of the rows. UsageError for a file, card or model that cannot be used."""
    from batchlab import audit

    table = audit.load(args.file)
    findings = audit.check(table, audit.Setting(args.hardware, args.model, args.quantization, args.tolerance))
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=1, allow_nan=False))
    else:
        for f in findings:
            print(f"{args.file}:{f.line}: {f.severity} ({f.check}): {f.row}: {f.message}")
    rows = len({f.line for f in findings})
    _say(f"{len(table)} rows, {len(findings)} findings in {rows} of them")
    if not ({"hardware", "model"} <= set(table) or (args.hardware and args.model)):
        _say("arithmetic only: give --hardware and --model for the bounds of a card and a model")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)
