"""A table to audit: a CSV file with known columns, or the points of a study."""

import csv
import difflib
import json
import math
from pathlib import Path

import pandas as pd

from batchlab.errors import UsageError

# every number that a row may hold, and what it means; a blank field was not printed
COLUMNS = {
    "input_len": "tokens of a prompt",
    "output_len": "tokens of an answer",
    "num_requests": "requests of the run",
    "request_rate_req_s": "offered requests a second; inf: all at once",
    "max_batch_size": "most requests that may run at once",
    "max_num_tokens": "most tokens of an engine iteration",
    "output_throughput_tok_s": "output tokens a second",
    "request_throughput_req_s": "requests a second",
    "ttft_mean_ms": "mean time to first token",
    "tpot_mean_ms": "mean time per output token after the first",
    "running_batch_mean": "mean number of requests running",
    "gpu_memory_gb": "GPU memory in use, 10^9 bytes",
    "gpu_memory_utilization": "share of the card's memory that the engine may use",
    "kv_cache_gib": "memory of the KV cache, 2^30 bytes",
    "output_throughput_tok_s_ratio": "printed: this row's output throughput over that of `ratio_over`",
    "request_throughput_req_s_ratio": "printed: this row's request throughput over that of `ratio_over`",
    "tpot_mean_ms_ratio": "printed: this row's TPOT over that of `ratio_over`",
    "ttft_mean_ms_ratio": "printed: this row's TTFT over that of `ratio_over`",
    "tpot_limit_ms": "a limit on TPOT that the text reads off the table",
    "ttft_limit_ms": "a limit on TTFT that the text reads off the table",
    "stated_max_batch_size": "printed: the largest max_batch_size of this engine under tpot_limit_ms",
    "stated_request_rate_req_s": "printed: the highest request rate of this engine under ttft_limit_ms",
}
TEXT = {
    "engine": "the engine's name",
    "engine_version": "its release",
    "setting": "a name for what else differs between rows",
    "dataset": "a name for the lengths",
    "ratio_over": "the engine or setting that the printed ratios are over",
    "hardware": "the card (see `batchlab simulate --hardware`)",
    "model": "the model's shape, a name in data/models/",
}
FIGURES = ("output_throughput_tok_s", "request_throughput_req_s", "ttft_mean_ms", "tpot_mean_ms", "gpu_memory_gb")
WITHOUT_LIMIT = ("request_rate_req_s",)  # may be inf


def load(path: str | Path) -> pd.DataFrame:
    """A table from a CSV file: a row a run, a column of COLUMNS or TEXT each, lines that begin with # left out.

    Numbers are floats, NaN where a field is blank; `line` is the row's line in the file. UsageError, one line, for a
    file that cannot be read, a column that is not known, and a field that is no number above 0.
    """
    path = Path(path)
    try:
        lines = [(i, t) for i, t in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1) if t.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from None
    lines = [(i, t) for i, t in lines if not t.startswith("#")]
    if len(lines) < 2:
        raise UsageError(f"{path}: holds no row; the first line names the columns, each other line is a run")
    header = [name.strip() for name in next(csv.reader([lines[0][1]]))]
    _check_header(path, header)
    rows = [_row(path, header, number, text) for number, text in lines[1:]]
    return pd.DataFrame(rows)


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name in COLUMNS or name in TEXT:
            continue
        close = difflib.get_close_matches(name, [*COLUMNS, *TEXT], n=1, cutoff=0.5)
        close = close or [c for c in (*FIGURES, *COLUMNS, *TEXT) if name and c.split("_")[0] == name.split("_")[0]][:1]
        hint = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join([*TEXT, *COLUMNS])}"
        raise UsageError(f"{path}: unknown column `{name}`; {hint} (units are part of the names)")
    if twice := [name for name in header if header.count(name) > 1]:
        raise UsageError(f"{path}: column `{twice[0]}` is there twice; remove one")
    if not set(header) & set(FIGURES):
        raise UsageError(f"{path}: no column holds a result; it needs at least one of: {', '.join(FIGURES)}")


def _row(path: Path, header: list[str], number: int, text: str) -> dict[str, object]:
    fields = [field.strip() for field in next(csv.reader([text]))]
    if len(fields) != len(header):
        raise UsageError(f"{path}: line {number} has {len(fields)} fields, the header names {len(header)}")
    row: dict[str, object] = {"line": number}
    for name, field in zip(header, fields, strict=True):
        row[name] = (field or None) if name in TEXT else _number(path, name, number, field)
    return row


def _number(path: Path, name: str, line: int, field: str) -> float:
    if not field:
        return math.nan
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not value > 0 or (math.isinf(value) and name not in WITHOUT_LIMIT):
        finite = "" if name in WITHOUT_LIMIT else ", without thousands separators or units"
        raise UsageError(f"{path}: line {line}, {name}: `{field}` is not a number above 0{finite}")
    return value


def of_points(points: pd.DataFrame) -> pd.DataFrame:
    """The valid points of a study (`plots.points`) as a table to audit; `line` counts them."""
    good = points[points["valid"].astype(bool) & points["recorded"].astype(bool)].reset_index(drop=True)
    table = good.rename(columns={"request_rate": "request_rate_req_s"})
    if "engine_options" in table:
        table["kv_cache_gib"] = [json.loads(o).get("kv_cache_gib", math.nan) for o in table["engine_options"]]
    kept = table[[c for c in (*TEXT, *COLUMNS) if c in table]].copy()
    for name in COLUMNS:
        if name in kept:
            kept[name] = pd.to_numeric(kept[name])
    return kept.assign(line=range(1, len(kept) + 1))
