"""The benchmark of the client: its runner against the ground-truth server, its CPU accounts, its table."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "client"

needs_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or not shutil.which("taskset"), reason="needs two cores and taskset"
)


def script(name, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARK / name, *map(str, arguments)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done


def rows(results):
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


@needs_cores
def test_a_point_is_measured_once_and_reported(tmp_path):
    results = tmp_path / "results.csv"
    asked = ("--clients", "batchlab", "--streams", 2, "--gaps", 40, "--repeats", 2, "--results", results)
    script("run.py", *asked)
    measured = rows(results)
    assert [(r["client"], r["streams"], r["repeat"], r["completed"]) for r in measured] == [
        ("batchlab", "2", "0", "2"),
        ("batchlab", "2", "1", "2"),
    ]
    for row in measured:
        # 64 tokens, 40 ms apart: a client that missed or doubled one would be off by more than a percent
        assert row["output_len"] == "64" and abs(float(row["tpot_bias_pct"])) < 1
        assert float(row["ttft_p50_bias_ms"]) > 0 and float(row["cpu_us_per_chunk"]) > 0
    script("run.py", *asked)
    assert rows(results) == measured

    script("report.py", "--results", results)
    table = (tmp_path / "results.md").read_text()
    assert table.count("| batchlab |") == 1 and "2 repeats" in table
    first = (tmp_path / "figure.svg").read_bytes()
    script("report.py", "--results", results)
    assert (tmp_path / "figure.svg").read_bytes() == first and (tmp_path / "figure.png").stat().st_size > 10_000


@needs_cores
def test_the_cpu_of_orphans_and_of_processes_in_other_sessions_is_counted(tmp_path):
    burn = "import time\\nwhile time.process_time() < 0.3: pass"
    leave = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', '{burn}'], start_new_session=True)\n"
    code = (
        f"import sys, os; sys.path.insert(0, {str(BENCHMARK)!r})\n"
        "from pathlib import Path; import tree\n"
        "tree.adopt_orphans()\n"
        "core = max(os.sched_getaffinity(0))\n"
        f"ran = tree.run([sys.executable, '-c', {leave!r}], core=core, environment=dict(os.environ),\n"
        f"               folder=Path({str(tmp_path)!r}), timeout_s=60, others=set())\n"
        "assert ran.code == 0 and ran.cpu_s[-1] >= 0.3, (ran.code, ran.cpu_s[-1])\n"
        "assert (ran.cpu_s[1:] >= ran.cpu_s[:-1]).all()\n"
        "assert ran.cpu_from(ran.times_ns[0]) == ran.cpu_s[-1]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_report_without_results_says_what_to_do(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARK / "report.py", "--results", tmp_path / "none.csv"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "measure first" in done.stderr
