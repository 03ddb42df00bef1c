"""The audit: what cannot be is found with the arithmetic of the published tables, and nothing in a consistent table."""

import json
import math
import subprocess
import sys

import pandas as pd
import pytest

from batchlab import audit, paths, plots
from batchlab.audit.checks import Setting
from batchlab.audit.roofs import Roofs
from batchlab.errors import UsageError
from batchlab.sim.hardware import load_card
from batchlab.sim.memory import load_quantization
from batchlab.sim.models import load_model
from batchlab.study import open_study

A100 = load_card("a100_sxm")
LLAMA = Roofs(A100, load_model("llama-3-8b"), load_quantization("none", A100))


def findings(name: str, *only: str) -> list[audit.Finding]:
    return audit.check(audit.load(paths.PUBLISHED / f"{name}.csv"), only=only)


def rows(**columns: object) -> pd.DataFrame:
    """A table of one row; the defaults are a run that is possible."""
    row = {"input_len": 2048.0, "output_len": 128.0, "num_requests": 1000.0, "request_rate_req_s": math.inf}
    return pd.DataFrame([row | {k: v if isinstance(v, str) else float(v) for k, v in columns.items()} | {"line": 2}])


def test_claim_31_more_than_the_card_computes() -> None:
    found = findings("s1-table-1", "compute_roof")
    assert [(f.row.split(",")[0], f.printed) for f in found] == [("vllm", 1945), ("tensorrt-llm", 2103)]
    assert found[0].bound == pytest.approx(1258, abs=1)
    assert [round(100 * f.factor) for f in found] == [155, 167]


def test_claim_32_a_step_shorter_than_reading_its_memory() -> None:
    (found,) = findings("s1-table-1", "decode_step")
    assert found.row.startswith("tensorrt-llm, (2048, 2048)") and found.printed == 14.2
    assert found.bound == pytest.approx(14.57, abs=0.01) and "36.5 requests running" in found.message


def test_claim_33_a_queue_of_minutes() -> None:
    found = findings("s1-ttft", "queue")
    assert len(found) == 8
    assert min(f.factor for f in found) > 10 and max(f.factor for f in found) > 500
    told = " ".join(f.message for f in found)
    assert "take 209 s" in told and "take 5,907 s" in told


def test_claim_34_more_tokens_than_slots_make_and_far_fewer() -> None:
    found = findings("s1-table-2", "batch_over_tpot")
    # B / TPOT is 66, 72, 124 and 143, and each request's first token comes on top: 128/127
    assert [round(f.bound * 127 / 128) for f in found] == [66, 72, 124, 143]
    assert [f.printed for f in found] == [180, 175, 210, 205]
    idle = {f.row.split(", ")[-1] for f in findings("s1-table-2", "idle_slots")}
    assert idle == {"max_batch_size 8", "max_batch_size 16"}


def test_claim_36_the_largest_batch_under_the_limit() -> None:
    (found,) = findings("s1-table-2", "stated_limit")
    assert found.row.startswith("tensorrt-llm") and "is 16 (18.9 ms), not 8" in found.message


def test_claim_37_more_out_than_in() -> None:
    found = findings("s1-table-3", "offered_load")
    assert [(f.printed, f.bound) for f in found] == [(198, 128), (210, 128), (590, 384), (630, 384), (702, 640)]
    assert not findings("s1-table-3", "stated_limit")


def test_claim_44_more_than_the_cache_holds() -> None:
    found = findings("s2-vllm", "memory_roof")
    long = [f for f in found if "(200, 300)" in f.row]
    assert len(long) == 4 and all(f.bound / 300 < 5 for f in long) and long[-1].factor > 4.5
    assert {f.check for f in findings("s2-vllm")} == {"memory_roof", "compute_roof"}


def test_printed_ratios_of_s1_and_s2_are_right() -> None:
    assert [findings(name, "ratio") for name in ("s1-table-1", "s2-tgi")] == [[], []]


def test_nothing_is_found_in_what_was_measured() -> None:
    frame = open_study("h200").frame()
    table = audit.of_points(plots.points(frame[frame["evidence"] == "measured"]))
    assert len(table) > 50
    assert audit.check(table) == []
    assert audit.check(table.assign(output_throughput_tok_s=table["output_throughput_tok_s"] * 8)) != []


