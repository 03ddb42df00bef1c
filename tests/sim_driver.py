"""Ask a policy what it would run, iteration by iteration, without times; and step times that a hand can add up."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchlab.sim.policies import POLICIES, Limits
from batchlab.sim.policies.base import checked_options
from batchlab.sim.state import KvBlocks, Sequence


@dataclass
class Decision:
    """Tokens of each request in an iteration, and who was preempted in it."""

    tokens: dict[int, int]
    preempted: list[int] = field(default_factory=list)


def decisions(
    engine: str,
    requests: list[tuple[int, int, int]],
    *,
    batch: int,
    tokens: int,
    blocks: int = 10_000,
    block_size: int | None = None,
    stop: int = 10_000,
    **options: Any,
) -> list[Decision]:
    """Run a policy over (iteration of arrival, input_len, output_len); a request arrives just before that iteration
    is planned.

    Keeps the pipeline that the engine keeps: with a lag of two, an iteration is planned before the last one's end
    is noticed.
    """
    kind = POLICIES[engine]
    kv = KvBlocks(blocks, block_size or kind.block_size)
    policy = kind(Limits(batch, tokens), kv, checked_options(engine, kind.options, options))
    arrivals = deque(sorted((at, k, prompt, output) for k, (at, prompt, output) in enumerate(requests)))
    everyone: list[Sequence] = []
    flight: deque[list[Sequence]] = deque()
    log: list[Decision] = []
    unfinished = 0
    while len(log) < stop:
        while arrivals and (arrivals[0][0] <= len(log) or not unfinished):
            _, k, prompt, output = arrivals.popleft()
            everyone.append(Sequence(k, prompt, output))
            assert policy.refusal(everyone[-1]) is None
            policy.add(everyone[-1])
            unfinished += 1
        if not unfinished:
            return log
        before = {s.index: s.preemptions for s in everyone}
        step = policy.schedule()
        ended: list[Sequence] = []
        for _ in range(step.group if step else 1):
            if step:
                planned = {s.index: 1 for s in policy.decodes} if step.decodes else {}
                planned |= {s.index: n for s, n, _ in step.prefills}
                log.append(Decision(planned, sorted(s.index for s in everyone if s.preemptions > before[s.index])))
                ended += policy.advance(step, 1)
                before = {s.index: s.preemptions for s in everyone}
        flight.append(ended)
        if len(flight) < policy.finish_lag and step:
            continue
        for seq in flight.popleft():
            policy.retire(seq)
            unfinished -= 1
    return log


def run(engine: str, requests: list[tuple[int, int, int]], **limits: Any) -> list[dict[int, int]]:
    """The tokens of each iteration only."""
    return [d.tokens for d in decisions(engine, requests, **limits)]


@dataclass
class HandTimes:
    """`base` seconds an iteration, and `token` for each of its tokens."""

    base: float = 1.0
    token: float = 0.0
    context: float = 0.0  # for each KV token that a decoding request reads
    swap: float = 0.0

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        return self.base + self.token * (decodes + sum(n for n, _ in prefills)) + self.context * context_tokens

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        return self.base + self.token * decodes + self.context * (context_tokens + decodes * np.arange(steps))

    def swap_s(self, tokens: int) -> float:
        return self.swap * tokens

    def ran(self, steps: int, idle_s: float) -> None:
        pass
