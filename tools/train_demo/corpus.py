"""Documents as tokens: the windows that training reads, and the held-out streams that are scored."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .data import END_OF_TEXT, Document
from .tokenizer import SPECIAL

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Scored:
    """A held-out stream of one source: every document after an end of text, and how many bytes of text that is.

    Special tokens are no bytes, though their bits are counted: the figure can only come out worse for it.
    """

    source: str
    tokens: Tokens
    bytes: int


class Windows:
    """Training windows of `length` tokens and the one after, in an order that depends on seed and step only."""

    def __init__(self, encoded: Sequence[Sequence[int]], end: int, length: int, batch: int, seed: int) -> None:
        self._encoded = [np.array([*ids, end], dtype=np.int64) for ids in encoded]
        self._length, self._batch, self._seed = length, batch, seed
        self.per_epoch = (sum(map(len, self._encoded)) - 1) // length // batch
        self._epoch, self._windows = -1, np.zeros((0, 0), np.int64)

    def step(self, number: int) -> Tokens:
        """The windows of a training step, (batch, length + 1)."""
        epoch, at = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            stream = np.concatenate([self._encoded[i] for i in rng.permutation(len(self._encoded))])
            starts = rng.permutation((len(stream) - 1) // self._length) * self._length
            self._windows = np.stack([stream[s : s + self._length + 1] for s in starts])
            self._epoch = epoch
        return self._windows[at * self._batch : (at + 1) * self._batch]


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch([d.text for d in documents])]


def held_out(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Scored]:
    """The held-out documents of each source, sources in alphabetical order."""
    kept: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        if document.held_out:
            kept[document.source].append(document)
    special = re.compile("|".join(re.escape(s) for s in SPECIAL))
    end = tokenizer.token_to_id(END_OF_TEXT)
    found = []
    for source in sorted(kept):
        ids = [end, *(i for e in encode(tokenizer, kept[source]) for i in (*e, end))]
        size = sum(len(special.sub("", d.text).encode()) for d in kept[source])
        found.append(Scored(source, np.array(ids, dtype=np.int64), size))
    return found


def windows_of(tokens: Tokens, length: int) -> Iterator[Tokens]:
    """The stream cut in windows of `length` tokens and the one after; each token but the first is predicted once."""
    for at in range(0, len(tokens) - 1, length):
        yield tokens[at : at + length + 1]


def bits_per_byte(nats: float, size: int) -> float:
    return nats / math.log(2) / size
