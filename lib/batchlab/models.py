"""Models: a shape with random weights, made here without any download, or real weights, passed through.

A shape is `data/models/<name>/config.json`, a Hugging Face LlamaConfig. `materialize` turns it into a folder
that an engine can serve with weights made at its start (vLLM and others: `--load-format dummy`), and with a
word-level tokenizer in which a prompt of N words is N tokens.
"""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchlab import paths
from batchlab.errors import UsageError

FORMAT = 1    # raise it when the files that `materialize` writes change
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Joins the messages' words and adds none, so that a chat of N words is N tokens too.
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a dense decoder with grouped-query attention and a gated MLP (the Llama family) is made of.

    Counts are of the whole model, sizes in elements. `folder` holds its config.json.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_len: int
    tied_embeddings: bool
    dtype: str
    name: str = ""
    folder: str | None = None

    @property
    def layer_params(self) -> int:
        """Parameters of the linear maps of all layers: attention and gated MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding and of the output layer."""
        return self.vocab_size * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Every weight: linear maps, embedding, head, two RMS norms a layer and a last one."""
        return self.layer_params + self.embedding_params + (2 * self.layers + 1) * self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that a token holds in the cache: all layers, the model's own dtype."""
        return round(self.kv_bytes_at(_BYTES[self.dtype]))

    def weight_bytes_at(self, layer_bytes: float, tp: int = 1) -> float:
        """Bytes of the large weights on each of `tp` cards, layers at so many bytes a parameter; embeddings and output
        layer stay at 2.
        """
        return (self.layer_params * layer_bytes + self.embedding_params * 2) / tp

    def kv_bytes_at(self, element_bytes: float, tp: int = 1) -> float:
        """Bytes of KV cache a token on each of `tp` cards (a KV head is never split)."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that an engine can be started with.

    `path` is a folder, or a Hugging Face id that the engine fetches itself; `vocab_size` bounds prompt token
    ids; `is_random` says that the weights are to be made at the engine's start.
    """

    path: Path
    name: str
    vocab_size: int
    is_random: bool

    @property
    def tokenizer(self) -> Any:
        """A tokenizers.Tokenizer. UsageError when the model brings none that can be read."""
        return _tokenizer(str(self.path), is_folder=self.path.is_dir())


def names() -> list[str]:
    """The shapes of data/models/."""
    return sorted(p.parent.name for p in paths.MODELS.glob("*/config.json"))


def shape(model: str) -> Shape:
    """The shape of a model of any of the kinds that `materialize` takes. Errors as there."""
    if model in names():
        return _shape_in(paths.MODELS / model)
    folder = _local(model)
    if folder:
        return _shape_in(folder)
    return _shape(_json(Path(_download(model, "config.json"))), model)


def _shape_in(folder: Path) -> Shape:
    made = _shape(_json(folder / "config.json"), str(folder / "config.json"))
    return replace(made, name=folder.name, folder=str(folder))


def materialize(model: str) -> ModelFiles:
    """Make a model ready to be served.

    A name of data/models/ becomes a folder in build/models/, written anew only when its shape changed. A
    folder with weights and tokenizer, or a Hugging Face id (`org/name`), is passed through. Relative folders
    count from the repository's root. Raises UsageError, one line with the mend, when there is no such model.
    """
    if model in names():
        return _random(model)
    folder = _local(model)
    if folder is None:
        config = _json(Path(_download(model, "config.json")))
        return ModelFiles(Path(model), model, _vocab_size(config, model), False)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        raise UsageError(f"model folder {folder}: no weights (*.safetensors) in it; put them there, or copy "
                         "its config.json to data/models/NAME/ and use NAME to run the shape with "
                         "random weights")
    return ModelFiles(folder, folder.name, _vocab_size(_json(folder / "config.json"), str(folder)), False)


