"""Model shapes, read from a Hugging Face style config.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from batchlab import paths
from batchlab.errors import UsageError
from batchlab.models import names


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP (the Llama family)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    folder: str | None = None

    @property
    def layer_params(self) -> int:
        """Parameters of the linear maps of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding and of the output layer."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    def weight_bytes(self, layer_bytes: float, tp: int = 1) -> float:
        """Bytes of weights on each of `tp` cards; embeddings and output layer stay at 2 bytes a parameter."""
        return (self.layer_params * layer_bytes + self.embedding_params * 2) / tp

    def kv_bytes_per_token(self, element_bytes: float, tp: int = 1) -> float:
        """Bytes of KV cache a token on each of `tp` cards (a KV head is never split)."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * element_bytes


def load_model(model: str | ModelShape) -> ModelShape:
    """A shape by its folder's name in data/models, by a folder with a config.json, or as it is.

    Raises UsageError, listing what there is, for an unknown name or a shape that is not of the Llama family.
    """
    if isinstance(model, ModelShape):
        return model
    folder = next((p for p in (paths.MODELS / model, Path(model)) if (p / "config.json").is_file()), None)
    if folder is None:
        raise UsageError(f"unknown model '{model}'; data/models holds: {', '.join(names()) or 'none'}")
    config = json.loads((folder / "config.json").read_text())
    missing = [
        k
        for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        if k not in config
    ]
    if missing or any(k in config for k in ("num_local_experts", "n_routed_experts", "kv_lora_rank")):
        what = f"lacks {', '.join(missing)}" if missing else "is a mixture of experts or has latent attention"
        raise UsageError(f"{folder / 'config.json'}: {what}; simulated are dense decoders of the Llama family")
    heads = config["num_attention_heads"]
    return ModelShape(
        name=folder.name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        folder=str(folder),
    )
