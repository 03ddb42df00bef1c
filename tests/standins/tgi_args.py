"""The command line of `text-generation-launcher`, as clap takes it: each flag is also an environment variable.

After launcher/src/main.rs of 3.x; 2.x lacks what LATER lists.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

COUNT, NUMBER, WORD, FLAG = "COUNT", "NUMBER", "WORD", "FLAG"
# flag without its dashes → (type, default); a tuple lists the words that are allowed
FLAGS: dict[str, tuple[Any, Any]] = {
    "model-id": (WORD, "bigscience/bloom-560m"),
    "revision": (WORD, None),
    "validation-workers": (COUNT, 2),
    "sharded": (("true", "false"), None),
    "num-shard": (COUNT, None),
    "quantize": (("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
                  "bitsandbytes-fp4", "fp8"), None),
    "speculate": (COUNT, None),
    "dtype": (("float16", "bfloat16"), None),
    "kv-cache-dtype": (("fp8_e4m3fn", "fp8_e5m2"), None),
    "trust-remote-code": (FLAG, False),
    "max-concurrent-requests": (COUNT, 128),
    "max-best-of": (COUNT, 2),
    "max-stop-sequences": (COUNT, 4),
    "max-top-n-tokens": (COUNT, 5),
    "max-input-tokens": (COUNT, None),
    "max-input-length": (COUNT, None),
    "max-total-tokens": (COUNT, None),
    "waiting-served-ratio": (NUMBER, 0.3),
    "max-batch-prefill-tokens": (COUNT, None),
    "max-batch-total-tokens": (COUNT, None),
    "max-waiting-tokens": (COUNT, 20),
    "max-batch-size": (COUNT, None),
    "cuda-graphs": (WORD, None),
    "hostname": (WORD, "0.0.0.0"),
    "port": (COUNT, 3000),
    "prometheus-port": (COUNT, 9000),
    "shard-uds-path": (WORD, "/tmp/text-generation-server"),
    "master-addr": (WORD, "localhost"),
    "master-port": (COUNT, 29500),
    "huggingface-hub-cache": (WORD, None),
    "weights-cache-override": (WORD, None),
    "disable-custom-kernels": (FLAG, False),
    "cuda-memory-fraction": (NUMBER, 1.0),
    "rope-scaling": (("linear", "dynamic"), None),
    "rope-factor": (NUMBER, None),
    "json-output": (FLAG, False),
    "otlp-endpoint": (WORD, None),
    "otlp-service-name": (WORD, "text-generation-inference.router"),
    "cors-allow-origin": (WORD, None),
    "api-key": (WORD, None),
    "tokenizer-config-path": (WORD, None),
    "disable-grammar-support": (FLAG, False),
    "env": (FLAG, False),
    "max-client-batch-size": (COUNT, 4),
    "lora-adapters": (WORD, None),
    "usage-stats": (("on", "off", "no-stack"), "on"),
    "payload-limit": (COUNT, 2_000_000),
    "enable-prefill-logprobs": (FLAG, False),
    "graceful-termination-timeout": (COUNT, 90),
}  # fmt: skip
LATER = ("kv-cache-dtype", "payload-limit", "enable-prefill-logprobs", "graceful-termination-timeout",
         "prometheus-port")  # fmt: skip
SHORT = {"-p": "--port", "-e": "--env"}


@dataclass(slots=True)
class Options:
    """Values by flag, dashes as underscores; `model` is what /info and the router call it."""

    values: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


def parse(arguments: list[str], version: str) -> Options:
    """As clap does it: prints what is wrong and exits with 2; 0 after --version."""
    known = {name: kind for name, (kind, _) in FLAGS.items() if version[0] >= "3" or name not in LATER}
    given: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        word = SHORT.get(word, word)
        if word in ("--version", "-V"):
            print(f"text-generation-launcher {version}")
            sys.exit(0)
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--")
        if not flag.startswith("--") or name not in known:
            _usage(f"unexpected argument '{flag}' found")
        if name in given:
            _usage(f"the argument '{flag}{_place(name)}' cannot be used multiple times")
        if known[name] == FLAG:
            if has_value:
                _usage(f"unexpected value '{value}' for '{flag}' found; no more were expected")
            given[name] = True
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                _usage(f"a value is required for '{flag}{_place(name)}' but none was supplied")
            value = rest.pop(0)
        given[name] = _converted(name, known[name], value)
    for name, kind in known.items():
        variable = name.replace("-", "_").upper()
        if name not in given and name != "env" and variable in os.environ:
            text = os.environ[variable]
            given[name] = text == "true" if kind == FLAG else _converted(name, kind, text)
    return Options({name.replace("-", "_"): given.get(name, default) for name, (_, default) in FLAGS.items()})


def _place(name: str) -> str:
    return f" <{name.replace('-', '_').upper()}>"


def _usage(message: str) -> None:
    print(f"error: {message}\n\nUsage: text-generation-launcher [OPTIONS]\n\nFor more information, try '--help'.",
          file=sys.stderr)  # fmt: skip
    sys.exit(2)


def _converted(name: str, kind: Any, value: str) -> Any:
    try:
        if kind == COUNT:
            if not value.isdigit():
                raise ValueError("invalid digit found in string")
            return int(value)
        if kind == NUMBER:
            return float(value)
    except ValueError as error:
        _usage(f"invalid value '{value}' for '--{name}{_place(name)}': {error}")
    if isinstance(kind, tuple) and value not in kind:
        _usage(f"invalid value '{value}' for '--{name}{_place(name)}'\n  [possible values: {', '.join(kind)}]")
    return value
