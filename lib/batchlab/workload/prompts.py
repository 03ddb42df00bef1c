"""Prompts of an exact number of tokens, different from their first ids on but for what they are to share."""

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from batchlab.errors import UsageError
from batchlab.workload.seeds import generator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RESERVED = 4  # ids 0..3 are special in most vocabularies: <unk> <s> </s> <pad>
POOL = 4096  # ids that text prompts are drawn from
TRIES = 50


class IdPrompts:
    """Random token ids.

    The first id that prompt i has for itself is entry i of a random permutation of the vocabulary, so no
    two prompts of a cell share even one id as long as there are more ids than requests.
    """

    def __init__(self, vocab_size: int, seed: int, nonce: str) -> None:
        self._use(np.arange(RESERVED, vocab_size), seed, nonce)
        if len(self._ids) < 2:
            raise UsageError(f"vocab_size {vocab_size} leaves no ids for prompts; use at least {RESERVED + 2}")

    def _use(self, ids: np.ndarray, seed: int, nonce: str) -> None:
        self._ids, self._key = ids, (seed, nonce)
        self._first = generator("first", *self._key).permutation(ids)
        self._blocks: dict[int, np.ndarray] = {}
        self._common = np.empty(0, np.int64)

    def make(self, index: int, length: int, shared: int = 0) -> tuple[list[int], str | None]:
        """Ids and text (None here) of prompt `index`; its first `shared` tokens are those of every prompt."""
        return self._draw(index, length, shared), None

    def make_of_blocks(
        self, index: int, length: int, blocks: tuple[int, ...], size: int
    ) -> tuple[list[int], str | None]:
        """The same, put together of `size` tokens for each block id: equal ids, equal tokens."""
        return self._join(length, blocks, size), None

    def _draw(self, index: int, length: int, shared: int, attempt: int = 0) -> list[int]:
        own = self._random("prompt", index, attempt, size=length - shared)
        if len(own):
            own[0] = self._first[(index + attempt) % len(self._first)]
        if shared > len(self._common):
            self._common = self._random("common", size=max(shared, 4096, 2 * len(self._common)))
        return np.concatenate((self._common[:shared], own)).tolist()

    def _join(self, length: int, blocks: tuple[int, ...], size: int) -> list[int]:
        for block in blocks:
            if block not in self._blocks:
                self._blocks[block] = self._random("block", block, size=size)
        return np.concatenate([self._blocks[block] for block in blocks])[:length].tolist()

    def _random(self, *key: object, size: int) -> np.ndarray:
        return self._ids[generator(*key, *self._key).integers(len(self._ids), size=size)]


class TextPrompts(IdPrompts):
    """Text of which the tokenizer makes exactly so many tokens, with those that it adds itself (<s>), as in
    a server.

    Ids are drawn from those that survive decoding and encoding alone. Joined they may still merge into
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

    def make(self, index: int, length: int, shared: int = 0) -> tuple[list[int], str]:
        wanted = self._room(length)
        shared = min(shared, wanted - 1)
        return self._text(index, length, lambda attempt: self._draw(index, wanted, shared, attempt))

    def make_of_blocks(self, index: int, length: int, blocks: tuple[int, ...], size: int) -> tuple[list[int], str]:
        wanted = self._room(length)
        return self._text(index, length, lambda attempt: self._join(wanted, blocks, size))

    def _room(self, length: int) -> int:
        if length <= self._added:
            raise UsageError(
                f"input_len {length} leaves no room for text, as the tokenizer adds {self._added} tokens itself; "
                f"use at least {self._added + 1}, or prompt format ids"
            )
        return length - self._added

    def _text(self, index: int, length: int, draw) -> tuple[list[int], str]:
        for attempt in range(TRIES):
            found = self._mend(draw(attempt), length, index, attempt)
            if found:
                return found
        raise UsageError(
            f"the tokenizer makes no text of exactly {length} tokens; use another input_len or prompt format ids"
        )

    def _mend(self, ids: list[int], length: int, index: int, attempt: int) -> tuple[list[int], str] | None:
        wanted = length - self._added
        spare = iter(self._random("spare", index, attempt, size=wanted + TRIES).tolist())
        for _ in range(TRIES):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            code = self._tokenizer.encode(text)
            if len(code.ids) == length:
                return code.ids, text
            own = [id for id, special in zip(code.ids, code.special_tokens_mask, strict=True) if not special]
            ids = own[:wanted] + list(islice(spare, max(wanted - len(own), 0)))
        return None


def _round_trips(tokenizer: "Tokenizer", size: int, seed: int) -> np.ndarray:
    """Up to POOL ids, none of them special, each of whose text encodes to that id alone."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items()} | set(range(RESERVED))
    ids = [int(id) for id in generator("pool", seed).permutation(size) if id not in special][: 4 * POOL]
    texts = tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
    codes = tokenizer.encode_batch(texts, add_special_tokens=False)
    good = [id for id, text, code in zip(ids, texts, codes, strict=True) if text.strip() and code.ids == [id]]
    return np.sort(np.array(good[:POOL], dtype=np.int64))
