"""Models that can be simulated: dense decoders with a shape in a config.json."""

import json
from pathlib import Path

from batchlab import paths
from batchlab.errors import UsageError
from batchlab.models import Shape, names, shape

OTHERS = ("num_local_experts", "n_routed_experts", "kv_lora_rank")  # mixtures of experts, latent attention
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def load_model(model: str | Shape) -> Shape:
    """A shape by its folder's name in data/models, by a folder with a config.json, or as it is.

    Raises UsageError, listing what there is, for an unknown name or a shape that is not of the Llama family.
    """
    if isinstance(model, Shape):
        return model
    folder = next((p for p in (paths.MODELS / model, Path(model)) if (p / "config.json").is_file()), None)
    if folder is None:
        raise UsageError(f"unknown model '{model}'; data/models holds: {', '.join(names()) or 'none'}")
    config = json.loads((folder / "config.json").read_text())
    missing = [key for key in NEEDED if key not in config]
    if missing or any(key in config for key in OTHERS):
        what = f"lacks {', '.join(missing)}" if missing else "is a mixture of experts or has latent attention"
        raise UsageError(f"{folder / 'config.json'}: {what}; simulated are dense decoders of the Llama family")
    return shape(folder.name if folder.parent == paths.MODELS else str(folder.resolve()))
