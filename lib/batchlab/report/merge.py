"""Executed notebooks of a scenario as one: a section each, headings one level down, machinery left out."""

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

from batchlab.errors import UsageError

HIDDEN_TAGS = {"parameters", "injected-parameters", "remove-cell", "remove_cell"}
HEADING = re.compile(r"^(#{1,5})(\s)", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Section:
    """One notebook in the report: its title and the anchor that the contents list points to."""

    anchor: str
    title: str


def executed(folder: Path) -> list[Path]:
    """The executed notebooks in a build folder, in order, without failures and unfinished copies."""
    return sorted(p for p in folder.glob("*.ipynb") if not p.name.startswith(".") and p.name.count(".") == 1)


def failures(folder: Path) -> list[str]:
    """Names of notebooks whose last run failed."""
    return sorted(p.name.removesuffix(".failed.ipynb") for p in folder.glob("*.failed.ipynb"))


def merge(notebooks: list[Path]) -> tuple[nbformat.NotebookNode, list[Section]]:
    """One notebook whose cells know their section (`metadata.section`), and the sections."""
    whole = nbformat.v4.new_notebook()
    sections = []
    for path in notebooks:
        source = nbformat.read(path, as_version=4)
        whole.metadata = whole.metadata or source.metadata
        section = Section(f"part-{path.stem}", title_of(source) or path.stem)
        sections.append(section)
        for cell in source.cells:
            if HIDDEN_TAGS & set(cell.metadata.get("tags", [])):
                continue
            if cell.cell_type == "markdown":
                cell.source = deeper(without_title(cell.source, section.title))
            if not cell.source.strip():
                continue
            if joins(whole.cells[-1] if whole.cells else None, cell, section):
                whole.cells[-1].source += "\n\n" + cell.source
                whole.cells[-1].outputs += cell.outputs
                continue
            cell.metadata["section"] = section.anchor
            cell["id"] = f"{path.stem}-{cell.get('id', len(whole.cells))}"
            whole.cells.append(cell)
    return whole, sections


def joins(before: nbformat.NotebookNode | None, cell: nbformat.NotebookNode, section: Section) -> bool:
    """Whether code continues the code before it because nothing was shown in between: one fold instead of two."""
    if before is None or before.metadata.get("section") != section.anchor:
        return False
    if not before.cell_type == cell.cell_type == "code" or cell.metadata.get("tags"):
        return False
    return all(o.output_type == "stream" and o.name == "stderr" for o in before.outputs)


def title_of(notebook: nbformat.NotebookNode) -> str | None:
    """The first level-one heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (
            match := re.search(r"^#\s+(.+?)\s*$", cell.source, re.MULTILINE)
        ):
            return match[1]
    return None


def without_title(source: str, title: str) -> str:
    """The cell without the notebook's own title, which the section's heading repeats."""
    return re.sub(rf"\A\s*#\s+{re.escape(title)}\s*$", "", source, count=1, flags=re.MULTILINE)


def deeper(source: str) -> str:
    """Every heading one level down, code fences untouched."""
    pieces, at = [], 0
    for fence in FENCE.finditer(source):
        pieces += [HEADING.sub(r"#\1\2", source[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, HEADING.sub(r"#\1\2", source[at:])])


def need_some(folder: Path, scenario: str) -> list[Path]:
    """`executed`, or a UsageError that says how to get some."""
    found = executed(folder)
    if not found:
        raise UsageError(f"{folder}: holds no executed notebook; run `make report SCENARIO={scenario}`")
    return found
