"""`simulate`: one cell, from names to records."""

from collections.abc import Sequence as Items
from dataclasses import asdict
from typing import Any

from batchlab import __version__
from batchlab.errors import UsageError
from batchlab.models import Shape
from batchlab.sim.core import Simulation, StepTimes
from batchlab.sim.hardware import Card, load_card
from batchlab.sim.host import HostOverheads, LaunchTrace
from batchlab.sim.memory import Quantization, kv_blocks, load_quantization
from batchlab.sim.models import load_model
from batchlab.sim.policies import POLICIES, Limits
from batchlab.sim.policies.base import checked_options
from batchlab.sim.power import PowerLimit, PowerLimited
from batchlab.sim.result import SimResult
from batchlab.sim.roofline import RooflineTimes
from batchlab.sim.scaled import ScaledTimes
from batchlab.sim.state import Sequence
from batchlab.sim.tables import table_times

TENSOR_PARALLEL = (1, 2, 4)
KERNELS = ("vllm", "trtllm", "sglang")
STEP_TIMES = ("auto", "tables", "roofline")


def simulate(
    engine: str,
    hardware: str,
    model: str | Shape,
    requests: Items[tuple[float, int, int]],
    *,
    max_batch_size: int,
    max_num_tokens: int,
    tp: int = 1,
    concurrency: int | None = None,
    quantization: str | None = "none",
    policy_options: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    kernels: str | None = None,
    step_times: str | StepTimes = "auto",
    host: HostOverheads | None = None,
    launches: LaunchTrace | None = None,
    power: PowerLimit | None = None,
    card_factor: float = 1.0,
    keep_chunks: bool = False,
) -> SimResult:
    """Simulate one engine on one workload.

    Args:
        engine: a key of `POLICIES`.
        hardware: aiconfigurator-core's name of a card (h200_sxm, a100_sxm, …), or one of `hardware.OWN_CARDS`.
        model: a folder of data/models, a folder with a config.json, or a shape.
        requests: (scheduled_s, input_len, output_len) of each, in seconds from the start; all 0 for an infinite rate.
        max_batch_size, max_num_tokens: the limits, as the engine means them (see its policy).
        tp: cards that the model is spread over.
        concurrency: closed loop: that many requests at a time, the next sent when one ends; scheduled_s is then
            ignored.
        quantization: none or fp8.
        policy_options: over the policy's `options`.
        memory: over the estimate of the KV cache: memory_fraction, block_size, and kv_blocks, kv_tokens or
            kv_memory_gib.
        kernels: operator tables of another engine (vllm, trtllm, sglang): the same step times under several policies.
        step_times: tables (measured operators), roofline, auto (tables where the card has them), or an object with the
            methods of `core.StepTimes`.
        host: the host's own time; without, none.
        launches: launches that a run of this load showed, at their times, in place of the host's constants; of a
            stretch of decodes that is worked in one go, at its begin.
        power: what the card sustains at its power limit; without, no limit.
        card_factor: times as long as the step times and the power limit say, for a card that is slower or faster.
        keep_chunks: also write each token's time into the rows.

    Returns the rows and the iterations of `batchlab.records`, and the provenance. Deterministic: equal arguments,
    equal result. Raises UsageError for an unknown name, listing what there is, and for a value out of range.
    """
    policy_type = POLICIES.get(engine)
    if policy_type is None:
        raise UsageError(f"unknown engine '{engine}'; simulated are: {', '.join(POLICIES)}")
    _check(requests, max_batch_size, max_num_tokens, tp, concurrency)
    options = checked_options(engine, policy_type.options, policy_options)
    card, shape = load_card(hardware), load_model(model)
    quant = load_quantization(quantization, card)
    if shape.heads % tp:
        raise UsageError(f"tp {tp} does not divide the {shape.heads} attention heads of {shape.name}")
    limits = Limits(max_batch_size, max_num_tokens)
    blocks, memory_how = kv_blocks(policy_type, shape, card, quant, tp, limits, memory)
    times = _step_times(step_times, shape, card, kernels or policy_type.kernels, quant, tp)
    if card_factor != 1:
        times = ScaledTimes(times, card_factor)
    if power:
        times = PowerLimited(times, power.slower(card_factor), shape, quant, tp)
    host = host or HostOverheads()
    run = _Workload(requests, concurrency)
    policy = policy_type(limits, blocks, options)
    simulation = Simulation(policy, times, host, run.first(), run.follow_up, shape.layers, launches)
    trace = simulation.run()
    provenance = {
        "evidence": "simulated",
        "simulator": f"batchlab {__version__}",
        "engine": engine,
        "policy": policy_type.versions,
        "policy_options": options,
        "model": shape.name,
        "hardware": hardware,
        "tp": tp,
        "quantization": quant.name,
        "limits": {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens},
        "kv": memory_how,
        "step_times": getattr(times, "provenance", {"kind": type(times).__name__}),
        "host_overheads": {**asdict(host), "fitted": host.fitted},
        "launches": "replayed" if launches else "constant",
    }
    return SimResult(trace, run.sent, limits, host, keep_chunks, provenance)


def _check(
    requests: Items[tuple[float, int, int]], max_batch_size: int, max_num_tokens: int, tp: int, concurrency: int | None
) -> None:
    if max_batch_size < 1 or max_num_tokens < 1:
        raise UsageError(f"max_batch_size {max_batch_size} and max_num_tokens {max_num_tokens} must be 1 or more")
    if tp not in TENSOR_PARALLEL:
        raise UsageError(f"tp {tp}: simulated are {', '.join(map(str, TENSOR_PARALLEL))} cards")
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"concurrency {concurrency} must be 1 or more")
    for i, (at, prompt, output) in enumerate(requests):
        if not (at >= 0 and prompt >= 1 and output >= 1 and at != float("inf")):
            raise UsageError(
                f"request {i}: (scheduled_s, input_len, output_len) = ({at}, {prompt}, {output}); "
                "want a time of 0 or more and lengths of 1 or more"
            )


def _step_times(
    wanted: str | StepTimes, model: Shape, card: Card, kernels: str, quantization: Quantization, tp: int
) -> StepTimes:
    if not isinstance(wanted, str):
        return wanted
    if wanted not in STEP_TIMES:
        raise UsageError(f"unknown step_times '{wanted}'; there is: {', '.join(STEP_TIMES)}")
    if kernels not in KERNELS:
        raise UsageError(f"unknown kernels '{kernels}'; there is: {', '.join(KERNELS)}")
    if wanted == "roofline" or (wanted == "auto" and not card.measured):
        return RooflineTimes(model, card, quantization, tp)
    return table_times(model, card, kernels, quantization, tp)


class _Workload:
    """The requests, in the open (at their times) or closed (so many at a time)."""

    def __init__(self, requests: Items[tuple[float, int, int]], concurrency: int | None) -> None:
        self.concurrency = concurrency
        self.left = [Sequence(i, prompt, output) for i, (_, prompt, output) in enumerate(requests)][::-1]
        self.times = [at for at, _, _ in requests]
        self.sent: list[tuple[float, Sequence]] = []

    def first(self) -> list[tuple[float, Sequence]]:
        count = len(self.left) if self.concurrency is None else min(self.concurrency, len(self.left))
        for _ in range(count):
            seq = self.left.pop()
            self.sent.append((self.times[seq.index] if self.concurrency is None else 0.0, seq))
        return list(self.sent)

    def follow_up(self, ended: Sequence, end_s: float) -> tuple[float, Sequence] | None:
        if not self.left:
            return None
        self.sent.append((end_s, self.left.pop()))
        return self.sent[-1]
