"""Whatever already runs at an address: asked, never started, never stopped.

`base_url` says where, `limits` what it was started with. Those limits, and the release, are the user's word: nothing
can check them, the record says so, and only the cells of exactly those limits are measured. To sweep a limit, start the
engine anew by hand, change `limits`, and run again; recorded cells stay.

api: openai-completions (token ids; `args: {prompt_format: text}` for servers that take none), openai-chat or tgi. Which
optional keys the server takes (`ignore_eos`, continuous usage) is found out by asking. A /metrics page with a known
gauge gives the running batch.
"""

import dataclasses
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from batchlab.client import Replay, Target, replay
from batchlab.client.negotiate import accepted
from batchlab.engines import polling
from batchlab.engines.served import GIVEN_UP, NO_REQUESTS
from batchlab.engines.tools import ask
from batchlab.engines.trace import Traced
from batchlab.errors import EngineError
from batchlab.models import ModelFiles
from batchlab.scenario import EngineSpec, Limits
from batchlab.scrape import Samples
from batchlab.workload import Workload, build

STATED = "its limits and release: they are the scenario's word"
ASK_S = 60.0  # for the requests that find out what it takes


class AttachedEngine:
    """An engine that somebody else started."""

    name = "attach"
    warm_limits = ()

    def __init__(
        self, spec: EngineSpec, options: dict[str, Any], model: ModelFiles, transport: str, *, log: Path
    ) -> None:
        self.spec, self.options, self.model, self.transport = spec, options, model, transport
        self.base_url = (spec.base_url or "").rstrip("/").removesuffix("/v1")
        self.api = spec.api or "openai-completions"
        args = options.get("args", {})
        default = "ids" if self.api == "openai-completions" else "text"
        self.prompt_format = args.get("prompt_format", default)
        self.text_prompts = self.prompt_format == "text"
        self.limits: Limits | None = None
        self.start_s = 0.0
        self._target: Target | None = None
        self._samples: Samples | None = None

    @classmethod
    def find(cls, spec: EngineSpec) -> str:
        """The address. Whether anybody answers there shows when it is asked."""
        return spec.base_url or ""

    def start(self, limits: Limits, tick: Callable[[float], None] | None = None) -> None:
        """Ask whether it is there and what it takes. EngineError when it is not, or was started with other limits."""
        if limits != self.spec.limits:
            raise EngineError(
                f"{self.base_url} runs with {_pair(self.spec.limits)} by the scenario's word; for {_pair(limits)} "
                "start it anew and change engines.attach.limits"
            )
        if not _answers(self.base_url):
            raise EngineError(f"nobody answers at {self.base_url}; start the engine there, or correct base_url")
        asked = Target(
            base_url=self.base_url,
            api=self.api,
            model=self.spec.served_model_name or self._served() or self.model.name,
            prompt_format=self.prompt_format,
            ignore_eos=self.api != "tgi",
            continuous_usage=self.api != "tgi",
        )
        self._target = accepted(asked, self._question, timeout_s=ASK_S)
        self.limits = limits

    def _served(self) -> str | None:
        """The model's name by the server's own list, when that has one."""
        told = ask(f"{self.base_url}/v1/models") if self.api != "tgi" else None
        listed = told.get("data") if isinstance(told, dict) else None
        return listed[0].get("id") if listed and len(listed) == 1 else None

    def _question(self, target: Target) -> Workload:
        return build(
            {"kind": "fixed", "input_len": 8, "output_len": 4},
            num_requests=1,
            request_rate=None,
            seed=0,
            nonce="attach",
            vocab_size=self.model.vocab_size,
            tokenizer=self.model.tokenizer if self.text_prompts else None,
        )

    def alive(self) -> bool:
        return self._target is not None and _answers(self.base_url)

    def stop(self) -> None:
        """Let go of it; it runs on."""
        self._target = None

    def reconfigure(self, limits: Limits) -> None:
        """Nothing to do: the group's cells all have the limits that it runs with."""
        if limits != self.limits:
            raise ValueError(f"an engine that runs already has {self.limits}, not {limits}")

    def replay(
        self,
        workload: Workload,
        *,
        timeout_s: float,
        keep_chunks: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> Replay:
        """Send a workload and wait for all of it. EngineError when nobody answers or nothing comes in time."""
        assert self._target and self.limits
        with polling.polling(f"{self.base_url}/metrics") as self._samples:
            result = replay(
                self._target,
                workload,
                timeout_s=timeout_s,
                keep_chunks=keep_chunks,
                streams=self.limits.max_batch_size,
                progress=progress,
            )
        if all((row["error"] or "").startswith(GIVEN_UP) for row in result.rows):
            raise EngineError(f"{self.base_url} answered no request within {timeout_s:g} s")
        return result

    def take_trace(self, t0_ns: int, finished: int) -> Traced:
        assert self.limits
        return polling.traced(self._samples, t0_ns, self.limits, (NO_REQUESTS, STATED))

    def describe(self) -> dict[str, Any]:
        asked = dataclasses.asdict(self._target) if self._target else {}
        return {
            "name": self.name,
            "version": self.spec.version,
            "runtime": "attach",
            "base_url": self.base_url,
            "asked": {
                key: asked.get(key) for key in ("api", "model", "prompt_format", "ignore_eos", "continuous_usage")
            },
            "start_s": 0.0,
            "stated_limits": self.spec.limits.model_dump() if self.spec.limits else None,
            "model": {"name": self.model.name, "random_weights": self.model.is_random},
        }


def _pair(limits: Limits | None) -> str:
    return f"{limits.max_batch_size}/{limits.max_num_tokens}" if limits else "nothing stated"


def _answers(base_url: str) -> bool:
    """Whether an HTTP server is there, whatever it says."""
    url = urlsplit(base_url)
    root = urlunsplit((url.scheme, url.netloc, "/health", "", ""))
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(root, timeout=5.0).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return True
