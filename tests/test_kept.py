"""What is kept under build/kept: found again, never stale, never trusted when damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import synthetic_store
from batchlab import claims, kept, paths, store, study, summaries
from batchlab.claims import judging


@pytest.fixture
def opened(tmp_path, monkeypatch) -> study.Study:
    """The quick scenario with its invented records, and a build folder of its own."""
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    scenario = tmp_path / "quick.yml"
    scenario.write_text(synthetic_store.SCENARIO)
    synthetic_store.fill(scenario, tmp_path / "results")
    return study.open_study(scenario)


def files(kind: str) -> list[Path]:
    return sorted((paths.BUILD / "kept" / kept.CODE / kind).glob("*"))


def loads(monkeypatch) -> list[str]:
    """The ids of the cells whose records are read from now on."""
    read, load = [], store.Store.load
    monkeypatch.setattr(store.Store, "load", lambda self, cell_id: read.append(cell_id) or load(self, cell_id))
    return read


def test_a_summary_is_computed_once_and_comes_out_the_same(opened, monkeypatch):
    first, read = opened.frame(), loads(monkeypatch)
    again = opened.frame()
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    assert set(read) == set(first[~first["recorded"]]["cell"])
    assert len(files("summaries")) == first[first["recorded"]]["cell"].nunique() > 0


def test_a_changed_record_is_computed_anew(opened, monkeypatch):
    before = opened.frame()
    one, other = (c for c in opened.cells()[:2])
    kind = opened.store.load(one.id)
    changed = kind.meta | {"invalid_reasons": ["changed"]}
    opened.store.save(
        one, {k: v for k, v in changed.items() if k not in ("format", "cell")}, kind.requests, kind.iterations
    )
    read = loads(monkeypatch)
    after = opened.frame().set_index("cell")
    assert set(read) == {one.id, *before[~before["recorded"]]["cell"]}
    assert set(after.loc[[one.id], "valid"]) == {False}
    assert set(after.loc[[other.id], "valid"]) == set(before.set_index("cell").loc[[other.id], "valid"])


def test_a_record_under_another_cells_name_is_damage_though_its_content_is_known(opened):
    opened.frame()
    one, other = opened.cells()[:2]
    opened.store.path(other.id).write_bytes(opened.store.path(one.id).read_bytes())
    told: list[str] = []
    assert not summaries.summary(opened.store, other, told.append)["recorded"]
    assert "holds another cell than its name says" in told[0]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe", b'{"recorded": true}', b"null"])
def test_what_cannot_be_trusted_is_computed_again(opened, damage):
    first = opened.frame()
    for file in files("summaries"):
        file.write_bytes(damage)
    pd.testing.assert_frame_equal(first, opened.frame(), check_exact=True)
    assert all(json.loads(file.read_bytes())["recorded"] for file in files("summaries"))


def test_a_folder_that_cannot_be_written_costs_time_only(opened, monkeypatch):
    paths.BUILD.write_text("a file where the folder would be")
    assert opened.frame()["recorded"].any()


def test_no_json_is_not_kept(opened):
    kept.keep("things", "x", {"a": object()})
    assert kept.find("things", "x") is None and files("things") == []


def test_other_code_asks_for_another_folder_and_all_but_the_last_are_removed(opened, monkeypatch):
    for code in ("one", "two", "three"):
        monkeypatch.setattr(kept, "CODE", code)
        assert kept.find("things", "x") is None
        kept.keep("things", "x", code)
        assert kept.find("things", "x") == code
    assert {p.name for p in (paths.BUILD / "kept").iterdir()} == {"two", "three"}


def test_any_change_of_the_library_changes_the_code_digest(tmp_path):
    """In a copy, since the digest is taken when the library is imported."""
    for file in kept.__file__, paths.__file__:
        (tmp_path / "batchlab").mkdir(exist_ok=True)
        (tmp_path / "batchlab" / Path(file).name).write_bytes(Path(file).read_bytes())
    (tmp_path / "batchlab/__init__.py").touch()

    def code() -> str:
        command = [sys.executable, "-c", "from batchlab import kept; print(kept.CODE)"]
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, text=True,
                              capture_output=True, check=True).stdout  # fmt: skip

    first = code()
    assert code() == first
    (tmp_path / "batchlab/metrics.py").write_text("X = 1\n")
    second = code()
    (tmp_path / "batchlab/metrics.py").write_text("X = 2\n")
    assert len({first, second, code()}) == 3


def test_processes_side_by_side_keep_the_same_value(opened):
    """Each writes under a name of its own and renames: none ever reads half a file."""
    command = [sys.executable, "-c", (
        "import sys; from pathlib import Path; from batchlab import kept, paths\n"
            "paths.BUILD, kept.CODE = Path(sys.argv[1]), sys.argv[2]\n"
        "value = list(range(20000))\n"
        "for _ in range(100):\n"
        "    kept.keep('things', 'x', value)\n"
        "    assert kept.find('things', 'x') == value"), str(paths.BUILD), kept.CODE]  # fmt: skip
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    assert [f.name for f in files("things")] == ["x.json"]


def test_claims_are_judged_once_until_a_record_changes(opened, monkeypatch):
    first = claims.verdicts(claims.bodies([opened]))
    ran, tested = [], judging.tested
    monkeypatch.setattr(judging, "tested", lambda *given: ran.append(given[0].test) or tested(*given))
    assert claims.verdicts(claims.bodies([opened])) == first and ran == []
    for file in files("outcomes"):
        file.write_text('{"x": 1')
    assert claims.verdicts(claims.bodies([opened])) == first and ran
    ran.clear()
    opened.store.path(opened.cells()[0].id).unlink()
    claims.verdicts(claims.bodies([opened]))
    assert ran
