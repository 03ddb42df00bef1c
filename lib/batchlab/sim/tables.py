"""Step times from operator times that NVIDIA measured on the cards: the package aiconfigurator-core.

An iteration is composed of its operators: linear maps and element-wise work over all its tokens, the output layer
over the requests that sample, context attention over the prompt pieces, and generation attention over the decoding
requests. The package interpolates in its tables; it is asked for each value once.

Two things are put together here and not by the package. Generation attention is read on a grid (`BATCH_GRID`,
`CONTEXT_GRID`) and interpolated between, since thousands of iterations differ by one token of context each. Prompt
pieces of one iteration are one kernel call, so the package's fixed cost of a call counts once; and unequal whole
prompts stand as the equal ones that have the same sum of lengths and the same sum of squares.
"""

import logging
from bisect import bisect_right
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from batchlab.errors import UsageError
from batchlab.models import Shape
from batchlab.sim.hardware import NOT_INSTALLED, Card, systems_folder
from batchlab.sim.kernels import other_backend
from batchlab.sim.memory import Quantization

# The package's own answers have steps at the powers of two where its tables have points: both sides are read.
_OCTAVES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH_GRID = sorted(
    {
        *range(1, 9),
        *(base + base // 8 * i for base in _OCTAVES for i in range(1, 9)),
        *(2 * base - 1 for base in _OCTAVES),
    }
)
CONTEXT_GRID = np.unique(
    [
        *(1, 2, 4, 8),
        *range(16, 1024, 16),
        *range(1024, 4096, 64),
        *range(4096, 16384, 256),
        *range(16384, 131072 + 1, 2048),
        *(2**i + beyond for i in range(5, 15) for beyond in (1, 2)),
    ]
)
UNEVEN = 0.5  # of the way from the mean context to the longest, see TableTimes._context_of; assumed, not fitted
_SEGMENT = 16  # grid points of context read at a time
NOT_SHARED = ("context_attention", "context_logits_gemm")


class TableTimes:
    """Step times of a model on a card, from one backend's tables. Make it with `table_times`."""

    def __init__(self, model: Shape, card: Card, backend: str, quantization: Quantization, tp: int) -> None:
        self._engine, self.attention = _compile(model, card, backend, quantization, tp)
        self.provenance = _provenance(card, backend, quantization, tp, self.attention)
        self._swap_bytes = model.kv_bytes_at(quantization.kv_bytes, tp)
        self._pcie = card.pcie
        self._kv_heads = max(1, model.kv_heads // tp)
        self._multiprocessors = card.multiprocessors
        names = [
            name for name, *_ in self._engine.evaluate_context_ops(range(_count(self._engine)), batch_size=1, s=64)
        ]
        if missing := [n for n in NOT_SHARED if n not in names]:
            raise UsageError(
                f"model {model.name}: aiconfigurator-core builds it without {', '.join(missing)}; "
                "only dense decoders can be simulated"
            )
        self._shared_ops = [i for i, name in enumerate(names) if name not in NOT_SHARED]
        self._attention_op = [names.index("context_attention")]
        self._logits_op = [names.index("context_logits_gemm")]
        self._decoder, self._layers = self._engine, model.layers
        if (other := other_backend(model, card, backend, quantization, tp)) is not None:
            self._decoder, _ = _compile(model, card, other.name, quantization, tp)
            self.provenance["generation_attention"] = (
                f"{other.name}'s time of the same kernel, and what {backend}'s call takes more with {other.kv_heads} "
                "KV heads: its own table lacks the model's"
            )
        self._other = other
        generation = [name for name, *_ in self._decoder.decode_step_per_op(1, 64, 2)]
        self._generation_op = [generation.index("generation_attention")]
        self._shared: dict[int, float] = {}
        self._logits: dict[int, float] = {}
        self._context: dict[tuple[int, int, int], float] = {}
        self._rows: dict[int, np.ndarray] = {}  # batch on the grid → times over CONTEXT_GRID, read as far as needed
        self._between: dict[int, np.ndarray] = {}  # any batch → times over CONTEXT_GRID
        self._floor = self._context_attention(1, 1, 0)

    # -- StepTimes ----------------------------------------------------------------------------------------------------

    def step_s(
        self,
        prefills: list[tuple[int, int]],
        decodes: int,
        context_tokens: int,
        longest: int = 0,
        padding: int = 0,
    ) -> float:
        tokens = decodes + sum(n for n, _ in prefills) + padding
        ms = self.shared_ms(tokens) + self.logits_ms(decodes + len(prefills))
        if prefills:
            ms += self.prompts_ms(prefills)
        if decodes:
            ms += self.generation_ms(decodes, self._context_of(decodes, context_tokens, longest))
        return ms * 1e-3

    def decode_run_s(
        self, decodes: int, context_tokens: int, steps: int, longest: int = 0, padding: int = 0
    ) -> np.ndarray:
        fixed = self.shared_ms(decodes + padding) + self.logits_ms(decodes)
        first = self._context_of(decodes, context_tokens, longest)
        row = self._row(decodes, first + steps)
        return (fixed + np.interp(first + np.arange(steps), CONTEXT_GRID[: len(row)], row)) * 1e-3

    def swap_s(self, tokens: int) -> float:
        return tokens * self._swap_bytes / self._pcie

    def ran(self, steps: int, idle_s: float) -> None:
        """Nothing of it depends on what ran before."""

    # -- operators, in milliseconds -----------------------------------------------------------------------------------

    def shared_ms(self, tokens: int) -> float:
        """Everything but attention and the output layer, over all tokens of an iteration."""
        if tokens not in self._shared:
            ops = self._engine.evaluate_context_ops(self._shared_ops, batch_size=1, s=tokens, x=tokens)
            self._shared[tokens] = sum(ms for _, ms, *_ in ops)
        return self._shared[tokens]

    def logits_ms(self, requests: int) -> float:
        if requests not in self._logits:
            ops = self._engine.evaluate_context_ops(self._logits_op, batch_size=requests, s=1, x=requests)
            self._logits[requests] = ops[0][1]
        return self._logits[requests]

    def prompts_ms(self, pieces: list[tuple[int, int]]) -> float:
        """Context attention of (new tokens, tokens before them) pieces in one call."""
        whole = [n for n, before in pieces if before == 0]
        calls = [self._context_attention(1, n, before) for n, before in pieces if before]
        if whole:
            total, squares = sum(whole), sum(n * n for n in whole)
            calls.append(self._even_prompts(total * total / squares, round(squares / total)))
        return self._floor + sum(ms - self._floor for ms in calls)

    def generation_ms(self, decodes: int, context: float) -> float:
        """Attention of decoding requests with this mean context (the new token included)."""
        row = self._row(decodes, context)
        at = min(max(bisect_right(_GRID_LIST, context, 1, len(row)), 1), len(row) - 1)
        low, high = _GRID_LIST[at - 1], _GRID_LIST[at]
        return row[at - 1] + (row[at] - row[at - 1]) * (context - low) / (high - low)

    def _context_of(self, decodes: int, context_tokens: int, longest: int) -> float:
        """The equal context, new token included, whose attention takes as long as that of these unequal ones.

        The tables hold equal contexts. Attention over unequal ones ends with its longest part: while its parts (a
        request and KV head each) are no more than the card's multiprocessors, with the longest context, unless the
        kernel splits it; and the more there are, the more they even out. UNEVEN stands between split and unsplit.
        """
        mean = context_tokens / decodes + 1
        if longest + 1 <= mean or not self._multiprocessors:
            return mean
        waves = decodes * self._kv_heads / self._multiprocessors
        return mean + UNEVEN * min(1.0, 1 / waves) * (longest + 1 - mean)

    def _even_prompts(self, batch: float, length: int) -> float:
        low = max(1, int(batch + 1e-9))
        part = max(batch - low, 0.0)
        first = self._context_attention(low, length, 0)
        return first if part < 1e-9 else first + (self._context_attention(low + 1, length, 0) - first) * part

    def _context_attention(self, batch: int, length: int, before: int) -> float:
        key = (batch, length, before)
        if key not in self._context:
            ops = self._engine.evaluate_context_ops(self._attention_op, batch_size=batch, s=length, prefix=before)
            self._context[key] = ops[0][1]
        return self._context[key]

    def _row(self, batch: int, context: float) -> np.ndarray:
        """Generation attention over CONTEXT_GRID for a batch, at least as far as `context`."""
        row = self._between.get(batch)
        if row is not None and CONTEXT_GRID[len(row) - 1] >= context:
            return row
        if context > CONTEXT_GRID[-1]:
            raise UsageError(
                f"a context of {context:.0f} tokens is over {CONTEXT_GRID[-1]}, the longest that is simulated"
            )
        points = -(-(int(np.searchsorted(CONTEXT_GRID, context)) + 1) // _SEGMENT) * _SEGMENT
        points = min(points, len(CONTEXT_GRID))
        at = bisect_right(BATCH_GRID, batch)
        low, high = BATCH_GRID[at - 1], BATCH_GRID[min(at, len(BATCH_GRID) - 1)]
        row = self._grid_row(low, points)
        if batch != low:
            if high <= low:
                raise UsageError(f"a batch of {batch} is over {BATCH_GRID[-1]}, the largest that is simulated")
            row = row + (self._grid_row(high, points) - row) * ((batch - low) / (high - low))
        self._between[batch] = row
        return row

    def _grid_row(self, batch: int, points: int) -> np.ndarray:
        row = self._rows.get(batch, np.empty(0))
        if len(row) < points:
            read, op = self._decoder.evaluate_generation_ops, self._generation_op
            more = np.array([read(op, batch_size=batch, s=int(s))[0][1] for s in CONTEXT_GRID[len(row) : points]])
            if self._other:
                more += self._layers * self._other.more_ms(batch, CONTEXT_GRID[len(row) : points])
            row = self._rows[batch] = np.concatenate([row, more])
        return row[:points]


_GRID_LIST = CONTEXT_GRID.tolist()


@cache
def table_times(model: Shape, card: Card, backend: str, quantization: Quantization, tp: int) -> TableTimes:
    """The step times, made once a process: their values are kept for every later simulation."""
    return TableTimes(model, card, backend, quantization, tp)


def _count(engine: Any) -> int:
    shared, context, _ = engine.mixed_step_breakdown_per_op(64, 1, 64, 2)
    return len(shared) + len(context)


def _compile(model: Shape, card: Card, backend: str, quantization: Quantization, tp: int) -> tuple[Any, str]:
    """The package's engine, and the arithmetic of its attention (fp8 where the backend has such tables, else
    bfloat16).
    """
    if systems_folder() is None:
        raise UsageError(NOT_INSTALLED)
    from aiconfigurator_core.sdk.engine import EngineHandle
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

    logging.getLogger("aiconfigurator_core").setLevel(
        logging.ERROR
    )  # notes on tables that a dense model never asks for
    if model.folder is None:
        raise UsageError(f"model {model.name}: a folder with its config.json is needed")
    precision = "fp8" if quantization.name == "fp8" else "bfloat16"
    error = ""
    for attention in dict.fromkeys((precision, "bfloat16")):
        try:
            engine = EngineHandle.compile(
                model.folder,
                card.name,
                backend,
                backend_version="current",
                tp_size=tp,
                gemm_quant_mode=precision,
                kvcache_quant_mode=precision,
                fmha_quant_mode=attention,
            )
            engine.mixed_step_latency(64, 1, 64, 2)
            return engine, attention
        except PerfDataNotAvailableError as missing:
            error = str(missing).splitlines()[0][:160]
    raise UsageError(
        f"no measured operator times for {model.name} ({quantization.name}, tp {tp}) with {backend} on {card.name}: "
        f"{error}; step_times 'roofline' stands in"
    )


def _provenance(card: Card, backend: str, quantization: Quantization, tp: int, attention: str) -> dict[str, Any]:
    folder = systems_folder()
    files = sorted(
        str(p.relative_to(folder))
        for family in ("attention", "gemm", "comm")
        for p in (folder / "data" / card.name / family / backend).glob("*/*.parquet")
    )
    used = [
        f
        for f in files
        if Path(f).name.split("_perf")[0] in ("context_attention", "generation_attention", "gemm", "custom_allreduce")
    ]
    return {
        "kind": "operator times measured on silicon",
        "package": "aiconfigurator-core",
        "package_version": metadata.version("aiconfigurator-core"),
        "system": card.name,
        "backend": backend,
        "backend_version": sorted({f.split("/")[4] for f in used}),
        "tables": used,
        "tp": tp,
        "weights_and_kv": quantization.name,
        "attention": attention,
        "interpolation": (
            f"generation attention linear between {len(BATCH_GRID)} batches and {len(CONTEXT_GRID)} contexts"
        ),
        "uneven_contexts": UNEVEN,
    }
