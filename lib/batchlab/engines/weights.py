"""Random weights as a file, for an engine that cannot make them itself (TGI).

The folder is the model's shape and tokenizer with one safetensors file beside them. Output rows of the special tokens
are zero, so that their logits are 0 where the largest of a vocabulary's is positive: no end-of-sequence token is ever
the likeliest, and every request gets its full length under greedy decoding.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from batchlab import models, paths
from batchlab.errors import UsageError
from batchlab.models import SPECIALS, ModelFiles, Shape

SCALE = 0.02  # standard deviation, as Llama's initializer_range
BLOCK = 1_000_003  # random values that are repeated; prime, so that no two rows of a matrix are alike
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def with_weights(model: ModelFiles) -> ModelFiles:
    """The model itself when it has weights, else a copy in build/models/<name>-weights that has.

    UsageError when the disk has no room for them. An 8B model in bfloat16 takes 15 GiB and a minute or two.
    """
    if not model.is_random:
        return model
    shape = models.shape(model.name)
    if shape.dtype not in _NAMES:
        raise UsageError(f"model {model.name}: no random weights in {shape.dtype}; use bfloat16 or float16")
    folder = paths.BUILD / "models" / f"{model.name}-weights"
    file, config = folder / "model.safetensors", (model.path / "config.json").read_text()
    if not (file.is_file() and (folder / "config.json").is_file() and (folder / "config.json").read_text() == config):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 1.05 * shape.weight_bytes:
            raise UsageError(
                f"{folder}: random weights of {model.name} take {shape.weight_bytes / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} are free; free some, or set BATCHLAB_BUILD to a folder on a larger disk"
            )
        (folder / "config.json").unlink(missing_ok=True)
        partial = folder / "model.safetensors.part"
        write(shape, partial)
        partial.replace(file)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
            shutil.copyfile(model.path / name, folder / name)  # config.json last: it says that all is there
    return ModelFiles(folder, model.name, model.vocab_size, True)


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a LlamaForCausalLM's tensors."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        yield f"{at}.self_attn.q_proj.weight", (q, shape.hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv, shape.hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, q)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{at}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{at}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{at}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab_size, shape.hidden)


def write(shape: Shape, file: Path) -> None:
    """One safetensors file: its header's length in 8 bytes, the header (JSON), the tensors one after the other."""
    values = np.random.default_rng(0).normal(0.0, SCALE, BLOCK).astype(np.float32)
    block, one = _encoded(values, shape.dtype), _encoded(np.ones(1, np.float32), shape.dtype)
    width = block.dtype.itemsize
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors(shape):
        length = int(np.prod(size)) * width
        header[name] = {"dtype": _NAMES[shape.dtype], "shape": size, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    output = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    begin = 0
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors(shape):
            count = int(np.prod(size))
            if len(size) == 1:  # a norm's scale
                out.write(np.repeat(one, count).tobytes())
                continue
            if name == output:
                silent = len(SPECIALS) * size[1]
                out.write(bytes(silent * width))
                count -= silent
            while count:
                piece = block[begin : begin + count]
                out.write(piece.tobytes())
                count -= len(piece)
                begin = (begin + len(piece)) % BLOCK


def _encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in that dtype; bfloat16, which NumPy lacks, as the upper halves of their bits."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)
