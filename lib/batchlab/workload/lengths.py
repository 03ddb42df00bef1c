"""Input and output lengths of each request."""

from batchlab.errors import UsageError

Length = tuple[int, int]


def draw_lengths(dataset: dict, count: int, seed: int) -> list[Length]:
    """`count` pairs (input_len, output_len)."""
    kind = dataset.get("kind", "fixed")
    if kind == "fixed":
        return [(_positive(dataset, "input_len"), _positive(dataset, "output_len"))] * count
    raise UsageError(f"dataset kind {kind!r} is unknown; use fixed")


def fit(lengths: list[Length], dataset: dict, max_len: int | None) -> tuple[list[Length], str | None]:
    longest = max(n + m for n, m in lengths)
    if max_len is not None and longest > max_len:
        raise UsageError(
            f"input_len + output_len is {longest}, but the engine takes {max_len} tokens a request: "
            "shorten them or raise max_model_len"
        )
    return lengths, None


def _positive(dataset: dict, key: str) -> int:
    value = dataset.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"dataset {key} {value!r} must be a whole number of at least 1")
    return value
