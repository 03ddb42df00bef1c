"""Recorded cells on disk: one ZIP file a cell, written whole or not at all.

`data/results/<hardware>/<cell id>.zip` holds cell.json (the cell, its provenance and checks), requests.parquet and
iterations.parquet. It is written under a temporary name, flushed, and renamed, so a kill at any moment leaves
either the whole cell or none of it. ZIP's checksums and the id in cell.json show damage; a damaged file is
named and measured again.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from batchlab import records
from batchlab.cell import Cell
from batchlab.errors import UsageError

FORMAT = 1
_EPOCH = (1980, 1, 1, 0, 0, 0)  # ZIP entries carry a date; a fixed one keeps equal records equal bytes


class DamagedCell(Exception):
    """A cell's file that cannot be trusted; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded cell. `meta` holds `cell`, `provenance`, `checks`, `invalid_reasons` and `duration_s`."""

    id: str
    meta: dict[str, Any]
    requests: pa.Table
    iterations: pa.Table


@dataclass(frozen=True, slots=True)
class Store:
    """The cells of one hardware, in `folder`."""

    folder: Path

    def path(self, cell_id: str) -> Path:
        return self.folder / f"{cell_id}.zip"

    def ids(self) -> set[str]:
        """Ids of the cells that have a file; whether each can be read shows when it is loaded."""
        return {p.stem for p in self.folder.glob("*.zip")}

    def load(self, cell_id: str) -> Recorded:
        """Read one cell. KeyError when there is none, DamagedCell when its file cannot be trusted."""
        path = self.path(cell_id)
        try:
            with zipfile.ZipFile(path) as archive:
                meta = json.loads(archive.read("cell.json"))
                if meta["format"] != FORMAT:
                    raise DamagedCell(f"{path}: format {meta['format']}, this batchlab reads {FORMAT}")
                if Cell(**meta["cell"]).id != cell_id:
                    raise DamagedCell(f"{path}: holds another cell than its name says")
                tables = [_read(archive.read(f"{name}.parquet"), schema) for name, schema in _TABLES]
        except FileNotFoundError:
            raise KeyError(cell_id) from None
        except (zipfile.BadZipFile, pa.ArrowException, OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise DamagedCell(f"{path}: damaged ({type(error).__name__}: {' '.join(str(error).split())})") from None
        return Recorded(cell_id, meta, *tables)

    def meta(self, cell_id: str) -> dict[str, Any]:
        """Only cell.json of a cell; KeyError when there is none or it cannot be read."""
        try:
            with zipfile.ZipFile(self.path(cell_id)) as archive:
                return json.loads(archive.read("cell.json"))
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise KeyError(cell_id) from error

    def save(
        self, cell: Cell, meta: dict[str, Any], requests: pa.Table, iterations: pa.Table, *, durable: bool = True
    ) -> Path:
        """Write a cell whole; UsageError when the disk refuses it, with nothing left behind.

        Without `durable` the disk is not waited for: for what a power cut may take, because it is made again at once.
        """
        document = {"format": FORMAT, "cell": asdict(cell), **meta}
        target = self.path(cell.id)
        temporary = self.folder / f".tmp-{cell.id}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                    _add(archive, "cell.json", json.dumps(document, indent=1, sort_keys=True).encode())
                    for (name, _), table in zip(_TABLES, (requests, iterations), strict=True):
                        _add(archive, f"{name}.parquet", _write(table))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(
                f"{target}: cannot be written ({error.strerror or error}); free some space or set "
                "BATCHLAB_RESULTS to another folder, then run again: what is recorded stays"
            ) from None
        return target

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for one measuring run; UsageError, naming the holder, when another run has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise UsageError(
                f"{self.folder}: another run measures into it ({self._holder()}); wait for it or stop it, "
                "then run again"
            ) from None
        except OSError as error:
            raise UsageError(
                f"{self.folder}: cannot be written ({error.strerror or error}); "
                "set BATCHLAB_RESULTS to a folder that can"
            ) from None
        try:
            note = f"process {os.getpid()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            (self.folder / ".lock-holder").write_text(note)
            for left_over in self.folder.glob(".tmp-*"):  # of a run that was killed; nobody else writes now
                left_over.unlink(missing_ok=True)
            yield
        finally:
            (self.folder / ".lock-holder").unlink(missing_ok=True)
            lock.release()

    def _holder(self) -> str:
        try:
            return (self.folder / ".lock-holder").read_text()
        except OSError:
            return "holder unknown"


_TABLES = (("requests", records.REQUESTS), ("iterations", records.ITERATIONS))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    # Parquet is compressed inside
    entry.compress_type = zipfile.ZIP_STORED if name.endswith(".parquet") else zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def _seconds(schema: pa.Schema) -> list[str]:
    return [f.name for f in schema if f.name.endswith("_s") and pa.types.is_float64(f.type)]


def _write(table: pa.Table) -> bytes:
    """Parquet bytes. Times go in as whole microseconds, delta coded: a sixth of the size of floats."""
    times = _seconds(table.schema)
    for name in times:
        micros = pc.cast(pc.round(pc.multiply(table[name], 1e6)), pa.int64())
        table = table.set_column(table.schema.get_field_index(name), name, micros)
    plain = [f.name for f in table.schema if f.name not in times and not pa.types.is_list(f.type)]
    lists = [f.name for f in table.schema if pa.types.is_list(f.type)]
    encodings = {name: "DELTA_BINARY_PACKED" for name in times}
    encodings |= {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in lists}
    buffer = io.BytesIO()
    pq.write_table(
        table, buffer, compression="zstd", compression_level=9, column_encoding=encodings, use_dictionary=plain
    )
    return buffer.getvalue()


def _read(data: bytes, schema: pa.Schema) -> pa.Table:
    table = pq.read_table(io.BytesIO(data))
    for field in schema:
        if field.nullable and field.name not in table.schema.names:  # of a record that is older than the column
            table = table.append_column(field.name, pa.nulls(len(table), pa.int64()))
    for name in _seconds(schema):
        table = table.set_column(
            table.schema.get_field_index(name), name, pc.divide(pc.cast(table[name], pa.float64()), 1e6)
        )
    return table.select(schema.names).cast(schema)
