"""What was computed once and would come out the same again: JSON under `build/kept/<code>/`, for any process to find.

A name is the digest of all that a value was made from, its folder that of the code that made it: a changed record or a
changed line of code asks for a name that is not there. A value that cannot be read or written is computed again.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from batchlab import paths

MADE_WITH = ("numpy", "pandas", "pyarrow", "scipy", "aiconfigurator-core")
FOLDERS = 2  # the code's own and the one before it: going back and forth between two commits computes nothing


def digest(*parts: bytes | str) -> str:
    """32 hexadecimal digits of these parts, in this order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def of_files(files: list[Path]) -> str:
    """The digest of files' names and contents, in the order of their paths."""
    return digest(*(part for file in sorted(files) for part in (file.name, file.read_bytes())))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _code() -> str:
    library = Path(__file__).parent
    made_with = [sys.version, *map(_version, MADE_WITH)]
    return digest(of_files([*library.rglob("*.py"), *library.rglob("*.json")]), *made_with)[:12]


# When the library is imported and not later: what a long-lived kernel runs is the code as it was then.
CODE = _code()


def path(kind: str, name: str) -> Path:
    """Where a value is, or would be."""
    return paths.BUILD / "kept" / CODE / kind / f"{name}.json"


def find(kind: str, name: str) -> Any:
    """The value that was kept, None where there is none that can be read."""
    try:
        return json.loads(path(kind, name).read_bytes())
    except (OSError, ValueError):
        return None


def keep(kind: str, name: str, value: Any) -> None:
    """Writes a value whole or not at all. One that is no JSON, or a disk that refuses it, is passed over."""
    target = path(kind, name)
    part = target.with_name(f".{name}.{os.getpid()}.part")
    try:
        text = json.dumps(value)
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            _forget(target.parents[1])
        part.write_text(text)
        os.replace(part, target)
    except (OSError, TypeError, ValueError):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _forget(own: Path) -> None:
    """Removes what other code left, all but the last one's."""
    others = [p for p in own.parent.iterdir() if p.is_dir() and p != own]
    for old in sorted(others, key=lambda p: p.stat().st_mtime)[: -(FOLDERS - 1)]:
        shutil.rmtree(old, ignore_errors=True)
