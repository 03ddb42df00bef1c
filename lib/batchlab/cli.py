"""The command line. Each command prints its result to standard output, everything else to standard error."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import pandas as pd

from batchlab import (
    audit_command,
    claims_command,
    estimate,
    metrics,
    recommend_command,
    replay_command,
    simulate_command,
)
from batchlab.cell import SIMULATED
from batchlab.errors import EngineError, UsageError
from batchlab.study import Study, open_study

COORDINATES = (
    "cell",
    "engine",
    "engine_version",
    "hardware",
    "evidence",
    "transport",
    "model",
    "dataset",
    "input_len",
    "output_len",
    "max_batch_size",
    "max_num_tokens",
    "request_rate",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 measured but something failed, 2 bad input."""
    args = parser().parse_args(argv)
    try:
        return args.command(args)
    except UsageError as error:
        print(f"batchlab: {error}", file=sys.stderr)
        return 2
    except EngineError as error:
        _say(f"batchlab: {error.told()}")
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("batchlab: stopped; what is recorded stays, the next run resumes", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """One line for a wrong flag, without the usage in front of it. Subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="batchlab", description="Reruns the studies of batching in LLM serving, cell by cell.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine can run, what is missing and how to get it")
    doctor.set_defaults(command=_doctor)

    for name, function, text in (
        ("plan", _plan, "cells, which are recorded, estimated time"),
        ("run", _run, "measure what is missing"),
        ("summary", _summary, "a row a cell"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("scenario", metavar="SCENARIO", help="a name in data/scenarios/, or a path to a .yml file")
        command.add_argument("--sweep", help="only this sweep")
        command.set_defaults(command=function)
        if name == "run":
            command.add_argument("--engine", help="only this engine")
            command.add_argument(
                "--retry-invalid", action="store_true", help="measure cells again that were recorded as invalid"
            )
        if name == "summary":
            command.add_argument("--json", action="store_true", help="a JSON list instead of a table")

    replay_command.add_parser(commands)
    simulate_command.add_parser(commands)
    recommend_command.add_parser(commands)
    audit_command.add_parser(commands)
    claims_command.add_parser(commands)
    return top


def _doctor(_: argparse.Namespace) -> int:
    from batchlab import doctor

    return doctor.main()


def _plan(args: argparse.Namespace) -> int:
    study = open_study(args.scenario)
    cells = study.cells(args.sweep)
    left = study.missing(args.sweep, tell=_say)
    estimator = estimate.fit(study.store, study.cells())
    absent = {c.id for c in left}
    rows = [
        {
            "sweep": p.sweep,
            "engine": p.engine,
            "repeat": p.repeat,
            "cell": p.cell.id,
            "what": p.cell.describe(),
            "requests": p.cell.num_requests,
            "state": "missing" if p.cell.id in absent else "recorded",
            "about_s": round(estimator.seconds(p.cell), 1),
        }
        for p in study.planned
        if args.sweep in (None, p.sweep)
    ]
    print(pd.DataFrame(rows).to_string(index=False))
    real = [c for c in left if c.transport != SIMULATED]
    starts = len({c.launch_key() for c in real})
    time_left = estimate.clock(estimator.total(left))
    basis = (
        f"fitted on {estimator.fitted_on} recorded cells" if estimator.fitted_on else "a guess: nothing is recorded yet"
    )
    print(
        f"\n{study.scenario.name}: {len(cells)} cells, {len(cells) - len(left)} recorded, {len(left)} missing"
        + (
            f": about {time_left}, {starts} engine start{'s' * (starts != 1)} included ({basis})"
            if left
            else ""
        )
    )
    if real and (reason := study.can_measure()):
        print(f"not here: {reason}")
    return 0


def _run(args: argparse.Namespace) -> int:
    study = open_study(args.scenario)
    if args.engine and args.engine not in study.scenario.engines:
        raise UsageError(f"--engine {args.engine}: {study.scenario.path} has {', '.join(study.scenario.engines)}")
    outcome = study.measure(args.sweep, engine=args.engine, retry_invalid=args.retry_invalid, tell=_say)
    for engine, reason, tail in outcome.failures:
        _say(f"batchlab: {engine}: {EngineError(reason, tail).told()}")
    if outcome.simulated:
        _say(f"{study.scenario.name}: {outcome.simulated} cells simulated")
    if outcome.measured or not outcome.simulated:
        _say(f"{study.scenario.name}: {outcome.measured} cells measured, {outcome.invalid} of them invalid")
    if outcome.failures and not outcome.measured:
        return 2
    return 1 if outcome.failures or outcome.absent else 0


def _summary(args: argparse.Namespace) -> int:
    study = open_study(args.scenario)
    frame = study.frame(args.sweep).drop_duplicates("cell")
    rows = summary_rows(frame[frame["recorded"].astype(bool)])
    if args.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
        return 0
    short = [
        "dataset",
        "max_batch_size",
        "max_num_tokens",
        "request_rate",
        "transport",
        "output_throughput_tok_s",
        "ttft_p50_ms",
        "tpot_p50_ms",
        "running_batch_mean",
        "completed",
        "failed",
        "valid",
    ]
    print(
        pd.DataFrame(rows, columns=short).to_string(index=False, float_format="{:.1f}".format)
        if rows
        else f"{study.scenario.name}: nothing is recorded; `python -m batchlab run {study.scenario.name}` measures"
    )
    _hint_missing(study, frame)
    return 0


def _hint_missing(study: Study, frame: pd.DataFrame) -> None:
    absent = int((~frame["recorded"].astype(bool)).sum())
    if absent:
        _say(f"{study.scenario.name}: {absent} of {len(frame)} cells are not recorded")


def summary_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The recorded cells of a frame as plain objects: coordinates, then the summary keys; null where one does
    not apply."""
    keys = (*COORDINATES, *metrics.SUMMARY_KEYS, *metrics.EXTRA_KEYS, "seed", "sweep")
    return [{key: _json_value(key, row[key]) for key in keys} for row in frame.to_dict("records")]


def _json_value(key: str, value: Any) -> Any:
    if key == "request_rate":
        return "inf" if math.isinf(value) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and key in (
        "input_len",
        "output_len",
        "completed",
        "failed",
        "preemptions",
        "iterations",
    ):
        return int(value)
    return value.item() if hasattr(value, "item") else value


def _say(line: str) -> None:
    print(line, file=sys.stderr)
