"""A stand-in for `docker` and `podman` that runs the stand-in engines as containers of their images.

    python -m standins.containers docker|podman run|ps|rm|stop|kill|image|version ...

As with the real ones, a container is no child of the client: it lives on when the client is killed, and ends with all
of its processes when its first one ends. Inside there is no more than its image, what is mounted (at its own path) and
the variables that it was given; of its ports only the published ones can be reached. STANDIN_CONTAINERS names the
folder that holds the images there are (`images`) and a folder for each container.
"""

import json
import os
import re
import secrets
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from standins.container_state import attached, containers, detached, end, find, folder, record

VALUES = {"--name", "--label", "-l", "-p", "--publish", "--gpus", "--device", "--ipc", "--shm-size", "--ulimit", "-v",
          "--volume", "-e", "--env", "--network", "--user", "-u", "--entrypoint", "--mount", "--pull"}  # fmt: skip
SWITCHES = {"--rm", "-d", "--detach", "--init", "-i", "-t", "-it", "--privileged"}


class Refused(Exception):
    """A line for standard error, and the exit status."""

    def __init__(self, message: str, status: int = 125) -> None:
        super().__init__(message)
        self.status = status


def daemon(message: str, status: int = 125) -> Refused:
    """What the daemon refuses."""
    return Refused(f"docker: Error response from daemon: {message}", status)


