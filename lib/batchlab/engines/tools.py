"""Small tools of the adapters: questions over HTTP, clocks, the packages of another Python, command lines."""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from batchlab.client.clock import offset_ns
from batchlab.errors import UsageError


def ask(url: str, body: Any = None, timeout_s: float = 10.0) -> Any:
    """GET, or POST of a JSON body, as the JSON or text of the answer; None when there is no good answer in time."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            text = answer.read().decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def from_wall(wall_s: float, t0_ns: int) -> float:
    """A time of the wall clock (seconds since 1970) in seconds after t0, which is CLOCK_MONOTONIC."""
    return (round(wall_s * 1e9) + offset_ns() - t0_ns) / 1e9


def python_with(variable: str, engine: str, package: str, version: str, how: str) -> Path:
    """The Python that `variable` names and that holds this version of a package. UsageError otherwise."""
    named = os.environ.get(variable)
    if not named:
        raise UsageError(f"no {engine} here: {variable} is not set; {how}")
    python = Path(shutil.which(named) or named)
    found = installed(str(python), package)
    if found is None:
        raise UsageError(f"{variable}={named} does not run; correct it")
    check_version(f"{variable}={named}", engine, found, version)
    return python


def check_version(where: str, engine: str, found: str, version: str) -> None:
    """UsageError unless the release found is the one asked for."""
    if not found:
        raise UsageError(f"{where} holds no {engine}; install {version} there, or name another Python")
    if plain(found) != plain(version):
        raise UsageError(
            f"{where} holds {engine} {found}, the scenario asks for {version}; "
            f"change the engine's version in the scenario or install that one"
        )


def plain(version: str) -> str:
    """Without a leading v and a local part such as +cu129."""
    return version.strip().removeprefix("v").split("+")[0]


@cache
def installed(python: str, package: str) -> str | None:
    """The version of a package that another Python holds, "" when it holds none; None when it does not run."""
    code = (
        "import importlib.metadata as m, sys\n"
        "try: print(m.version(sys.argv[1]))\n"
        "except m.PackageNotFoundError: print()\n"
    )
    try:
        done = subprocess.run([python, "-c", code, package], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def flags(values: Mapping[str, Any], *, separator: str = "-") -> list[str]:
    """Command-line words for keys and values: a true flag stands alone, a false or absent one is left out."""
    words = []
    for key, value in values.items():
        flag = "--" + key.replace("_", separator).replace("-", separator)
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words
