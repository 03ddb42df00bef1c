"""`python -m batchlab.report ahead|execute|render|index`: notebooks, executed and as one HTML file."""

import argparse
import os
import sys
from collections.abc import Sequence

from batchlab.errors import UsageError
from batchlab.report import warm


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m batchlab.report", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    execute = commands.add_parser(
        "execute", help="run a notebook for a scenario; the copy goes to build/SCENARIO/"
    )
    execute.add_argument("notebook", metavar="NOTEBOOK", help="a path, a name or a number in notebooks/ (02)")
    execute.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another parameter")
    execute.add_argument("--timeout", type=int, metavar="SECONDS", help="time limit of one notebook cell")
    render = commands.add_parser("render", help="one HTML file of a scenario's executed notebooks")
    ahead = commands.add_parser("ahead", help="compute what notebooks share; measures nothing")
    for command in (execute, render, ahead):
        command.add_argument(
            "--scenario", required=True, help="a name in data/scenarios/, or a path to a .yml file"
        )
    commands.add_parser("index", help="build/index.html, the list of reports")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 a notebook failed, 2 bad input. The written file's path goes to standard output."""
    args = parser().parse_args(argv)
    # nbformat's validator checks no formats, but importing it compiles 38 grammars of web addresses for more than a
    # second, in each notebook's process; jsonschema does without them where the package that has them is not installed
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    # imported late, each only where it is used: Papermill and nbconvert take a second or two to load
    from batchlab.report import execute
    from batchlab.report.parameters import parse

    try:
        if args.command == "ahead":
            from batchlab.report.ahead import ahead

            ahead(args.scenario)
            return 0
        if args.command == "execute":
            if args.timeout is not None and args.timeout <= 0:
                raise UsageError(f"--timeout {args.timeout}: give a positive number of seconds")
            extra = dict(parse(text) for text in args.set)
            path = execute.execute(
                execute.find(args.notebook),
                args.scenario,
                extra=extra,
                timeout_s=args.timeout or execute.CELL_TIMEOUT_S,
            )
        elif args.command == "render":
            from batchlab.report.render import render

            path = render(args.scenario)
        else:
            from batchlab.report.index import index

            path = index()
    except UsageError as error:
        print(f"batchlab: {error}", file=sys.stderr)
        return 2
    except execute.NotebookFailed as error:
        print(f"batchlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("batchlab: stopped; what is recorded stays, the next run resumes", file=sys.stderr)
        return 130
    print(execute.shown(path))
    return 0


if __name__ == "__main__":
    status = warm.ask("report", sys.argv[1:]) if warm.ADDRESS in os.environ else None
    sys.exit(main() if status is None else status)
