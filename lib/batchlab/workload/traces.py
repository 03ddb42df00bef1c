"""Readers of recorded traces: arrival times and lengths of real requests.

azure     CSV of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens
          (https://github.com/Azure/AzurePublicDataset)
burstgpt  CSV of BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type
          (https://github.com/HPMLL/BurstGPT)
mooncake  JSONL of Mooncake: timestamp (ms), input_length, output_length, hash_ids of its prefix blocks of
          512 tokens (https://github.com/kvcache-ai/Mooncake)
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import numpy as np
import orjson

from batchlab.errors import UsageError

BLOCK = 512
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")
_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}

Row = tuple[int, float, int, int, tuple[int, ...]]  # line, seconds, input_len, output_len, hash_ids


@dataclass(frozen=True, slots=True)
class Trace:
    """times: float64 (n,), s from the first request; lengths: int64 (n, 2), input and output; blocks: the
    ids of each prompt's prefix blocks, None in formats without; notes: what was left out."""

    times: np.ndarray
    lengths: np.ndarray
    blocks: list[tuple[int, ...]] | None
    notes: list[str]


def read_trace(dataset: dict, count: int) -> Trace:
    """The first `count` requests of dataset["file"] in dataset["format"], `rate_scale` times as fast.
    Requests without a prompt or an answer (failed ones, in BurstGPT) are left out and counted in the notes.
    UsageError with file and line for anything that is not as the format says."""
    file, form = dataset.get("file"), dataset.get("format")
    if form not in ("azure", "burstgpt", "mooncake"):
        raise UsageError(f"trace format {form!r} is unknown; use azure, burstgpt or mooncake")
    scale = dataset.get("rate_scale") or 1.0
    if not scale > 0:
        raise UsageError(f"dataset rate_scale {scale} must be greater than 0")
    rows, skipped = _take(file, form, count)
    times = np.array([row[1] for row in rows])
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        raise UsageError(f"{file}:{rows[back[0] + 1][0]}: its time is before that of the request above; sort the file")
    return Trace(
        times=(times - times[0]) / scale,
        lengths=np.array([[row[2], row[3]] for row in rows], np.int64),
        blocks=[row[4] for row in rows] if form == "mooncake" else None,
        notes=[f"{skipped} recorded requests without prompt or answer left out"] if skipped else [],
    )


def _take(file: str, form: str, count: int) -> tuple[list[Row], int]:
    rows: list[Row] = []
    skipped = 0
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as lines:
            for row in _mooncake(file, lines) if form == "mooncake" else _table(file, lines, form):
                if row[2] < 1 or row[3] < 1:
                    skipped += 1
                    continue
                rows.append(row)
                if len(rows) == count:
                    return rows, skipped
    except OSError as error:
        raise UsageError(f"trace {file}: {error.strerror}; give a path from the directory you start in") from None
    except UnicodeDecodeError:
        raise UsageError(f"trace {file} is not a text file; unpack it first") from None
    raise UsageError(f"{file} holds {len(rows)} usable requests, {count} are asked for: lower num_requests")


def _table(file: str, lines: TextIO, form: str) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    names = _COLUMNS[form]
    missing = [name for name in names if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{file}:1: no column {', '.join(missing)}; the format {form} needs {', '.join(names)}")
    try:
        for values in reader:
            when, prompt, answer = (values[name] or "" for name in names)
            where = f"{file}:{reader.line_num}"
            seconds = _moment(where, when) if form == "azure" else _number(where, names[0], when)
            yield reader.line_num, seconds, _whole(where, names[1], prompt), _whole(where, names[2], answer), ()
    except csv.Error as error:
        raise UsageError(f"{file}:{reader.line_num}: {error}; mend or delete the line") from None


def _mooncake(file: str, lines: TextIO) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{where}: not JSON ({error}); mend or delete the line") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where}: not a JSON object; mend or delete the line")
        names = ("timestamp", "input_length", "output_length")
        when, prompt, answer = (_given(where, value, name) for name in names)
        blocks = value.get("hash_ids") or ()
        if not isinstance(blocks, list | tuple) or not all(isinstance(block, int) for block in blocks):
            raise UsageError(f"{where}: hash_ids must be a list of whole numbers; mend or delete the line")
        if blocks and not (len(blocks) - 1) * BLOCK < prompt <= len(blocks) * BLOCK:
            raise UsageError(
                f"{where}: {len(blocks)} hash_ids do not fit input_length {prompt} in blocks of {BLOCK} tokens; "
                "mend or delete the line"
            )
        yield number, when / 1000, prompt, answer, tuple(blocks)


def _given(where: str, value: dict, name: str) -> int:
    number = value.get(name)
    if not isinstance(number, int | float) or isinstance(number, bool) or number < 0 or number != int(number):
        raise UsageError(f"{where}: {name} is {number!r}, not a whole number; mend or delete the line")
    return int(number)


def _moment(where: str, text: str) -> float:
    """Seconds since the epoch; any number of decimals (Azure writes seven)."""
    match = _MOMENT.fullmatch(text.strip())
    try:
        day, clock, decimals, zone = match.groups()
        moment = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}").astimezone(UTC)
    except (AttributeError, ValueError):
        raise UsageError(
            f"{where}: TIMESTAMP {text!r} is not like 2023-11-16 18:15:46.6805900; mend or delete the line"
        ) from None
    return moment.timestamp() + (int(decimals) / 10 ** len(decimals) if decimals else 0.0)


def _number(where: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{where}: {name} is {text!r}, not a number; mend or delete the line") from None


def _whole(where: str, name: str, text: str) -> int:
    value = _number(where, name, text)
    if value < 0 or value != int(value):
        raise UsageError(f"{where}: {name} is {text!r}, not a whole number of tokens; mend or delete the line")
    return int(value)
