"""Where an engine runs: a program of this machine, or a container.

A container is started in the foreground (`docker run --rm`), so that its output is the engine's log and its end is the
engine's end; it publishes its port on loopback only. It is removed when we stop it, when we are killed (the supervisor
does it) and, should the supervisor be killed too, at the next start: its name tells the process that it belongs to.
"""

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchlab.errors import UsageError

LABEL = "batchlab.engine"
_NAME = re.compile(r"batchlab-.+-(\d+)-([\d.]+)-[0-9a-f]{6}")
TOOLS = ("docker", "podman")
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to run under the supervisor, and the one that cleans up after it."""

    command: list[str]
    cleanup: list[str]


def tool() -> str:
    """docker or podman: BATCHLAB_CONTAINER_TOOL, else the first one on the PATH. UsageError when there is none."""
    named = os.environ.get("BATCHLAB_CONTAINER_TOOL")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, TOOLS)), None)
    if not found:
        raise UsageError(
            f"no {named or 'docker or podman'} on the PATH for runtime `container`; install it "
            "(https://docs.docker.com/engine/install/), or run the engine from a Python of its own (runtime: local)"
        )
    return found


def find_image(image: str) -> str:
    """The image, when it is on this machine; UsageError with the command that fetches it otherwise."""
    program = tool()
    done = _run([program, "image", "inspect", image])
    if done is None or (done.returncode and "no such image" not in done.stderr.lower() and "daemon" in done.stderr):
        raise UsageError(f"{program} does not answer; start it (systemctl start docker) or join its group")
    if done.returncode:
        name = Path(program).name
        raise UsageError(f"image {image} is not on this machine; fetch it first: {name} pull {image}")
    return image


def container(
    engine: str,
    image: str,
    command: Sequence[str],
    *,
    port: int,
    inner_port: int,
    env: Mapping[str, str],
    mounts: Mapping[Path, str],
    extra: Sequence[str] = (),
) -> Launch:
    """`command` in a container of `image`, its `inner_port` published as 127.0.0.1:`port`.

    mounts: what it can read, host path → "ro" or "rw"; inside they have the same path. extra: further flags of `run`.
    """
    program = tool()
    remove_left_behind(program)
    born = f"{psutil.Process().create_time():.2f}"
    name = f"batchlab-{engine}-{os.getpid()}-{born}-{secrets.token_hex(3)}"
    flags = ["--rm", "--name", name, "--label", f"{LABEL}={engine}", "-p", f"127.0.0.1:{port}:{inner_port}"]
    flags += [*_gpu_flags(program), "--ipc", "host", *extra]
    for path, mode in mounts.items():
        flags += ["-v", f"{path}:{path}:{mode}"]
    for key, value in env.items():
        flags += ["-e", f"{key}={value}"]
    if os.environ.get("HF_TOKEN"):
        flags += ["-e", "HF_TOKEN"]  # by name only: a value would show in the process list
    return Launch([program, "run", *flags, image, *command], [program, "rm", "-f", name])


def remove_left_behind(program: str) -> list[str]:
    """Remove containers of ours whose owner is gone; their names."""
    listed = _run([program, "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"])
    names = listed.stdout.split() if listed and not listed.returncode else []
    left = [name for name in names if (found := _NAME.fullmatch(name)) and not _lives(int(found[1]), float(found[2]))]
    if left:
        _run([program, "rm", "-f", *left])
    return left


def _lives(pid: int, born: float) -> bool:
    """Whether that process is there, and not another one with its number."""
    try:
        return abs(psutil.Process(pid).create_time() - born) < 0.1
    except psutil.Error:
        return False


def _gpu_flags(program: str) -> list[str]:
    """All GPUs, or those of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if Path(program).name == "podman":
        devices = visible.split(",") if visible else ["all"]
        return [part for device in devices for part in ("--device", f"nvidia.com/gpu={device}")]
    if not visible:
        return ["--gpus", "all"]
    # docker reads the value as CSV, so a list wants quotes of its own
    return ["--gpus", f'"device={visible}"' if "," in visible else f"device={visible}"]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess | None:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