# run ------------------------------------------------------------------------------------------------------------------
def parse(tool: str, words: list[str]) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Flags with their values, image, command."""
    flags, rest = [], list(words)
    while rest and rest[0].startswith("-"):
        flag, has_value, value = rest.pop(0).partition("=")
        if flag in SWITCHES:
            flags.append((flag, value or "true"))
            continue
        if flag not in VALUES or (flag == "--gpus" and tool == "podman"):
            raise Refused(f"unknown flag: {flag}\nSee '{tool} run --help'.")
        if not has_value and not rest:
            raise Refused(f"flag needs an argument: {flag}\nSee '{tool} run --help'.")
        flags.append((flag, value if has_value else rest.pop(0)))
    if not rest:
        raise Refused(f"\"{tool} run\" requires at least 1 argument.\nSee '{tool} run --help'.")
    return flags, rest[0], rest[1:]


def entry(image: str, command: list[str], environment: dict[str, str]) -> list[str]:
    """The stand-in's own command for an image's entrypoint with this command behind."""
    repository, _, tag = image.rpartition(":")
    version = f"{tag.removeprefix('v').removesuffix('-standin')}+standin"
    if repository.endswith("text-generation-inference"):
        environment.setdefault("PORT", "80")
        return ["-m", "standins.tgi", version, *command]
    starts = {"tensorrt-llm/release": ("standins.trtllm", ["trtllm-serve"]),
              "sglang": ("standins.sglang", ["python3", "-m", "sglang.launch_server"])}  # fmt: skip
    module, first = next(value for key, value in starts.items() if repository.endswith(key))
    if command[: len(first)] != first:
        word = command[0] if command else ""
        raise daemon(f'exec: "{word}": executable file not found in $PATH', 127)
    return ["-m", module, version, *command[len(first) :]]


def run(tool: str, words: list[str]) -> int:
    flags, image, command = parse(tool, words)
    given: dict[str, list[str]] = {}
    short = {"-l": "--label", "-p": "--publish", "-v": "--volume", "-e": "--env", "-d": "--detach"}
    for flag, value in flags:
        given.setdefault(short.get(flag, flag), []).append(value)
    if image not in (folder() / "images").read_text().split():
        raise daemon(f"manifest for {image} not found: manifest unknown")
    name = given.get("--name", [f"nameless_{secrets.token_hex(3)}"])[-1]
    if existing := find(name):
        raise daemon(f'Conflict. The container name "/{name}" is already in use by container "{existing["id"]}".')
    environment = {}
    for item in given.get("--env", []):
        key, has_value, value = item.partition("=")
        if has_value or key in os.environ:
            environment[key] = value if has_value else os.environ[key]
    gpu = any("nvidia.com/gpu=" in d for d in given.get("--device", [])) if tool == "podman" else "--gpus" in given
    container = {
        "id": secrets.token_hex(16),
        "name": name,
        "image": image,
        "labels": dict(label.partition("=")[::2] for label in given.get("--label", [])),
        "ports": published(given.get("--publish", [])),
        "mounts": mounted(given.get("--volume", [])),
        "environment": environment,
        "remove": "--rm" in given,
        "client": os.getpid(),
        "pid": None,
    }
    process = entry(image, command, environment)
    inside = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "STANDIN_HOME": os.environ["STANDIN_HOME"],
        "STANDIN_PORTS": json.dumps(container["ports"]),
        "STANDIN_MOUNTS": json.dumps(container["mounts"]),
        "STANDIN_GPU": str(int(gpu)),
        **environment,
    }
    if given.get("--network", [""])[-1] == "host":
        del inside["STANDIN_PORTS"]
    (folder() / container["id"]).mkdir()
    (folder() / container["id"] / "output").touch()
    record(container)
    status = detached(container, [sys.executable, *process], inside)
    if "--detach" in given:
        print(container["id"])
        return 0
    return attached(container, status)


def published(items: list[str]) -> dict[str, tuple[str, int]]:
    """Port inside → address and port outside; refused when something listens there."""
    ports = {}
    for item in items:
        *address, outside, inside = item.split(":")
        where = (address[0] if address else "0.0.0.0", int(outside))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError:
                raise daemon(f"Bind for {where[0]}:{where[1]} failed: port is already allocated") from None
        ports[inside] = where
    return ports


def mounted(items: list[str]) -> dict[str, str]:
    """Path inside → path outside."""
    mounts = {}
    for item in items:
        outside, inside, *_ = item.split(":")
        if not Path(outside).is_absolute() or not Path(outside).exists():
            raise Refused(
                f"docker: Error response from daemon: invalid mount: {outside} is no absolute path that exists"
            )
        mounts[inside] = outside
    return mounts


# the others -----------------------------------------------------------------------------------------------------------
def others(tool: str, verb: str, words: list[str]) -> int:
    if verb == "image" and words[:1] == ["inspect"]:
        if words[1] not in (folder() / "images").read_text().split():
            raise Refused(f"[]\nError response from daemon: No such image: {words[1]}", 1)
        print("[{}]")
    elif verb == "version":
        print("28.0.0")
    elif verb == "ps":
        wanted = [words[i + 1].removeprefix("label=") for i, word in enumerate(words) if word == "--filter"]
        shape = words[words.index("--format") + 1] if "--format" in words else "{{.ID}}"
        for container in containers():
            labels = [f"{key}={value}" for key, value in container["labels"].items()]
            if all(want in (*labels, *container["labels"]) for want in wanted) and (container["pid"] or "-a" in words):
                print(shown(shape, container))
    elif verb in ("rm", "stop", "kill"):
        for name in (word for word in words if not word.startswith("-")):
            container = find(name)
            if container is None:
                raise Refused(f"Error response from daemon: No such container: {name}", 1)
            if verb == "rm" and container["pid"] and "-f" not in words:
                raise Refused(f'Error response from daemon: cannot remove container "/{name}": container is running', 1)
            end(container, 10.0 if verb == "stop" else 0.0)
            if verb == "rm":
                shutil.rmtree(folder() / container["id"], ignore_errors=True)
            print(name)
    else:
        raise Refused(f"{tool}: '{verb}' is not a {tool} command.\nSee '{tool} --help'", 1)
    return 0


def shown(shape: str, container: dict[str, Any]) -> str:
    """A Go template of `ps --format`, of the fields that are used."""
    fields = {"Names": container["name"], "ID": container["id"][:12], "Image": container["image"]}
    text = re.sub(r'\{\{\.Label "([^"]+)"\}\}', lambda m: container["labels"].get(m[1], ""), shape)
    return re.sub(r"\{\{\.(\w+)\}\}", lambda m: fields[m[1]], text)


def main() -> int:
    tool, verb, *words = [*sys.argv[1:], ""][: max(2, len(sys.argv) - 1)]
    try:
        return run(tool, words) if verb == "run" else others(tool, verb, words)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return refused.status


if __name__ == "__main__":
    sys.exit(main())
