"""The server of one `make report`: what runs in its forks is as it would be in a Python of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from batchlab import paths
from batchlab.report import warm

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux has such a server")
SERVER = [sys.executable, "-m", "batchlab.report.warm"]


def environment(build: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != warm.ADDRESS}
    return kept | {"BATCHLAB_BUILD": str(build), "PYTHONPATH": str(paths.ROOT / "lib"), "MARK": "passed on"}


def notebook(folder: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell('scenario = "cpu"', metadata={"tags": ["parameters"]})]
    made = nbformat.v4.new_notebook(cells=cells + [nbformat.v4.new_code_cell(source) for source in sources])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, folder / "probe.ipynb")
    return folder / "probe.ipynb"


def execute(path: Path) -> str:
    return f"{sys.executable} -m batchlab.report execute {path} --scenario cpu"


def test_the_status_is_the_commands(tmp_path: Path) -> None:
    for script, status in (("exit 7", 7), ("true", 0), ("kill -TERM $$", 128 + signal.SIGTERM)):
        assert subprocess.run([*SERVER, "bash", "-c", script], env=environment(tmp_path)).returncode == status


def test_commands_and_kernels_are_forks_with_the_callers_own_environment(tmp_path: Path) -> None:
    probe = notebook(
        tmp_path, "import os, sys; print(os.environ['MARK'], os.getcwd(), sys.argv[0])",
        "print(open(f'/proc/{os.getppid()}/cmdline').read().split(chr(0))[2])", "os.getsid(0) == os.getpid()",
    )  # fmt: skip
    script = f"{execute(probe)}; echo status $?; {execute(tmp_path / 'absent.ipynb')}; echo status $?"
    done = subprocess.run([*SERVER, "bash", "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["status 0", "status 2"], done.stderr
    assert "no such notebook" in done.stderr
    cells = [c for c in nbformat.read(tmp_path / "cpu/probe.ipynb", as_version=4).cells if c.outputs]
    assert cells[0].outputs[0].text == f"passed on {paths.ROOT} ipykernel_launcher\n"
    assert cells[1].outputs[0].text == "batchlab.report.warm\n"
    assert cells[2].outputs[0]["data"]["text/plain"] == "True"


def test_a_failing_notebook_fails_as_without_a_server(tmp_path: Path) -> None:
    probe = notebook(tmp_path, "1 / 0")
    env = environment(tmp_path)
    told = [
        subprocess.run([*server, "bash", "-c", execute(probe)], env=env, capture_output=True, text=True)
        for server in ([], SERVER)
    ]
    assert told[0].returncode == told[1].returncode == 1
    assert "ZeroDivisionError: division by zero" in told[1].stderr and told[0].stderr == told[1].stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_caller_that_is_stopped_takes_its_kernel_along(tmp_path: Path, signum: int) -> None:
    pids = tmp_path / "kernel"
    probe = notebook(tmp_path, f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    # with -m a shell's background job does not ignore interrupts
    script = f"set -m; {execute(probe)} & echo $! >{tmp_path}/caller; wait $!; echo status $?; sleep 30 & wait"
    server = subprocess.Popen(
        [*SERVER, "bash", "-c", script],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        # whoever runs the tests in a shell's background ignores interrupts, and so would all of theirs
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: pids.exists() and pids.read_text())
        os.kill(int((tmp_path / "caller").read_text()), signum)
        status = server.stdout.readline()
        until(lambda: not Path(f"/proc/{pids.read_text()}").exists())
        assert status == f"status {130 if signum == signal.SIGINT else 137}\n"
    finally:
        server.terminate()
        server.wait(10)


def until(holds: object, within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_without_a_server_the_caller_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.delenv(warm.ADDRESS, raising=False)
    assert warm.ask("report", []) is None
    monkeypatch.setenv(warm.ADDRESS, str(tmp_path / "nobody"))
    assert warm.ask("report", []) is None
    assert signal.getsignal(signal.SIGINT) is before


def test_what_it_loads_starts_no_thread() -> None:
    script = "import sys; from batchlab.report import warm; sys.exit(0 if warm.loaded() else 'not loaded, or a thread')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(Path("build")), capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
