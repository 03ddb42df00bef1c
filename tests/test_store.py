"""A cell is on disk whole or not at all; damage is named, never used."""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from batchlab import measure, plan, records, scenario
from batchlab.errors import UsageError
from batchlab.store import DamagedCell, Store
from test_scenario import GOOD

CELLS = plan.unique(plan.expand(scenario.Scenario(name="x", path="x.yml", **GOOD)))
META = {
    "invalid_reasons": [],
    "checks": {"chunks": 3},
    "duration_s": 1.5,
    "note": None,
    "gpu": None,
    "provenance": {"commit": "abc"},
}


def tables(n=50):
    requests = [
        {
            "index": i,
            "input_len": 8,
            "output_len": 4,
            "scheduled_s": 0.0,
            "sent_s": 0.001 * i,
            "first_s": 0.5,
            "last_s": 0.9 + i,
            "tokens": 4,
            "first_tokens": 1,
            "chunks": 4,
            "chunk_us": [0, 100, 250, 400 + i],
            "chunk_tokens": [1, 1, 1, 1],
        }
        for i in range(n)
    ]
    requests[0] |= {"first_s": None, "last_s": None, "chunk_us": None, "chunk_tokens": None, "error": "broken"}
    its = [
        {
            "scheduled_s": 0.01 * i,
            "output_s": 0.01 * i + 0.009,
            "running": 4,
            "admitted": 4,
            "waiting": 0,
            "prefill_tokens": 0,
            "decode_tokens": 4,
            "kv_use": 0.25,
            "preemptions": 0,
            "max_batch_size": 4,
            "max_num_tokens": 64,
        }
        for i in range(n)
    ]
    return records.table(requests, records.REQUESTS), records.table(its, records.ITERATIONS)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    store, (requests, iterations) = Store(tmp_path), tables()
    store.save(CELLS[0], META, requests, iterations)
    loaded = store.load(CELLS[0].id)
    assert loaded.requests.schema == records.REQUESTS and loaded.iterations.schema == records.ITERATIONS
    assert loaded.meta["checks"] == {"chunks": 3}
    a, b = loaded.requests.to_pandas(), requests.to_pandas()
    assert (a["last_s"] - b["last_s"]).abs().max() < 1e-6  # times are kept to the microsecond
    assert a["first_s"].isna().tolist() == b["first_s"].isna().tolist()  # and null stays null
    assert [None if x is None else x.tolist() for x in a["chunk_us"]] == [
        None if x is None else x.tolist() for x in b["chunk_us"]
    ]
    assert (loaded.iterations.to_pandas()["kv_use"] == 0.25).all()


def test_a_record_older_than_a_column_has_nulls_in_it(tmp_path, monkeypatch):
    store, (requests, iterations) = Store(tmp_path), tables()
    store.save(CELLS[0], META, requests, iterations.drop_columns(["launched_s"]))
    loaded = store.load(CELLS[0].id).iterations
    assert loaded.schema == records.ITERATIONS and loaded["launched_s"].null_count == loaded.num_rows > 0
    store.save(CELLS[0], META, requests, iterations.drop_columns(["running"]))  # which is never null
    with pytest.raises(DamagedCell, match="damaged"):
        store.load(CELLS[0].id)


def test_equal_records_are_equal_bytes(tmp_path):
    for name in "ab":
        Store(tmp_path / name).save(CELLS[0], META, *tables())
    assert Store(tmp_path / "a").path(CELLS[0].id).read_bytes() == Store(tmp_path / "b").path(CELLS[0].id).read_bytes()


def test_a_missing_cell_is_a_key_error(tmp_path):
    with pytest.raises(KeyError):
        Store(tmp_path).load(CELLS[0].id)


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text", "wrong cell", "no table", "old format"])
def test_every_damage_is_named_and_measured_again(tmp_path, harm):
    store = Store(tmp_path)
    path = store.save(CELLS[0], META, *tables())
    whole = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "flip":
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("requests.parquet")
        whole[entry.header_offset + 200] ^= 0xFF
        path.write_bytes(whole)
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "text":
        path.write_text("hello")
    elif harm == "wrong cell":
        path.rename(store.path(CELLS[1].id))
    else:
        with zipfile.ZipFile(path) as archive:
            parts = {n: archive.read(n) for n in archive.namelist()}
        if harm == "no table":
            del parts["iterations.parquet"]
        else:
            parts["cell.json"] = parts["cell.json"].replace(b'"format": 1', b'"format": 99')
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, data)
    cell = CELLS[1] if harm == "wrong cell" else CELLS[0]
    with pytest.raises(DamagedCell, match=str(store.path(cell.id))):
        store.load(cell.id)
    told = []
    assert measure.missing([cell], store, tell=told.append) == [cell]
    assert len(told) == 1 and str(store.path(cell.id)) in told[0]


WRITER = textwrap.dedent("""
    import sys
    sys.path[:0] = sys.argv[2:]
    from pathlib import Path
    from test_store import CELLS, META, tables
    from batchlab.store import Store
    store, made = Store(Path(sys.argv[1])), tables(2000)
    print("ready", flush=True)
    while True:
        for cell in CELLS:
            store.save(cell, META, *made)
""")


def writer(folder):
    here = os.path.dirname(__file__)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), here, os.path.join(here, "..", "lib")], stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    return child


def test_kill_at_any_moment_leaves_only_whole_cells(tmp_path):
    rng, store = random.Random(7), Store(tmp_path)
    for _ in range(6):
        child = writer(tmp_path)
        time.sleep(rng.uniform(0.02, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        for cell_id in store.ids():
            store.load(cell_id)
    assert store.ids()
    with store.writing():
        assert not list(tmp_path.glob(".tmp-*"))  # the next run clears what the killed ones left


def test_a_second_run_is_refused_with_the_holder_named(tmp_path):
    store = Store(tmp_path)
    with (
        store.writing(),
        pytest.raises(UsageError, match=f"another run measures into it \\(process {os.getpid()}"),
        Store(tmp_path).writing(),
    ):
        pass
    with store.writing():
        pass


def test_a_killed_run_holds_nothing(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from batchlab.store import Store\n"
        "with Store(Path(sys.argv[1])).writing():\n  print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), os.path.join(os.path.dirname(__file__), "..", "lib")],
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"held\n"
    child.kill()
    child.wait()
    with Store(tmp_path).writing():
        pass


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    """A limit on the file's size stands in for the disk: the write fails in the same place, in the kernel."""
    store = Store(tmp_path)
    store.save(CELLS[1], META, *tables())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UsageError) as error:
            store.save(CELLS[0], META, *tables(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        "cannot be written" in str(error.value)
        and "free some space" in str(error.value)
        and "\n" not in str(error.value)
    )
    assert store.ids() == {CELLS[1].id} and not list(tmp_path.glob(".tmp-*"))
    store.load(CELLS[1].id)
