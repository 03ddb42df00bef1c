"""The simulation: iterations one after another, many at once where nothing can change.

Time belongs to the policy's pipeline. Iteration m is scheduled when iteration m - schedule_lag has given its output
(or when a request arrives at an idle engine), and runs when iteration m - 1 has ended. Ends are noticed by the
schedule finish_lag iterations later.

The host is one thread: it plans an iteration, launches its kernels, and only then reads the output of the iteration
before. An iteration whose kernels are launched one by one may so end later than the card alone would end it, and
hold back the output of the one before it.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from batchlab.sim.host import HostOverheads, LaunchTrace
from batchlab.sim.policies.base import Policy, Step
from batchlab.sim.state import Sequence


class StepTimes(Protocol):
    """Durations of iterations on one machine, in seconds.

    `context_tokens` is the KV of all decoding sequences, `longest` that of the one that has the most (0: all are
    alike), `padding` the tokens of nobody that are computed along, because kernels were recorded for some sizes only.
    """

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        """One iteration. `prefills`: (new tokens, tokens before them) of each prompt piece."""

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        """`steps` decode iterations of the same sequences, whose contexts grow by one token each: float64 (steps,)."""

    def swap_s(self, tokens: int) -> float:
        """Moving the KV of so many tokens between card and host."""

    def ran(self, steps: int, idle_s: float) -> None:
        """So many of the iterations last asked for ran, after the card had idled for `idle_s`."""


@dataclass(slots=True)
class Trace:
    """What happened. A part is a run of iterations on one plan: some columns hold a number a part, some an array a
    part.
    """

    lengths: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)  # in the part's first iteration
    scheduled_s: list[np.ndarray] = field(default_factory=list)
    output_s: list[np.ndarray] = field(default_factory=list)
    kv_use: list[np.ndarray] = field(default_factory=list)
    waiting: list[np.ndarray] = field(default_factory=list)
    iterations: int = 0

    def column(self, name: str) -> np.ndarray:
        """A column, one value an iteration."""
        parts = getattr(self, name)
        if not parts:
            return np.empty(0)
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        values = np.repeat(parts, self.lengths)
        if name == "preemptions":
            first = np.cumsum(self.lengths) - self.lengths
            values[np.setdiff1d(np.arange(len(values)), first)] = 0
        return values


class Simulation:
    """One run of a policy over step times. `follow_up(sequence, end_s)` may return the next request of a closed
    loop; `layers` are those of the model, for the time of launching them.
    """

    def __init__(
        self,
        policy: Policy,
        times: StepTimes,
        host: HostOverheads,
        arrivals: list[tuple[float, Sequence]],
        follow_up: Callable[[Sequence, float], tuple[float, Sequence] | None] | None = None,
        layers: int = 1,
        replayed: LaunchTrace | None = None,
    ) -> None:
        self.policy, self.times, self.host, self.layers = policy, times, host, layers
        self.replayed = replayed
        self.follow_up = follow_up
        self.launches = replayed is not None or any((host.launch_us, host.pieces_us, host.eager_us))  # take any time
        self.trace = Trace()
        self.events = [(at, seq.index, seq) for at, seq in arrivals]
        heapq.heapify(self.events)
        self.frontend_s = 0.0
        self.queue: deque[Sequence] = deque()  # arrived at the front end, not yet seen by a schedule
        self.outputs = deque([0.0] * policy.schedule_lag, maxlen=policy.schedule_lag)
        self.pending: deque[tuple[int, float, list[Sequence]]] = (
            deque()
        )  # (iteration, its output, sequences that ended in it)
        self.now = 0.0  # the host's clock
        self.ran_s = 0.0  # when the card ended its last iteration, whose output the host may read later
        self.in_flight = False  # the host has planned it ahead, and not read it yet
        self.unread: list[Sequence] = []  # ended in it

    def run(self) -> Trace:
        policy = self.policy
        while True:
            self.now = max(self.now, self.outputs[0])
            self._notice_ends(self.trace.iterations - policy.finish_lag)
            self._take_arrivals()
            step = policy.schedule()
            self._collect_dropped()
            if step is not None:
                self._execute(step)
                continue
            if self.in_flight:
                self._read_output()
            if self.pending:
                self.now = max(self.now, self.pending[0][1])
                self._notice_ends(self.pending[0][0])
            elif self._next_arrival() is None:
                if policy.holding or policy.queue_length:
                    raise RuntimeError(
                        f"{type(policy).__name__} cannot go on: {policy.holding} held, {policy.queue_length} wait"
                    )
                return self.trace
            else:
                self.now = max(self.now, self._gathered(self._next_arrival()))

    # -- arrivals and ends --------------------------------------------------------------------------------------------

    def _next_arrival(self) -> float | None:
        """When the next request reaches the engine's queue. Requests pass the front end one after another."""
        while self.events and not self.queue:
            self._pass_front_end()
        return self.queue[0].queued_s if self.queue else None

    def _gathered(self, first_s: float) -> float:
        """When an idle engine plans that a request reaches at `first_s`: it takes in what arrives right behind it."""
        until = first_s + self.host.gather_us * 1e-6
        way_s = (self.host.request_us + self.host.message_us) * 1e-6
        while self.events and max(self.frontend_s, self.events[0][0]) + way_s <= until:
            self._pass_front_end()
        return max(seq.queued_s for seq in self.queue if seq.queued_s <= until)

    def _pass_front_end(self) -> None:
        at, _, seq = heapq.heappop(self.events)
        self.frontend_s = max(self.frontend_s, at) + self.host.request_us * 1e-6
        seq.queued_s = self.frontend_s + self.host.message_s(self.policy.holding)
        seq.error = self.policy.refusal(seq)
        self.queue.append(seq)

    def _take_arrivals(self) -> None:
        while (at := self._next_arrival()) is not None and at <= self.now:
            seq = self.queue.popleft()
            if seq.error is None:
                self.policy.add(seq)
            else:
                self._follow(seq, at)

    def _collect_dropped(self) -> None:
        for seq in self.policy.dropped:
            self._follow(seq, self.now)
        self.policy.dropped.clear()

    def _notice_ends(self, iteration: int) -> None:
        while self.pending and self.pending[0][0] <= iteration:
            for seq in self.pending.popleft()[2]:
                self.policy.retire(seq)

    def _follow(self, seq: Sequence, end_s: float) -> None:
        if self.follow_up and (following := self.follow_up(seq, end_s + self.host.message_s(self.policy.holding))):
            heapq.heappush(self.events, (following[0], following[1].index, following[1]))

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        policy = self.policy
        decodes, context = (len(policy.decodes), policy.decodes.context_tokens) if step.decodes else (0, 0)
        prefilled = sum(tokens for _, tokens, _ in step.prefills)
        steps = step.group
        if decodes and not step.prefills and not self.pending:
            steps = max(steps, policy.steady_steps(step))
        longest = policy.decodes.longest_context if decodes > 1 else 0
        filled = policy.padding(decodes + prefilled, mixed=bool(step.prefills))
        padding = filled or 0
        if steps == 1:
            pieces = [(n, before) for _, n, before in step.prefills]
            durations = np.array([self.times.step_s(pieces, decodes, context, longest, padding)])
        else:
            durations = self.times.decode_run_s(decodes, context, steps, longest, padding)
        durations += self.host.token_us * 1e-6 * (decodes + len(policy.joining))
        durations[:: step.group] += self.host.step_us * 1e-6
        if policy.schedule_lag == 1:  # the card waits for each plan's launch to begin
            durations[step.group :: step.group] += self.host.launch_us * 1e-6
        if step.prefills and filled is None:
            durations[0] += self.host.prompt_us * 1e-6
        if step.swapped_blocks:
            durations[0] += self.times.swap_s(step.swapped_blocks * policy.kv.block_size)
        launch_s, first_s = 0.0, self.host.launch_us * 1e-6  # to the last and to the first of its kernels
        if self.launches:
            prompts, recorded = bool(step.prefills), filled is not None
            launch_s = self.host.launch_s(self.layers, prompts=prompts, recorded=recorded)
            if self.replayed:
                launch_s = self.replayed.launch_s(self.now, prompts=prompts, recorded=recorded) or launch_s
                first_s = self.replayed.launch_s(self.now, prompts=False, recorded=True) or first_s
        if self.in_flight:
            self._read_output(self.now + launch_s)
        begin = max(self.now + first_s, self.ran_s)
        ends = begin + np.cumsum(durations)
        # when the host is free of what it launched before; one number where it launches in no time
        free = self.now + launch_s * np.arange(steps) if launch_s else self.now
        launched = free + launch_s
        if launch_s:
            ends = np.maximum(ends, launched)
        outputs = self._outputs_of(ends, launched)
        scheduled = self._schedule_times(outputs, free, step.group)
        if steps > step.group and policy.heeds_arrivals() and (arrival := self._next_arrival()) is not None:
            # an arrival changes the first plan that is made after it
            steps = max(step.group, int(np.searchsorted(scheduled, arrival)))
            ends, scheduled = ends[:steps], scheduled[:steps]
            outputs = self._outputs_of(ends, launched[:steps] if launch_s else launched)
        idle_s = float(ends[-1] - self.ran_s - durations[:steps].sum()) if launch_s else begin - self.ran_s
        self.times.ran(steps, idle_s)
        self.ran_s = float(ends[-1])
        self._record(step, scheduled, outputs, decodes, prefilled)
        self._finish(step, outputs)
        self.now = float(scheduled[-1]) + launch_s
        self.in_flight = self.launches and policy.schedule_lag > 1

    def _outputs_of(self, ends: np.ndarray, launched: np.ndarray | float) -> np.ndarray:
        """When the host reads the outputs of iterations on one plan: where it plans ahead, once it has launched the
        next; the last one's is put off by the next plan (`_read_output`).
        """
        if isinstance(launched, float) or self.policy.schedule_lag == 1 or len(ends) == 1:
            return ends
        return np.append(np.maximum(ends[:-1], launched[1:]), ends[-1])

    def _read_output(self, launched_s: float = 0.0) -> None:
        """Read the last iteration's output, which is in flight, not before `launched_s`."""
        if launched_s > self.outputs[-1]:
            self.outputs[-1] = self.trace.output_s[-1][-1] = launched_s
            if self.pending and self.pending[-1][0] == self.trace.iterations - 1:
                self.pending[-1] = (self.pending[-1][0], launched_s, self.pending[-1][2])
        self.in_flight = False
        for seq in self.unread:
            self._follow(seq, self.outputs[-1])
        self.unread.clear()

    def _schedule_times(self, outputs: np.ndarray, free: np.ndarray | float, group: int) -> np.ndarray:
        """When each of these iterations is planned: float64 (steps,)."""
        earlier = np.array([self.now, *list(self.outputs)[1:]])
        scheduled = np.maximum(np.concatenate([earlier, outputs])[: len(outputs)], free)
        return scheduled[np.arange(len(outputs)) // group * group] if group > 1 else scheduled

    def _record(self, step: Step, scheduled: np.ndarray, outputs: np.ndarray, decodes: int, prefilled: int) -> None:
        trace, policy = self.trace, self.policy
        trace.lengths.append(len(outputs))
        trace.running.append(decodes + len(step.prefills))
        trace.admitted.append(policy.holding)
        trace.prefill_tokens.append(prefilled)
        trace.decode_tokens.append(decodes)
        trace.preemptions.append(step.preempted)
        trace.scheduled_s.append(scheduled)
        trace.output_s.append(outputs)
        trace.kv_use.append(policy.kv_use(step, len(outputs)))
        trace.waiting.append(self._waiting(scheduled))

    def _waiting(self, scheduled: np.ndarray) -> np.ndarray:
        """Requests in the queue at each plan, those included that arrive during a run of iterations."""
        waiting = np.full(len(scheduled), self.policy.queue_length)
        if len(scheduled) > 1:
            while self.events and self.frontend_s <= scheduled[-1] and self.events[0][0] <= scheduled[-1]:
                self._pass_front_end()
            waiting += np.searchsorted(
                [seq.queued_s for seq in self.queue if seq.error is None], scheduled, side="right"
            )
        return waiting

    def _finish(self, step: Step, outputs: np.ndarray) -> None:
        policy, trace, steps = self.policy, self.trace, len(outputs)
        joined = set(policy.joining)
        for seq in policy.joining:
            seq.spans.append((-1, trace.iterations))
        first_tick = policy.decodes.tick
        ended = policy.advance(step, steps)
        for seq in ended:
            at = -1 if seq in joined else seq.end_tick - first_tick - 1
            if self.launches and policy.schedule_lag > 1 and at in (-1, steps - 1):
                self.unread.append(seq)
            else:
                self._follow(seq, float(outputs[at]))
        trace.iterations += steps
        if ended:
            self.pending.append((trace.iterations - 1, float(outputs[-1]), ended))
        self.outputs.extend(outputs[-policy.schedule_lag :].tolist())