def test_ratio_checks_the_row_of_the_same_run() -> None:
    table = pd.concat(
        [
            rows(engine="a", output_throughput_tok_s=100),
            rows(engine="b", output_throughput_tok_s=150, ratio_over="a", output_throughput_tok_s_ratio=1.4),
            rows(engine="a", input_len=64, output_throughput_tok_s=107),
        ],
        ignore_index=True,
    )
    (found,) = audit.check(table, only=("ratio",))
    assert found.severity == "contradiction" and "150 over 100 is 1.5, not 1.4" in found.message
    right = table.replace({"output_throughput_tok_s_ratio": {1.4: 1.5}})
    assert audit.check(right, only=("ratio",)) == []
    alone = table[table["engine"] == "b"]
    assert audit.check(alone, only=("ratio",)) == []


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"output_throughput_tok_s": 1250, "request_throughput_req_s": 10}, []),
        ({"output_throughput_tok_s": 1250, "request_throughput_req_s": 8}, ["two_throughputs"]),
        ({"ttft_mean_ms": 90, "request_rate_req_s": 1}, ["prefill_time"]),
        ({"ttft_mean_ms": 110, "request_rate_req_s": 1}, []),
        ({"tpot_mean_ms": 7}, ["decode_step"]),
        ({"tpot_mean_ms": 8}, []),
        ({"gpu_memory_gb": 90}, ["card_memory"]),
        ({"gpu_memory_gb": 80}, []),
        # 5 req/s came, 4 were served: 200 s of arrivals take 250; the last one waits about 48 s, the mean half of that
        (
            {"request_rate_req_s": 5, "output_throughput_tok_s": 512, "ttft_mean_ms": 1000, "tpot_mean_ms": 20},
            ["backlog"],
        ),
        ({"request_rate_req_s": 5, "output_throughput_tok_s": 512, "ttft_mean_ms": 24000, "tpot_mean_ms": 20}, []),
        ({"request_rate_req_s": 5, "output_throughput_tok_s": 630, "ttft_mean_ms": 1000, "tpot_mean_ms": 20}, []),
    ],
)
def test_bounds(columns: dict, expected: list[str]) -> None:
    told = {"request_throughput_req_s", "output_throughput_tok_s"} & set(columns)
    table = rows(**columns) if told else rows(**columns, request_throughput_req_s=0.9)
    assert [f.check for f in audit.check(table, Setting("a100_sxm", "llama-3-8b"))] == expected


def test_idle_slots_allows_for_the_token_budget() -> None:
    slow = {"max_batch_size": 512, "tpot_mean_ms": 31.2, "output_throughput_tok_s": 4346, "input_len": 768}
    assert [f.check for f in audit.check(rows(**slow, num_requests=1024))] == ["idle_slots"]
    assert audit.check(rows(**slow, num_requests=1024, max_num_tokens=1024)) == []


def test_roofs() -> None:
    assert LLAMA.step_weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert LLAMA.kv_token_bytes == 128 * 1024
    assert LLAMA.request_flops(2048, 128) == pytest.approx(31.7e12, rel=2e-3)
    assert LLAMA.kv_tokens(kv_cache_gib=1) == 8192


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchlab", "audit", *map(str, arguments)],
        cwd=paths.ROOT / "lib",
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command(tmp_path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        "# a note\n\nengine,max_batch_size,tpot_mean_ms,output_throughput_tok_s,output_len\nx, 4, 10, 900, 100\n"
    )
    done = run(file)
    assert done.returncode == 0
    assert done.stdout == (
        f"{file}:4: impossible (batch_over_tpot): x, max_batch_size 4: 900 tok/s, but 4 requests at 10 ms "
        "a token make 404 tok/s at most\n"
    )
    assert "1 rows, 1 findings" in done.stderr and "--hardware and --model" in done.stderr
    (told,) = json.loads(run(file, "--json").stdout)
    assert told["check"] == "batch_over_tpot" and told["line"] == 4 and told["printed"] == 900
    assert json.loads(
        run(file, "--json", "--tolerance", "0.9999", "--hardware", "a100_sxm", "--model", "llama-3-8b").stdout
    )
    assert "tpot_mean_ms" in run("--columns").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tpot,max_batch_size\n1,2\n", "unknown column `tpot`; did you mean `tpot_mean_ms`?"),
        ("throughput\n1\n", "unknown column `throughput`; did you mean `output_throughput_tok_s`?"),
        ("qqq,tpot_mean_ms\n1,2\n", "unknown column `qqq`; there are: engine"),
        ("max_batch_size\n4\n", "no column holds a result; it needs at least one of: output_throughput_tok_s"),
        ("tpot_mean_ms,tpot_mean_ms\n4,4\n", "column `tpot_mean_ms` is there twice"),
        ("tpot_mean_ms,output_len\n4\n", "line 2 has 1 fields, the header names 2"),
        (
            "tpot_mean_ms\n4 ms\n",
            "line 2, tpot_mean_ms: `4 ms` is not a number above 0, without thousands separators or units",
        ),
        ('tpot_mean_ms\n"1,200"\n', "`1,200` is not a number above 0"),
        ("tpot_mean_ms\n-1\n", "`-1` is not a number above 0"),
        ("tpot_mean_ms\ninf\n", "`inf` is not a number above 0"),
        ("tpot_mean_ms\n", "holds no row"),
        ("", "holds no row"),
    ],
)
def test_bad_tables_are_one_line(text: str, expected: str, tmp_path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError) as caught:
        audit.load(tmp_path / "t.csv")
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "t.csv"))


def test_other_bad_input_is_one_line_and_exit_2(tmp_path) -> None:
    good = tmp_path / "t.csv"
    good.write_text("tpot_mean_ms,hardware,model\n4,a100_sxm,llama-3-8b\n")
    for arguments, expected in (
        ((tmp_path / "none.csv",), "none.csv: cannot be read (No such file or directory)"),
        ((good, "--hardware", "a200"), "unknown hardware 'a200'"),
        ((good, "--model", "llama-9"), "unknown model 'llama-9'"),
        ((good, "--quantization", "fp8"), "a100_sxm has no fp8 arithmetic"),
        ((good, "--tolerance", "5"), "--tolerance: 5 is not a number from 0 to below 1"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and expected in done.stderr and done.stdout == "", done.stderr
        assert done.stderr.count("\n") == 1


def test_unknown_check_is_named() -> None:
    with pytest.raises(UsageError, match="no check `roof`; there are: batch_over_tpot"):
        audit.check(rows(tpot_mean_ms=4), only=("roof",))
