"""`python -m batchlab claims`: every published claim with its verdict, its evidence and the numbers behind it."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from typing import Any

from batchlab.flags import count


def add_parser(commands: Any) -> None:
    p = commands.add_parser("claims", help="every published claim with its verdict and evidence")
    p.add_argument("numbers", metavar="NUMBER", nargs="*", type=count, help="only these claims")
    p.add_argument("--json", action="store_true", help="a JSON list instead of text")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Print the verdicts over every scenario's cells. UsageError for a number that no claim has."""
    from batchlab import claims  # the audit's cards and models take a second to import

    known = claims.load()
    for number in args.numbers:
        known.claim(number)
    found = [v for v in claims.all_verdicts() if not args.numbers or v.number in args.numbers]
    if args.json:
        print(json.dumps([as_object(v) for v in found], indent=1, allow_nan=False))
        return 0
    for v in found:
        print(f"{v.number} ({v.source}) {v.verdict.upper()}, evidence: {v.evidence}")
        for text, indent in ((v.text, "  "), (v.detail, "    ")):
            print(textwrap.fill(text, 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
    counts = Counter(v.verdict for v in found)
    told = ", ".join(f"{counts[word]} {word}" for word in claims.VERDICTS if counts[word])
    print(f"{len(found)} claims: {told}", file=sys.stderr)
    return 0


def as_object(v: Any) -> dict[str, Any]:
    """A verdict as the command prints it."""
    return {
        "number": v.number,
        "source": v.source,
        "text": v.text,
        "verdict": v.verdict,
        "evidence": v.evidence,
        "detail": v.detail,
        "cells": list(v.cells),
    }
