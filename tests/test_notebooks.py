"""The notebooks: clean sources of a common shape, and executed copies that a second run repeats."""

import ast
import subprocess
import sys

import nbformat
import papermill
import pytest

from batchlab import paths

SOURCES = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
FIRST = ("title", "parameters", "imports", "load")


def read(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book


def test_there_are_notebooks():
    assert [p.stem[:2] for p in SOURCES][:5] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_sources_are_clean(path):
    book = read(path)
    assert book.metadata.kernelspec.name == "python3" and set(book.metadata) == {"kernelspec", "language_info"}
    for cell in book.cells:
        assert set(cell.metadata) <= {"tags"}, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_cells_have_stable_ids_that_say_what_they_are(path):
    ids = [cell.id for cell in read(path).cells]
    assert len(set(ids)) == len(ids)
    assert all(part.isalnum() for i in ids for part in i.split("-")) and all(not i[0].isdigit() for i in ids)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_notebook_has_the_common_shape(path):
    cells = read(path).cells
    code = [c for c in cells if c.cell_type == "code"]
    assert len(code) < 15
    assert tuple(c.id for c in cells[:4]) == FIRST
    title = cells[0].source
    assert title.startswith("# ") and "**Question.**" in title and title.count("?") >= 1 and "article" in title
    assert sum("parameters" in c.metadata.get("tags", []) for c in cells) == 1
    assert "check" in [c.id for c in code]
    for cell in code:
        ast.parse(cell.source)
        assert len(cell.source.splitlines()) <= 12, f"{cell.id}: logic belongs in the library"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_papermill_sees_the_parameters(path):
    found = papermill.inspect_notebook(str(path))
    assert found["scenario"]["default"] == '"cpu"'
    for name, about in found.items():
        assert "|" not in about["inferred_type_name"] and "=" not in about["help"], name


def nbval(quick_build, notebooks, folder):
    """pytest --nbval on executed copies: run again from their own folder, every output compared."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "conftest", "-p", "no:cacheprovider",
         "--nbval-sanitize-with", str(paths.ROOT / "tests/nbval_sanitize.cfg"), "--rootdir", str(folder),
         "-c", "/dev/null", "-q", *map(str, notebooks)],
        env=quick_build.env | {"PYTHONPATH": f"{quick_build.root}/lib:{paths.ROOT}/tests"}, cwd=folder,
        text=True, capture_output=True, timeout=280)


def test_executed_copies_hold_no_error_and_repeat(quick_build):
    done = nbval(quick_build, sorted(quick_build.build.glob("[0-9][0-9].ipynb")), quick_build.build)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_a_changed_number_would_be_seen(quick_build, tmp_path):
    book = nbformat.read(quick_build.build / "03.ipynb", as_version=4)
    reading = next(c for c in book.cells if c.id == "batch-reading")
    told = reading.outputs[0].data["text/html"]
    reading.outputs[0].data["text/html"] = told.replace(" ms", "0 ms", 1)
    nbformat.write(book, tmp_path / "03.ipynb")
    done = nbval(quick_build, [tmp_path / "03.ipynb"], tmp_path)
    assert done.returncode == 1 and "1 failed" in done.stdout
