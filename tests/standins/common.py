"""What the stand-ins share beside HTTP and scheduling: where they listen, what a model folder holds, prompts."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from standins.http import bound

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def path(name: str) -> Path:
    """A path as the engine's process sees it: inside a container only what is mounted is there."""
    mounts = json.loads(os.environ.get("STANDIN_MOUNTS", "null"))
    if mounts is None:
        return Path(name)
    for inside, outside in sorted(mounts.items(), key=lambda pair: -len(pair[0])):
        if name == inside or name.startswith(inside.rstrip("/") + "/"):
            return Path(outside + name[len(inside) :])
    return Path("/nonexistent-in-container") / name.lstrip("/")


def listen(host: str, port: int) -> socket.socket:
    """The socket for host:port; inside a container, whatever host port that is published as. OSError as bind's."""
    published = json.loads(os.environ.get("STANDIN_PORTS", "null"))
    if published is None:
        return bound(host, port)
    if host not in ("0.0.0.0", "::") or str(port) not in published:
        return bound("127.0.0.1", 0)  # listens inside the container, where nobody outside can reach it
    address, outside = published[str(port)]
    return bound(address, outside)


def has_gpu() -> bool:
    """Outside a container always; inside, when the container was given one."""
    return os.environ.get("STANDIN_GPU", "1") == "1"


def config(model: str) -> dict[str, Any]:
    """A model folder's config.json; FileNotFoundError when there is none."""
    return json.loads((path(model) / "config.json").read_text())


def has_weights(model: str, kinds: tuple[str, ...] = WEIGHTS) -> bool:
    return any(file.suffix in kinds for file in path(model).iterdir())


def count(prompt: str | list[int]) -> int:
    """Tokens of a prompt: its ids, or the words of a text, as the synthetic tokenizer counts."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def helper(own_group: bool = False) -> int:
    """A process beside the server, as engines have for each GPU; ends when its parent is gone, or by SIGTERM."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    if own_group:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(0)


class PrefixCache:
    """Which whole blocks of prompts were seen before: the prompt tokens that a prefix cache would have served."""

    def __init__(self, block_size: int, enabled: bool) -> None:
        self.block_size, self.enabled = block_size, enabled
        self._seen: set[int] = set()

    def hit(self, prompt: str | list[int]) -> int:
        """Cached tokens of this prompt, whose own blocks are cached from now on."""
        if not self.enabled:
            return 0
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        cached, chain, broken = 0, 0, False
        for end in range(self.block_size, len(tokens), self.block_size):
            chain = hash((chain, *tokens[end - self.block_size : end]))
            broken = broken or chain not in self._seen
            cached += 0 if broken else self.block_size
            self._seen.add(chain)
        return cached
