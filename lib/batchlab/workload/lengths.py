"""Input and output lengths, in tokens, of each request."""

import math

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.seeds import generator

KINDS = ("fixed", "uniform", "lognormal", "mixed", "trace")


def draw_lengths(dataset: dict, count: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """int64 (count, 2): input_len and output_len of each request, and notes of what was cut. Not for traces."""
    kind = dataset.get("kind", "fixed")
    random = generator("lengths", seed)
    if kind == "fixed":
        return np.array([[_positive(dataset, "input_len"), _positive(dataset, "output_len")]] * count), []
    if kind == "uniform":
        ranges = [_range(dataset, key) for key in ("input_len", "output_len")]
        return np.stack([random.integers(low, high + 1, count) for low, high in ranges], axis=1), []
    if kind == "lognormal":
        return _lognormal(dataset, count, random)
    if kind == "mixed":
        return _mixed(dataset, count, random), []
    raise UsageError(f"dataset kind {kind!r} is unknown; use one of {', '.join(KINDS)}")


def _lognormal(dataset: dict, count: int, random: np.random.Generator) -> tuple[np.ndarray, list[str]]:
    columns, notes = [], []
    for key, what in (("input_len", "prompts"), ("output_len", "outputs")):
        spec = dataset.get(key)
        if not isinstance(spec, dict) or not {"median", "sigma", "max"} <= set(spec):
            raise UsageError(f"dataset {key} {spec!r} of kind lognormal must have median, sigma and max")
        if not (spec["median"] > 0 and spec["sigma"] > 0 and spec["max"] >= 1):
            raise UsageError(f"dataset {key} {spec!r}: median, sigma and max must be greater than 0")
        drawn = np.rint(spec["median"] * np.exp(spec["sigma"] * random.standard_normal(count)))
        cut = int((drawn > spec["max"]).sum())
        if cut:
            notes.append(f"{cut} of {count} {what} cut to {spec['max']} tokens (max)")
        columns.append(np.clip(drawn, 1, spec["max"]).astype(np.int64))
    return np.stack(columns, axis=1), notes


def _mixed(dataset: dict, count: int, random: np.random.Generator) -> np.ndarray:
    """The parts in exactly their shares, as far as whole requests go, in random order."""
    parts = dataset.get("parts") or []
    weights = np.array([part.get("weight", 0) for part in parts], float)
    if not len(weights) or not (weights > 0).all():
        raise UsageError("dataset parts: each needs a weight greater than 0, an input_len and an output_len")
    shares = weights / weights.sum() * count
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: count - counts.sum()]] += 1
    lengths = [[_positive(part, "input_len"), _positive(part, "output_len")] for part in parts]
    return random.permutation(np.repeat(np.array(lengths), counts, axis=0))


def cut(lengths: np.ndarray, clip: int) -> tuple[np.ndarray, list[str]]:
    """No prompt and no output longer than `clip` tokens."""
    prompts, outputs = (int(n) for n in (lengths > clip).sum(axis=0))
    if not prompts + outputs:
        return lengths, []
    note = f"{prompts} prompts and {outputs} outputs of {len(lengths)} requests cut to {clip} tokens (clip)"
    return np.minimum(lengths, clip), [note]


def fit(lengths: np.ndarray, kind: str, max_len: int | None) -> tuple[np.ndarray, list[str]]:
    """Prompt and output together within the engine's `max_len`. Drawn and recorded lengths are cut, the
    prompt first; lengths that a person chose are a UsageError."""
    if max_len is None or (over := int((lengths.sum(axis=1) > max_len).sum())) == 0:
        return lengths, []
    if kind not in ("lognormal", "trace"):
        raise UsageError(
            f"input_len + output_len is {lengths.sum(axis=1).max()}, but the engine takes {max_len} tokens a request: "
            "shorten them or raise max_model_len"
        )
    if max_len < 2:
        raise UsageError(f"max_model_len {max_len} leaves no room for a prompt and an output; use at least 2")
    outputs = np.minimum(lengths[:, 1], max_len - 1)
    fitted = np.stack([np.minimum(lengths[:, 0], max_len - outputs), outputs], axis=1)
    return fitted, [f"{over} of {len(lengths)} requests cut to {max_len} tokens (the engine's limit)"]


def _range(dataset: dict, key: str) -> tuple[int, int]:
    value = dataset.get(key)
    if isinstance(value, dict):
        value = [value.get("low"), value.get("high")]
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(v, int) for v in value):
        raise UsageError(f"dataset {key} {value!r} of kind uniform must be [low, high]")
    low, high = value
    if not 1 <= low <= high:
        raise UsageError(f"dataset {key} {value!r}: low must be at least 1 and not above high")
    return low, high


def _positive(dataset: dict, key: str) -> int:
    value = dataset.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"dataset {key} {value!r} must be a whole number of at least 1")
    return value


def shared_tokens(dataset: dict, length: int) -> int:
    """Leading tokens of a prompt of this length that all prompts have in common."""
    share = dataset.get("shared_prefix") or 0.0
    if not 0 <= share < 1:
        raise UsageError(f"dataset shared_prefix {share} must be from 0 to below 1")
    return math.floor(share * length)
