"""A notebook's parameters, checked before it runs: Papermill itself only warns about a misspelt name."""

import difflib
import json
import math
from pathlib import Path
from typing import Any

import nbformat
import papermill

from batchlab import scenario
from batchlab.errors import UsageError

INJECTED_ID = "injected-parameters"


def read_source(path: Path) -> nbformat.NotebookNode:
    """The notebook; UsageError when there is none, or it is no notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such notebook") from None
    except Exception as error:  # nbformat raises many kinds, among them its own and json's
        raise UsageError(f"{path}: not a notebook ({' '.join(str(error).split())[:120]})") from None


def declared(path: Path) -> dict[str, str]:
    """The names in the cell tagged `parameters`, with their defaults as source text."""
    read_source(path)
    found = papermill.inspect_notebook(literal(path))
    return {name: about["default"] for name, about in found.items()}


def literal(path: Path) -> str:
    """The path for Papermill, which would otherwise format what stands between braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def check(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The values to inject; UsageError for a name it lacks or a value that its JSON could not hold."""
    known = declared(path)
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"it has: {', '.join(known) or 'none'}"
            raise UsageError(f"{path}: no parameter `{name}`; {hint}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(
                f'{path}: parameter `{name}`: write "inf" or null, a notebook cannot hold {value}'
            )
    if "scenario" in given:
        scenario.load(given["scenario"])
    return given


def parse(text: str) -> tuple[str, Any]:
    """`name=value` from the command line, the value as JSON where it is JSON, else as text."""
    name, equals, raw = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--set {text}: write --set name=value")
    try:
        return name, json.loads(raw, parse_constant=lambda word: word)
    except ValueError:
        return name, raw


def pin_injected(notebook: nbformat.NotebookNode) -> None:
    """Gives the injected cell the same id in every run: a new one each time would make equal runs differ."""
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = INJECTED_ID
