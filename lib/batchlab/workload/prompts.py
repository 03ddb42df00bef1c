"""Prompts of an exact number of tokens, different from their first ids on."""

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.seeds import generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RESERVED = 4          # ids 0..3 are special in most vocabularies: <unk> <s> </s> <pad>
POOL = 4096           # ids that text prompts are drawn from
TRIES = 50


class IdPrompts:
    """Random ids. The first of request i is entry i of a random permutation of the vocabulary, so that no
    two prompts of a cell share even one id as long as there are more ids than requests."""

    def __init__(self, vocab_size: int, seed: int, nonce: str) -> None:
        self._use(np.arange(RESERVED, vocab_size), seed, nonce)
        if len(self._ids) < 2:
            raise UsageError(f"vocab_size {vocab_size} leaves no ids for prompts; use at least {RESERVED + 2}")

    def _use(self, ids: np.ndarray, seed: int, nonce: str) -> None:
        self._ids, self._seed, self._nonce = ids, seed, nonce
        self._first = generator("first", seed, nonce).permutation(ids)

    def make(self, index: int, length: int) -> tuple[list[int], str | None]:
        return self._draw(index, length), None

    def _draw(self, index: int, length: int, attempt: int = 0) -> list[int]:
        random = generator("prompt", self._seed, self._nonce, index, attempt)
        ids = self._ids[random.integers(len(self._ids), size=length)].tolist()
        if ids:
            ids[0] = int(self._first[(index + attempt) % len(self._first)])
        return ids


class TextPrompts(IdPrompts):
    """Text that the tokenizer makes exactly so many tokens of, with those that it adds itself (<s>), as a
    server does.

    Ids are drawn from those that survive decoding and encoding alone; joined they may still merge into
    other tokens, so the text is encoded again and cut or lengthened until its count is right.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, seed: int, nonce: str) -> None:
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added = len(tokenizer.encode("").ids)
        pool = _round_trips(tokenizer, min(vocab_size, tokenizer.get_vocab_size()), seed)
        if len(pool) < 2:
            raise UsageError("the tokenizer changes all its tokens in decoding; use prompt format ids")
        self._use(pool, seed, nonce)

    def make(self, index: int, length: int) -> tuple[list[int], str]:
        wanted = length - self._added
        if wanted < 1:
            raise UsageError(
                f"input_len {length} leaves no room for text, as the tokenizer adds {self._added} tokens itself; "
                f"use at least {self._added + 1}, or prompt format ids"
            )
        for attempt in range(TRIES):
            text = self._mend(self._draw(index, wanted, attempt), wanted, index, attempt)
            if text is not None:
                return self._tokenizer.encode(text).ids, text
        raise UsageError(
            f"the tokenizer makes no text of exactly {length} tokens; use another input_len or prompt format ids"
        )

    def _mend(self, ids: list[int], wanted: int, index: int, attempt: int) -> str | None:
        spare = iter(self._draw(index, wanted + 64, attempt + TRIES)[1:])
        for _ in range(TRIES):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            got = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(got) == wanted and len(self._tokenizer.encode(text).ids) == wanted + self._added:
                return text
            ids = got[:wanted] + list(islice(spare, max(wanted - len(got), 0)))
        return None


def _round_trips(tokenizer: "Tokenizer", size: int, seed: int) -> np.ndarray:
    """Up to POOL ids, none of them special, each of whose text encodes to that id alone."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items()} | set(range(RESERVED))
    ids = [int(id) for id in generator("pool", seed).permutation(size) if id not in special][: 4 * POOL]
    texts = tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
    codes = tokenizer.encode_batch(texts, add_special_tokens=False)
    good = [id for id, text, code in zip(ids, texts, codes, strict=True) if text.strip() and code.ids == [id]]
    return np.sort(np.array(good[:POOL], dtype=np.int64))
