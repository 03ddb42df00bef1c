"""The host's own time: what operator tables do not hold.

Planning an iteration, preparing its inputs and launching its kernels is the work of one thread, beside the card's work
on the iteration before. vLLM records kernels as CUDA graphs: those of decodes alone as one graph; those of iterations
with prompts in pieces, between which attention is launched, and up to 512 tokens only (max_cudagraph_capture_size). So
a larger iteration with prompts launches each kernel of each layer, which takes a host longer than a card takes for some
hundred tokens.
"""

from dataclasses import dataclass, field, fields

import numpy as np
import pyarrow as pa

SHOWN = 20  # iterations that must show a launch before their median counts
AROUND = 5  # launches, whose median stands for one
READ_US = 1400.0  # from the last launch of an iteration to the output before it: median of the H200 calibration cells
LONGER = 1.2  # times an iteration of decodes alone: a shorter launch is hidden behind it


_NONE = np.empty((0, 2))


@dataclass(frozen=True, slots=True)
class HostOverheads:
    """Time of the host that the operator tables do not hold. All 0 means: not fitted."""

    step_us: float = 0.0  # each scheduling: once an iteration, or once a group of vLLM's multi-step
    token_us: float = 0.0  # each output token of an iteration
    request_us: float = 0.0  # each request, one after another, on its way into the engine's queue
    message_us: float = 0.0  # each way between client and engine, all requests at the same time
    stream_us: float = 0.0  # each way besides, each request that runs: their tokens pass the front end one by one
    gather_us: float = 0.0  # an idle engine takes in what arrives so soon after a request, and then plans
    prompt_us: float = 0.0  # each iteration with prompts whose kernels no graph holds: the gaps between them
    # from the plan of an iteration to its last launch, beside the card's work on the iteration before
    launch_us: float = 0.0  # any iteration; all that it takes where its kernels are one graph
    pieces_us: float = 0.0  # each layer besides, where they are graphs in pieces: prompts of few tokens
    eager_us: float = 0.0  # each layer besides, where no graph is as large

    @property
    def fitted(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def message_s(self, running: int | np.ndarray) -> float | np.ndarray:
        """Each way between client and engine, while so many requests run."""
        return (self.message_us + self.stream_us * running) * 1e-6

    def launch_s(self, layers: int, *, prompts: bool, recorded: bool) -> float:
        """From the plan of an iteration to the launch of its last kernel."""
        layer_us = self.eager_us if not recorded else self.pieces_us if prompts else 0.0
        return (self.launch_us + layers * layer_us) * 1e-6


@dataclass(frozen=True, slots=True)
class Launch:
    """Measured times from a plan to its last launch, in microseconds: kernels recorded as one graph, in pieces, or
    launched one by one. None where too few iterations show it.
    """

    layers: int  # of the model
    graph_us: float | None
    pieces_us: float | None
    eager_us: float | None


@dataclass(frozen=True, slots=True)
class LaunchTrace:
    """Launches as a run showed them: when each was planned, in seconds, and how long it took, in microseconds, until
    the output before it could be read. `pieces`, `eager` and `graph` as in `Launch`.
    """

    pieces: np.ndarray  # float64 (n, 2): planned at, took; in order of time
    eager: np.ndarray
    graph: np.ndarray = field(default_factory=lambda: _NONE)

    def launch_s(self, at_s: float, *, prompts: bool, recorded: bool) -> float | None:
        """The median of the AROUND launches of a kind (as in `HostOverheads.launch_s`) nearest to `at_s`; None where
        the run showed none.
        """
        shown = self.eager if not recorded else self.pieces if prompts else self.graph
        if not len(shown):
            return None
        at = int(np.searchsorted(shown[:, 0], at_s))
        first = min(max(at - AROUND // 2, 0), max(len(shown) - AROUND, 0))
        return float(np.median(shown[first : first + AROUND, 1])) * 1e-6


def overheads_of(launch: Launch, host: HostOverheads) -> dict[str, float]:
    """launch_us, pieces_us and eager_us (see `HostOverheads`) as far as `launch` shows them; what it does not show is
    taken from `host`.
    """
    first = launch.graph_us or host.launch_us
    layer = {name: us for name in ("pieces_us", "eager_us") if (us := getattr(launch, name)) is not None}
    known = {name: max((us - first) / launch.layers, 0.0) for name, us in layer.items()}
    return {"launch_us": launch.graph_us, **known} if launch.graph_us else known


def launches(iterations: pa.Table, recorded_tokens: int) -> dict[str, np.ndarray]:
    """Each time from a plan to its last launch that iterations (records.ITERATIONS) of an engine that plans ahead may
    show: graph_us, pieces_us, eager_us as in `Launch`, and decode_us, that of decodes among decodes. Each float64
    (n, 2): planned at, in seconds, and took, in microseconds.

    The output of an iteration is read only once the next one is launched. So after decodes alone, the time from a plan
    with prompts to the output before it is the launch, where it is longer than such an iteration takes. And where
    prompts of few tokens went before, the time from a plan of decodes alone to the output before it is their launch,
    where it is shorter. `recorded_tokens` are the most for which there are graphs.
    """
    columns = ("scheduled_s", "output_s", "prefill_tokens", "decode_tokens")
    planned, output, prompts, decodes = (iterations[name].to_numpy() for name in columns)
    if len(planned) < 3:
        return dict.fromkeys(("decode_us", "graph_us", "pieces_us", "eager_us"), _NONE)
    mixed, large = prompts > 0, prompts + decodes > recorded_tokens
    took_us = 1e6 * (output[1:-1] - planned[2:])  # by the third of three iterations
    each = np.column_stack([planned[2:], took_us])
    known = (took_us > 0) & ~mixed[:-2]
    into_prompts = known & ~mixed[1:-1] & mixed[2:]
    return {
        "decode_us": each[known & ~mixed[1:-1] & ~mixed[2:]],
        "graph_us": each[known & mixed[1:-1] & ~large[1:-1] & ~mixed[2:]],
        "pieces_us": each[into_prompts & ~large[2:]],
        "eager_us": each[into_prompts & large[2:]],
    }


def launch_trace(iterations: pa.Table, recorded_tokens: int) -> LaunchTrace:
    """The launches of all iterations, where their `launched_s` was recorded. Else those that show (`launches`): with
    prompts, where they are longer than iterations of decodes alone, which hide the others; of decodes, where as many
    show as `launch_times` asks for.
    """
    found = launches(iterations, recorded_tokens)
    if iterations["launched_s"].null_count < iterations.num_rows:
        return _recorded_launches(iterations, recorded_tokens, found)
    hidden_us = LONGER * np.median(found["decode_us"][:, 1]) if len(found["decode_us"]) else np.inf
    pieces, eager = (found[name][found[name][:, 1] > hidden_us] for name in ("pieces_us", "eager_us"))
    shown = launch_times(iterations, 1, recorded_tokens).graph_us is not None
    return LaunchTrace(pieces, eager, found["graph_us"] if shown else _NONE)


def _recorded_launches(iterations: pa.Table, recorded_tokens: int, shown: dict[str, np.ndarray]) -> LaunchTrace:
    names = ("scheduled_s", "launched_s", "prefill_tokens", "decode_tokens")
    planned, launched, prompts, decodes = (iterations[name].to_numpy() for name in names)
    took_us = 1e6 * (launched - planned)
    after = np.concatenate([shown["pieces_us"], shown["eager_us"]])  # where the output before was read right after
    read_us = after[:, 1] - took_us[np.searchsorted(planned, after[:, 0])]
    took_us = took_us + (np.median(read_us) if len(read_us) >= AROUND else READ_US)
    mixed, large = prompts > 0, prompts + decodes > recorded_tokens
    each, known = np.column_stack([planned, took_us]), ~np.isnan(took_us)
    return LaunchTrace(*(each[known & kind] for kind in (mixed & ~large, mixed & large, ~mixed)))


def completed(own: LaunchTrace, others: LaunchTrace, middle_s: float) -> LaunchTrace:
    """`own`, and where it has fewer than SHOWN of a kind with prompts, the median of the SHOWN nearest to `middle_s` of
    its own and of `others`, times on the same clock, as one that stands for all; none where there are not as many.
    Launches of decodes take a host the longer, the more requests run, so other cells do not tell them.
    """
    kinds = []
    for mine, more in ((own.pieces, others.pieces), (own.eager, others.eager)):
        near = np.concatenate([mine, more])
        near = near[np.argsort(np.abs(near[:, 0] - middle_s), kind="stable")[:SHOWN]]
        one = np.array([[middle_s, np.median(near[:, 1])]]) if len(near) == SHOWN else _NONE
        kinds.append(mine if len(mine) >= SHOWN else one)
    return LaunchTrace(*kinds, own.graph)


def launch_times(iterations: pa.Table, layers: int, recorded_tokens: int) -> Launch:
    """Medians of what `launches` finds, as far as they can be told from the iterations around them."""
    found = launches(iterations, recorded_tokens)
    if not len(found["decode_us"]):
        return Launch(layers, None, None, None)
    decode_us = float(np.median(found["decode_us"][:, 1]))
    graph_us, pieces_us, eager_us = (_median(found[name][:, 1]) for name in ("graph_us", "pieces_us", "eager_us"))
    return Launch(
        layers,
        graph_us if graph_us and graph_us < decode_us else None,
        pieces_us if pieces_us and pieces_us > LONGER * decode_us else None,
        eager_us if eager_us and eager_us > LONGER * decode_us else None,
    )


def gather_us(iterations: pa.Table, requests: pa.Table) -> float | None:
    """From the first request in the engine's queue to the first plan, where more requests came right behind it: the
    engine empties its queue before it plans. None where neither was recorded. Tables of `batchlab.records`.
    """
    queued = requests["engine_queued_s"].drop_null()
    if not len(queued) or not iterations.num_rows:
        return None
    return max(1e6 * (iterations["scheduled_s"][0].as_py() - min(queued.to_pylist())), 0.0)


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) >= SHOWN else None
