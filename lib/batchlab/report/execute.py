"""Runs a notebook for a scenario with Papermill: a copy in build/<scenario>/, or a named failure."""

import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import nbformat
import papermill

from batchlab import paths
from batchlab.errors import UsageError
from batchlab.report import parameters
from batchlab.report.kernel import own_kernel

CELL_TIMEOUT_S = 6 * 3600  # of one notebook cell: a whole plan may be measured in it
START_TIMEOUT_S = 120
STARTS = 2  # a kernel that does not start is tried once more
PASSING = re.compile(r"[^\n]*\r")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class NotebookFailed(Exception):
    """A notebook that did not run to its end; the message is one line naming notebook, cell and error."""


class Relay:
    """Passes a kernel's progress on: as it is to a terminal, finished lines only to anything else."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.rest, self.live = stream, "", stream.isatty()

    def write(self, text: str) -> int:
        if self.live:
            return self.stream.write(text)
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.stream.write(last_state(line) + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def last_state(line: str) -> str:
    """What a terminal would show at the end of a line that was rewritten in place."""
    return ESCAPES.sub("", line.rstrip("\r").rsplit("\r", 1)[-1])


def target_of(notebook: Path, scenario: str) -> Path:
    """build/<scenario>/NN.ipynb for notebooks/NN-name.ipynb; other notebooks keep their name."""
    number = re.match(r"\d+(?=-)", notebook.stem)
    return paths.BUILD / scenario_name(scenario) / f"{number[0] if number else notebook.stem}.ipynb"


def scenario_name(scenario: str | Path) -> str:
    """The name of a scenario given by name or by path."""
    return Path(scenario).stem if is_path(scenario) else str(scenario)


def is_path(scenario: str | Path) -> bool:
    """Whether a scenario is given by path, as `scenario.load` tells it."""
    return str(scenario).endswith((".yml", ".yaml"))


def execute(
    notebook: Path,
    scenario: str,
    *,
    extra: dict[str, Any] | None = None,
    timeout_s: int = CELL_TIMEOUT_S,
    progress: TextIO | None = None,
) -> Path:
    """Runs `notebook` from the repository's root with `scenario` injected; the executed copy's path.

    The copy is written under a .part name and renamed when every cell has run. UsageError for bad parameters;
    NotebookFailed otherwise, and what ran until then is kept as NN.failed.ipynb.
    """
    if is_path(scenario):
        scenario = str(Path(scenario).resolve())  # the notebook runs in another directory
    values = parameters.check(notebook, {"scenario": scenario, **(extra or {})})
    target = target_of(notebook, scenario)
    part, failed = target.with_suffix(".part.ipynb"), target.with_suffix(".failed.ipynb")
    target.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    try:
        run(notebook, part, values, timeout_s, Relay(progress or sys.stderr))
    except Exception as error:  # whatever stopped it, the message names the cell and the copy is kept
        if part.exists():
            where = where_stopped(part)
            tidy(part, failed)
            part.unlink(missing_ok=True)
            kept = f"; kept as {shown(failed)}"
        else:
            where, kept = "before the first cell", ""
        raise NotebookFailed(f"{notebook.name} ({scenario}): {where}: {one_line(error)}{kept}") from error
    tidy(part, target)
    part.unlink()
    failed.unlink(missing_ok=True)
    return target


def run(notebook: Path, part: Path, values: dict[str, Any], timeout_s: int, relay: Relay) -> None:
    """Papermill, with a second try when the kernel did not start. No bar of its own: the study shows one."""
    with own_kernel() as kernel:
        for attempt in range(1, STARTS + 1):
            try:
                papermill.execute_notebook(
                    parameters.literal(notebook.resolve()),
                    parameters.literal(part),
                    parameters=values,
                    kernel_name=kernel,
                    cwd=paths.ROOT,
                    progress_bar=False,
                    stderr_file=relay,
                    start_timeout=START_TIMEOUT_S,
                    execution_timeout=timeout_s,
                )
                return
            except papermill.PapermillExecutionError:
                raise
            except Exception as error:
                if attempt == STARTS or any_cell_ran(part):
                    raise
                relay.write(f"{notebook.name}: the kernel did not start ({one_line(error)}); once more\n")


def any_cell_ran(part: Path) -> bool:
    """Whether the unfinished copy shows that a cell was begun."""
    if not part.exists():
        return False
    cells = nbformat.read(part, as_version=4).cells
    return any(cell.cell_type == "code" and state(cell) != "pending" for cell in cells)


def state(cell: nbformat.NotebookNode) -> str:
    """Papermill's note on a cell: pending, running, completed or failed."""
    return str(cell.metadata.get("papermill", {}).get("status") or "pending")


def where_stopped(part: Path) -> str:
    """"cell 4 (`study.ensure(…)`)": the last cell that was begun, the source's code cells counted from 1.

    Papermill marks the cell in which a kernel dies or a time limit ends as completed, so marks do not tell more.
    """
    cells = [c for c in nbformat.read(part, as_version=4).cells
             if c.cell_type == "code" and "injected-parameters" not in c.metadata.get("tags", [])]
    begun = [i for i, c in enumerate(cells) if state(c) != "pending"]
    if not begun:
        return "before the first cell"
    first = next((line for line in cells[begun[-1]].source.splitlines() if line.strip()), "")
    return f"cell {begun[-1] + 1} (`{first[:60]}`)"


def one_line(error: BaseException) -> str:
    """An error as one line: a cell's own error, a dead kernel, a time-out."""
    if isinstance(error, papermill.PapermillExecutionError):
        return " ".join(f"{error.ename}: {ESCAPES.sub('', error.evalue)}".split())
    name, text = type(error).__name__, " ".join(str(error).split())
    if name == "DeadKernelError":
        return "the kernel died"
    if name == "CellTimeoutError":
        return "the cell ran past its time limit (--timeout)"
    return f"{name}: {text[:300]}" if text else name


def tidy(part: Path, target: Path) -> None:
    """Writes the copy under its own name: injected cell's id pinned, progress as finished lines."""
    notebook = nbformat.read(part, as_version=4)
    parameters.pin_injected(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    whole = target.with_name(f".{target.name}.{os.getpid()}.part")
    nbformat.write(notebook, whole)
    os.replace(whole, target)


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Neighbouring pieces of one stream as one output, each line as a terminal would leave it."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if kept and output.output_type == "stream" == kept[-1].output_type and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = "\n".join(last_state(line) for line in output.text.split("\n"))
    return kept


def shown(path: Path) -> str:
    """The path from the repository's root where it lies inside."""
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


def find(name: str) -> Path:
    """A notebook by path, by name or by number (`02`); UsageError where that is none or several."""
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path
    found = sorted(paths.NOTEBOOKS.glob(f"{path.stem}*.ipynb"))
    if len(found) != 1:
        there = ", ".join(p.stem for p in sorted(paths.NOTEBOOKS.glob("*.ipynb")))
        raise UsageError(
            f"notebook {name}: {'several match' if found else 'no such notebook'}; there are: {there}"
        )
    return found[0]
