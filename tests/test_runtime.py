"""Containers: published on loopback only, labelled, and removed however their owner ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from batchlab.engines import process, runtime
from batchlab.errors import UsageError

# writes each call down; `ps` lists what PS holds, `image inspect` fails as a daemon without the image does
TOOL = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/calls"
case "$1" in
  ps) cat "$here/names" 2>/dev/null ;;
  image) [ -e "$here/image" ] || { echo "Error: No such image: $3" >&2; exit 1; } ;;
  run) exec sleep 60 ;;
esac
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A docker that only takes notes."""
    program = tmp_path / "docker"
    program.write_text(TOOL)
    program.chmod(0o755)
    monkeypatch.setenv("BATCHLAB_CONTAINER_TOOL", str(program))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return program


def calls(program):
    return (program.parent / "calls").read_text().splitlines()


def launch(**more):
    given = {"port": 4001, "inner_port": 8000, "env": {"TZ": "UTC"}, "mounts": {Path("/models/m"): "ro"}} | more
    return runtime.container("tgi", "image:1", ["serve", "m"], **given)


def value(command, flag):
    return command[command.index(flag) + 1]


def test_a_container_is_published_on_loopback_and_ends_with_its_command(docker):
    made = launch()
    assert value(made.command, "-p") == "127.0.0.1:4001:8000" and "--rm" in made.command
    assert value(made.command, "-v") == "/models/m:/models/m:ro" and value(made.command, "-e") == "TZ=UTC"
    assert value(made.command, "--gpus") == "all" and made.command[-3:] == ["image:1", "serve", "m"]
    name = value(made.command, "--name")
    assert value(made.command, "--label") == "batchlab.engine=tgi" and made.cleanup[1:] == ["rm", "-f", name]


@pytest.mark.parametrize(
    ("visible", "flags"), [("1", ["--gpus", "device=1"]), ("0,1", ["--gpus", '"device=0,1"']), ("", ["--gpus", "all"])]
)
def test_the_gpus_are_those_that_are_visible(docker, monkeypatch, visible, flags):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = launch().command
    assert command[command.index("--gpus") :][:2] == flags


def test_podman_names_gpus_otherwise(docker, monkeypatch):
    podman = docker.with_name("podman")
    docker.rename(podman)
    monkeypatch.setenv("BATCHLAB_CONTAINER_TOOL", str(podman))
    assert value(launch().command, "--device") == "nvidia.com/gpu=all"


def test_a_token_is_passed_on_without_its_value(docker, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    command = launch().command
    assert "HF_TOKEN" in command and not any("secret-token" in word for word in command)


def test_containers_whose_owner_is_gone_are_removed_and_others_are_not(docker):
    me = psutil.Process()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = f"batchlab-tgi-{os.getpid()}-{me.create_time():.2f}-abc123"
    reused = f"batchlab-sglang-{os.getpid()}-{me.create_time() - 100:.2f}-abc123"  # the number of a later process
    gone = f"batchlab-tensorrt-llm-{dead.pid}-{me.create_time():.2f}-abc123"
    (docker.parent / "names").write_text("\n".join([mine, reused, gone, "somebody-else", "batchlab-not-ours"]))
    assert runtime.remove_left_behind(str(docker)) == [reused, gone]
    assert calls(docker)[-1] == f"rm -f {reused} {gone}"


def test_a_missing_image_is_named_with_the_command_that_fetches_it(docker):
    with pytest.raises(UsageError, match="image image:1 is not on this machine; fetch it first: docker pull image:1"):
        runtime.find_image("image:1")
    (docker.parent / "image").touch()
    assert runtime.find_image("image:1") == "image:1"


def test_without_a_container_tool(monkeypatch, tmp_path):
    monkeypatch.delenv("BATCHLAB_CONTAINER_TOOL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no docker or podman on the PATH for runtime `container`"):
        runtime.tool()


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_stopped_container_is_removed(docker, tmp_path):
    made = launch()
    engine = process.launch(made.command, env={}, log=tmp_path / "log", cleanup=made.cleanup)
    until(lambda: any(call.startswith("run") for call in calls(docker)))
    engine.stop()
    assert calls(docker)[-1] == " ".join(made.cleanup[1:])


def test_a_container_is_removed_when_its_owner_is_killed(docker, tmp_path):
    code = textwrap.dedent("""
        import json, sys, time
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from batchlab.engines import process
        command, cleanup = json.loads(sys.argv[3])
        process.launch(command, env={}, log=Path(sys.argv[2]), cleanup=cleanup)
        time.sleep(60)
    """)
    made = launch()
    library = os.path.join(os.path.dirname(__file__), "..", "lib")
    words = [library, str(tmp_path / "log"), json.dumps([made.command, made.cleanup])]
    owner = subprocess.Popen([sys.executable, "-c", code, *words])
    until(lambda: any(call.startswith("run") for call in calls(docker)))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: calls(docker)[-1] == " ".join(made.cleanup[1:]))
