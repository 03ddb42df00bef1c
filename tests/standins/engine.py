"""A simulated engine's scheduler at real time: the same policy, its iterations slept through instead of added up."""

import asyncio
import importlib
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import batchlab

# batchlab.sim imports all that a simulation needs; its policies need NumPy alone, and a server should be up at once
if "batchlab.sim" not in sys.modules:
    bare = types.ModuleType("batchlab.sim")
    bare.__path__ = [str(Path(batchlab.__file__).parent / "sim")]
    sys.modules["batchlab.sim"] = bare
policies = importlib.import_module("batchlab.sim.policies")
state = importlib.import_module("batchlab.sim.state")


@dataclass(frozen=True, slots=True)
class Speed:
    """Invented times of an iteration: so much, and so much more for each prompt token and each running request."""

    step_ms: float = 3.0
    prefill_token_us: float = 20.0
    decode_us: float = 60.0

    def step_s(self, prefill_tokens: int, running: int) -> float:
        return self.step_ms / 1e3 + (self.prefill_token_us * prefill_tokens + self.decode_us * running) / 1e6


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as it ran. Times are time.monotonic() seconds; `active` counts requests that hold a slot,
    `held_back` those of them that would generate and wait for others' prompts.
    """

    number: int
    started: float
    ended: float
    context: int
    context_tokens: int
    generation: int
    held_back: int
    active: int
    waiting: int
    ended_requests: int
    paused: int
    kv_use: float
    kv_used: int


class Engine:
    """Runs a policy. `tell` is called with every Iteration."""

    def __init__(
        self,
        name: str,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        kv_tokens: int,
        block_size: int,
        options: dict[str, Any],
        speed: Speed,
        tell: Callable[[Iteration], None],
    ) -> None:
        kind = policies.POLICIES[name]
        kv = state.KvBlocks(total=kv_tokens // block_size, block_size=block_size)
        self.policy = kind(policies.Limits(max_batch_size, max_num_tokens), kv, {**kind.options, **options})
        self.speed, self.tell = speed, tell
        self.count = 0
        self._submitted = 0
        self._listeners: dict[Any, Callable[[int], None]] = {}
        self._left: dict[Any, int] = {}
        self._unnoticed: deque[tuple[int, list]] = deque()
        self._news = asyncio.Event()

    def submit(self, prompt: int, output: int, on_token: Callable[[int], None]) -> str | None:
        """Queue a request; why it can never run, or None. `on_token` is called for each token with what is left."""
        self._submitted += 1
        sequence = state.Sequence(self._submitted, prompt, output, queued_s=time.monotonic())
        if refusal := self.policy.refusal(sequence):
            return refusal
        self._listeners[sequence], self._left[sequence] = on_token, output
        self.policy.add(sequence)
        self._news.set()
        return None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._notice(self.count - self.policy.finish_lag)
            step = self.policy.schedule()
            for dropped in self.policy.dropped:
                self._listeners.pop(dropped)(-1)
            self.policy.dropped.clear()
            if step is not None:
                await self._iterate(step)
            elif self._unnoticed:
                self._notice(self._unnoticed[0][0])
            else:
                self._news.clear()
                await self._news.wait()

    async def _iterate(self, step: Any) -> None:
        policy, started = self.policy, time.monotonic()
        decoding = list(policy.decodes) if step.decodes else []
        tokens = sum(new for _, new, _ in step.prefills)
        active, waiting = policy.holding, policy.queue_length
        held_back = 0 if step.decodes else len(policy.decodes)
        await asyncio.sleep(self.speed.step_s(tokens, len(decoding) + len(step.prefills)))
        joined = list(policy.joining)
        kv_use = float(policy.kv_use(step, 1)[0])
        ended = policy.advance(step, 1)
        iteration = Iteration(
            number=self.count,
            started=started,
            ended=time.monotonic(),
            context=len(step.prefills),
            context_tokens=tokens,
            generation=len(decoding),
            held_back=held_back,
            active=active,
            waiting=waiting,
            ended_requests=len(ended),
            paused=step.preempted,
            kv_use=kv_use,
            kv_used=policy.kv.used,
        )
        self.count += 1
        self.tell(iteration)
        for sequence in (*decoding, *joined):
            self._give(sequence)
        if ended:
            self._unnoticed.append((iteration.number, ended))

    def _give(self, sequence: Any) -> None:
        if sequence not in self._listeners:  # it has all its tokens, and the scheduler has yet to notice
            return
        self._left[sequence] -= 1
        left = self._left[sequence]
        listener = self._listeners[sequence] if left else self._listeners.pop(sequence)
        if not left:
            del self._left[sequence]
        listener(left)

    def _notice(self, number: int) -> None:
        while self._unnoticed and self._unnoticed[0][0] <= number:
            for sequence in self._unnoticed.popleft()[1]:
                self.policy.retire(sequence)
