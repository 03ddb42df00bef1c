"""What the engines have in common that are asked over HTTP and keep no trace of ours: TensorRT-LLM, TGI and SGLang.

Launch, readiness, ownership of the port, replay, failures and the end. What an engine is started with, what it writes
down about its iterations and what its failures mean is its own file's.
"""

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from batchlab.client import Replay, Target, replay
from batchlab.engines import process, runtime
from batchlab.engines.tools import plain
from batchlab.engines.trace import Traced
from batchlab.errors import EngineError, UsageError
from batchlab.models import ModelFiles
from batchlab.scenario import EngineSpec, Limits
from batchlab.workload import Workload

NO_REQUESTS = "the client's times of a request against the engine's own, which it does not tell"
GIVEN_UP = ("not finished within", "not sent within", "no byte for")  # the client's words for a request that hung
ANSWERED = ("HTTP", "error in the stream", *GIVEN_UP)  # the words for one that a living engine failed
SETTLE_S = 0.3  # for the last lines of the log to be written
DYING_S = 2.0


class ServedEngine(ABC):
    """One engine behind HTTP. Start it with the limits of a group of cells; `warm_limits` may be lowered while it runs.

    A subclass gives name and title, the abstract methods, and what it knows of limits and failures.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    warm_limits: ClassVar[tuple[str, ...]] = ()
    text_prompts: ClassVar[bool] = False  # it takes no token ids
    inner_port: ClassVar[int] = 8000
    highest_port: ClassVar[int] = 65535
    container_flags: ClassVar[tuple[str, ...]] = ()
    known: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, spec: EngineSpec, options: dict[str, Any], model: ModelFiles, transport: str, *, log: Path
    ) -> None:
        self.spec, self.options, self.model, self.transport, self.log = spec, options, model, transport, log
        self.program = self.find(spec)
        self.limits: Limits | None = None
        self.started_with: Limits | None = None
        self.start_s = 0.0
        self.process: process.EngineProcess | None = None
        self.command: list[str] = []
        self.served: str | None = None
        self.told: dict[str, Any] = {}
        self._work: Path | None = None
        self._port = 0
        self._hung = False
        self._mark = 0

    # what a subclass gives -----------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def find(cls, spec: EngineSpec) -> list[str]:
        """What starts it: the command's first words, or nothing where a container's entrypoint does. UsageError when
        this machine has it not, or another release than the scenario asks for."""

    @abstractmethod
    def arguments(self, limits: Limits, host: str, port: int) -> list[str]:
        """The command's other words. Files that they name go to `self.work`."""

    def target(self) -> Target:
        """Where and how requests are sent: token ids to an OpenAI-compatible server, unless a subclass says other."""
        return Target(
            base_url=self.url,
            api="openai-completions",
            model=self.model.name,
            prompt_format="ids",
            ignore_eos=True,
            continuous_usage=True,
            # with ignore_eos it changes nothing but the speed: a penalty over the vocabulary in each step
            extra={"min_tokens": None},
        )

    def environment(self) -> dict[str, str]:
        """What the engine finds in its environment, beside the scenario's `env`."""
        return {}

    @abstractmethod
    def read(self, t0_ns: int) -> Traced:
        """What the engine wrote down since the last mark."""

    def release(self) -> str | None:
        """The release that answers, by its own word; None when it does not say."""
        return None

    def learned(self) -> dict[str, Any]:
        """What it said of itself at its start, for the provenance."""
        return {}

    # life ----------------------------------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def work(self) -> Path:
        """A folder for the engine's own files, there while it runs; it has the same path in a container."""
        assert self._work
        return self._work

    def start(self, limits: Limits, tick: Callable[[float], None] | None = None) -> None:
        """Launch and wait until it answers. EngineError with the reason and its own last lines otherwise."""
        self.stop()
        self._hung, self.served, self.told = False, None, {}
        self._work = Path(tempfile.mkdtemp(prefix="batchlab-"))
        self._work.chmod(0o755)
        try:
            local = self.spec.runtime != "container"
            self._port = process.free_port(self.spec.port, highest=self.highest_port if local else 65535)
            env = {**self.environment(), **self.spec.env}
            if self.spec.runtime == "container":
                command = [*self.program, *self.arguments(limits, "0.0.0.0", self.inner_port)]
                launch = runtime.container(
                    self.name,
                    self.image(self.spec),
                    command,
                    port=self._port,
                    inner_port=self.inner_port,
                    env=env,
                    mounts=self._mounts(),
                    extra=self.container_flags,
                )
                env = {}
            else:
                launch = runtime.Launch([*self.program, *self.arguments(limits, "127.0.0.1", self._port)], [])
            self.command = launch.command
            self.process = process.launch(launch.command, env=env, log=self.log, cleanup=launch.cleanup)
            self.start_s = process.wait_ready(
                self.process,
                self._ready,
                timeout_s=self.spec.startup_timeout_s,
                known=self.known,
                name=self.title,
                tick=tick,
            )
            self.limits = self.started_with = limits
            self.served, self.told = self.release(), self.learned()
            if self.served and plain(self.served) != plain(self.spec.version):
                raise EngineError(
                    f"{self.title} {self.served} answered, the scenario asks for {self.spec.version}; change "
                    f"engines.{self.name}.version or start that release",
                    self.process.tail(),
                )
        except UsageError as error:  # a taken port, a full disk: this engine's cells, not the run
            self.stop()
            raise EngineError(str(error)) from None
        except BaseException:
            self.stop()
            raise

    def _ready(self) -> bool:
        assert self.process
        if not process.healthy(f"{self.url}/health"):
            return False
        if self.spec.runtime == "local" and not process.owns_port(self.process, self._port):
            raise EngineError(
                f"port {self._port} is answered by a process that is not ours; choose another `port` or drop it",
                self.process.tail(),
            )
        # a container's port is held by the container tool, which refuses to start when it is taken
        return self.process.alive()

    def _mounts(self) -> dict[Path, str]:
        mounts = {self.work: "rw"}
        if self.model.path.is_dir():
            mounts[self.model.path.resolve()] = "ro"
        else:
            mounts[Path.home() / ".cache" / "huggingface"] = "rw"
        return mounts

    @classmethod
    def image(cls, spec: EngineSpec) -> str:
        """The container's image: the scenario's, else that of the release."""
        return spec.image or cls.image_of(spec.version)

    @classmethod
    @abstractmethod
    def image_of(cls, version: str) -> str:
        """The image that the engine's makers publish for a release."""

    def alive(self) -> bool:
        """Whether it can measure: it runs, and did not leave requests of the last cell unanswered."""
        return self.process is not None and self.process.alive() and not self._hung

    def stop(self) -> None:
        """End it, wait until nothing of it is left, and remove its files."""
        if self.process:
            self.process.stop()
        if self._work:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

    def failure(self, what: str) -> EngineError:
        """The error for an engine that died or hangs, with the reason that its log gives, if any."""
        assert self.process
        time.sleep(0.5)  # let a dying process finish its last lines
        reason = self.process.search_log(self.known) or what
        return EngineError(f"{self.title} failed while measuring: {reason}", self.process.tail())

    # measuring -----------------------------------------------------------------------------------------------------
    def reconfigure(self, limits: Limits) -> None:
        """The limits of the next cell; ValueError for one that this engine can only have by a new start."""
        if limits != self.limits:
            raise ValueError(f"{self.title} was started with {self.limits} and cannot go on with {limits}")

    def mark(self) -> None:
        """Forget what was written down so far."""
        self._mark = self.log.stat().st_size if self.log.exists() else 0

    def lines(self) -> list[str]:
        """The log's lines since the mark."""
        with open(self.log, "rb") as file:
            file.seek(self._mark)
            return file.read().decode(errors="replace").splitlines()

    def replay(
        self,
        workload: Workload,
        *,
        timeout_s: float,
        keep_chunks: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> Replay:
        """Send a workload and wait for all of it, timeout_s at most. EngineError when the engine dies or hangs.

        When only some requests hang, their rows say so, and the engine counts as dead for the next cell.
        """
        assert self.limits
        self.mark()
        try:
            result = replay(
                self.target(),
                workload,
                timeout_s=timeout_s,
                keep_chunks=keep_chunks,
                streams=self.limits.max_batch_size,
                progress=progress,
            )
        except (EOFError, OSError, EngineError) as error:
            raise self.failure(str(error) or "it closed the connection") from None
        if self._died(result):
            raise self.failure(f"it exited with status {self.process.child.returncode}")
        hung = sum((row["error"] or "").startswith(GIVEN_UP) for row in result.rows)
        self._hung = hung > 0
        if hung == len(result.rows):
            raise self.failure(f"no request was answered within {timeout_s:g} s")
        return result

    def _died(self, result: Replay) -> bool:
        """Whether its process is gone. After broken connections it gets a moment: they break before it ends."""
        assert self.process
        broken = any(row["error"] and not row["error"].startswith(ANSWERED) for row in result.rows)
        deadline = time.monotonic() + (DYING_S if broken else 0.0)
        while self.process.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.process.alive()

    def take_trace(self, t0_ns: int, finished: int) -> Traced:
        """The engine's own account of the last replay."""
        time.sleep(SETTLE_S)
        return self.read(t0_ns)

    def describe(self) -> dict[str, Any]:
        """For the provenance: what was started, with what, and how long that took."""
        return {
            "name": self.name,
            "version": self.spec.version,
            "version_told": self.served,
            "runtime": self.spec.runtime,
            "image": self.image(self.spec) if self.spec.runtime == "container" else None,
            "command": self.command,
            "environment": {**self.environment(), **self.spec.env},
            "start_s": round(self.start_s, 1),
            "started_with": self.started_with.model_dump() if self.started_with else None,
            "model": {"name": self.model.name, "random_weights": self.model.is_random},
            **self.told,
        }