def _local(model: str) -> Path | None:
    """The folder that `model` names; None when it can only be a Hugging Face id; else UsageError."""
    folder = Path(os.path.normpath(paths.ROOT / Path(model).expanduser()))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"model folder {folder}: holds no config.json; give the folder that has "
                             "config.json, weights and tokenizer")
        return folder
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model):
        return None
    wrong = f"folder {folder} is missing" if "/" in model else "unknown name"
    raise UsageError(f"model {model}: {wrong}; give one of {', '.join(names())}, an existing folder, or a "
                     "Hugging Face id such as org/name")


def _random(name: str) -> ModelFiles:
    shape_file = paths.MODELS / name / "config.json"
    config, source = _json(shape_file), shape_file.read_bytes()
    vocab_size = _shape(config, str(shape_file)).vocab_size
    if vocab_size <= len(SPECIALS):
        raise UsageError(f"{shape_file}: vocab_size {vocab_size} leaves no word beside the {len(SPECIALS)} "
                         "special tokens; raise it")
    folder = paths.BUILD / "models" / name
    made = hashlib.sha256(source + str(FORMAT).encode()).hexdigest()
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    stamp = folder / ".made"
    if not (_text(stamp) == made and all((folder / f).is_file() for f in files)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / "config.json", source.decode())
            _write(folder / "tokenizer.json", _word_level(vocab_size))
            _write(folder / "tokenizer_config.json", json.dumps(_tokenizer_config(config), indent=2))
            # only ids: sampling is the client's to say, and an engine must not take a default from the model
            _write(folder / "generation_config.json", json.dumps(
                {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "do_sample": False}, indent=2))
            _write(stamp, made)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); free some space or "
                             "set BATCHLAB_BUILD to another folder") from None
        _tokenizer.cache_clear()
    return ModelFiles(folder, name, vocab_size, True)


def _text(path: Path) -> str | None:
    """A file's text; None without one, also where it has just gone."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _word_level(vocab_size: int) -> str:
    """tokenizer.json: ids 0..3 are special, id i is the word `w<i>`; nothing is added around a prompt."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIALS, *(f"w{i}" for i in range(len(SPECIALS), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer.to_str()


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": False, "add_eos_token": False,
            "clean_up_tokenization_spaces": False, "model_max_length": config["max_position_embeddings"],
            "chat_template": _CHAT_TEMPLATE}


def _write(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)      # mkstemp makes it 0600, and an engine in a container is another user
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@lru_cache(maxsize=4)
def _tokenizer(model: str, *, is_folder: bool) -> Any:
    from tokenizers import Tokenizer

    if not is_folder:
        return Tokenizer.from_file(_download(model, "tokenizer.json"))
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"model folder {model}: no tokenizer.json in it; save one there with "
                         "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:     # tokenizers raises bare Exception
        why = " ".join(str(error).split())
        raise UsageError(f"{path}: not a tokenizer ({why}); fetch it again") from None


def _download(model: str, file: str) -> str:
    """A file of a Hugging Face id, from its cache or the hub."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()    # its retries would bury the one line below
        return hf_hub_download(model, file)
    except Exception as error:     # many kinds: no such id, gated, offline, no huggingface_hub
        why = " ".join(str(error).split())[:160]
        raise UsageError(f"model {model}: no such folder in {paths.ROOT}, and {file} cannot be had from "
                         f"Hugging Face ({why}); correct the name, set HF_TOKEN for a gated model, or give a "
                         "local folder") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error}); correct it") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a model's configuration; it must be a JSON object")
    return value


def _vocab_size(config: dict[str, Any], where: str) -> int:
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    if not isinstance(size, int):
        raise UsageError(f"model {where}: config.json has no vocab_size; add it")
    return size


def _shape(config: dict[str, Any], where: str) -> Shape:
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        made = Shape(
            layers=config["num_hidden_layers"], hidden=hidden, heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"], vocab_size=config["vocab_size"],
            max_len=config["max_position_embeddings"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    except KeyError as error:
        raise UsageError(f"{where}: key {error} is missing; add it (a Hugging Face LlamaConfig)") from None
    if made.dtype not in _BYTES:
        raise UsageError(f"{where}: torch_dtype {made.dtype} is not one of {', '.join(_BYTES)}; correct it")
    return made
