"""Which measurements of generation attention stand for a model: the backend's own, unless they lack its KV heads.

aiconfigurator-core 0.12.0 measured vLLM's generation attention with 1, 2, 4 and 8 KV heads only. For a model with
as many KV heads as query heads (Llama 2) the package extrapolates from those, and is up to twice too slow: on the
recorded H200 cells of Llama-2-7B that alone made TPOT 15% too long. SGLang runs the same FlashAttention kernels and
was measured with such heads too. So its time is taken, and what vLLM's call of that kernel takes beyond SGLang's with
the most KV heads that both were measured with. Nothing in this is fitted.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from batchlab.models import Shape
from batchlab.sim.hardware import Card, systems_folder
from batchlab.sim.memory import Quantization

# vLLM's kernel → SGLang's name of the same one
SAME_KERNEL = {"vllm_flash_attn_fa3": "fa3", "vllm_flash_attn": "flash_attention"}
COLUMNS = ["kernel_source", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "batch_size", "step"]


@dataclass(frozen=True, slots=True)
class OtherBackend:
    """Generation attention read from another backend's table: `name`, and what the own call takes more."""

    name: str
    kv_heads: int  # with which both were measured
    _more_ms: RegularGridInterpolator  # a layer, over the logarithms of batch and context

    def more_ms(self, batch: int, contexts: np.ndarray) -> np.ndarray:
        """A layer's time beyond the other backend's, at this batch: float64 like `contexts`."""
        batches, steps = self._more_ms.grid
        at = np.log2(np.maximum(contexts, 1))
        first = np.clip(np.full(len(at), np.log2(batch)), batches[0], batches[-1])
        return self._more_ms(np.column_stack([first, np.clip(at, steps[0], steps[-1])]))


def other_backend(model: Shape, card: Card, backend: str, quantization: Quantization, tp: int) -> OtherBackend | None:
    """The backend that has the same kernel on this card and, unlike `backend`, the model's heads; None where there is
    no need of one, or none.
    """
    if backend != "vllm" or model.kv_heads < tp:
        return None
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    own = _measured(card.name, "vllm", heads, model.head_dim, quantization.name)
    other = _measured(card.name, "sglang", heads, model.head_dim, quantization.name)
    other = other[other["kernel_source"].isin({SAME_KERNEL.get(name) for name in own["kernel_source"]})]
    if (own["num_key_value_heads"] == kv_heads).any() or not (other["num_key_value_heads"] == kv_heads).any():
        return None
    common = max(set(own["num_key_value_heads"]) & set(other["num_key_value_heads"]))
    more = (_grid(own, common) - _grid(other, common)).dropna().clip(lower=0)
    axes = (np.log2(more.index.to_numpy(float)), np.log2(more.columns.to_numpy(float) + 1))
    return OtherBackend("sglang", common, RegularGridInterpolator(axes, more.to_numpy()))


def _grid(table: pd.DataFrame, kv_heads: int) -> pd.DataFrame:
    """Milliseconds by batch and KV tokens before the new one, as far as each batch was measured with each."""
    chosen = table[table["num_key_value_heads"] == kv_heads]
    return chosen.pivot_table(index="batch_size", columns="step", values="latency").dropna(axis="columns")


@cache
def _measured(card: str, backend: str, heads: int, head_dim: int, precision: str) -> pd.DataFrame:
    """Rows of the backend's newest table of generation attention for this many query heads, without a window."""
    files = _tables(card, backend)
    if not files:
        return pd.DataFrame(columns=[*COLUMNS, "latency"])
    table = pd.read_parquet(files[-1])
    kept = (table["num_heads"] == heads) & (table["head_dim"] == head_dim)
    kept &= table["kv_cache_dtype"] == ("fp8" if precision == "fp8" else "bfloat16")
    if "window_size" in table:
        kept &= table["window_size"] == 0
    return table.loc[kept, [*COLUMNS, "latency"]]


def _tables(card: str, backend: str) -> list[Path]:
    folder = systems_folder()
    return sorted((folder / "data" / card / "attention" / backend).glob("*/generation_attention_perf.parquet"))
