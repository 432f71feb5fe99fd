"""A number of tokens that a text cannot have fewer of, read from its bytes alone.

A byte weighs one divided by the length of the longest token that has it, so the bytes of any token weigh at most one
together, and those of a text at most as much as it has tokens. It costs a pass over the bytes, where encoding costs
seconds for a text of megabytes. Bytes that encoding may drop weigh nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from expertserve.text.byte_pairs import byte_alphabet
from expertserve.text.special_tokens import C_SPACES
from expertserve.text.vocabulary import SPECIAL, Vocabulary

_CHARACTERS = byte_alphabet()
_BYTES = {char: byte for byte, char in _CHARACTERS.items()}
_CHUNK = 1 << 20


class TokenFloor:
    """The floor of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._weights = _weights(vocabulary)

    def __call__(self, text: bytes) -> int:
        """Returns a number of tokens that `text`, in UTF-8, has at least."""
        codes = np.frombuffer(text, np.uint8)
        counts = np.zeros(256, np.int64)
        for start in range(0, len(codes), _CHUNK):
            counts += np.bincount(codes[start : start + _CHUNK], minlength=256)
        return int(counts @ self._weights * (1 - 1e-9))


def _weights(vocabulary: Vocabulary) -> NDArray[np.float64]:
    """Returns the weight of each byte value. shape (256,)."""
    weights = np.zeros(256)
    unseen = {byte for byte in range(256) if _stands_alone(byte, vocabulary)}
    if vocabulary.strip_after:
        unseen -= {*C_SPACES.encode()}
    for spelt in sorted(_spellings(vocabulary), key=len, reverse=True):
        for byte in unseen & {*spelt}:
            weights[byte] = 1 / len(spelt)
        unseen -= {*spelt}
    return weights


def _stands_alone(byte: int, vocabulary: Vocabulary) -> bool:
    """Returns whether the byte has a token of its own, so that it cannot be dropped for the lack of one."""
    if (pretokenizer := vocabulary.pretokenizer) is not None and pretokenizer.byte_level:
        return _CHARACTERS[byte] in vocabulary.ids
    return f"<0x{byte:02X}>" in vocabulary.ids


def _spellings(vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yields what each token may stand for in a text."""
    byte_level = vocabulary.pretokenizer is not None and vocabulary.pretokenizer.byte_level
    for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in SPECIAL or not byte_level:
            yield text.encode()
        if byte_level:
            yield bytes(_BYTES[char] for char in text if char in _BYTES)
        elif "\u2581" in text:  # a space; as long as if it were the character itself
            yield text.replace("\u2581", " ").encode().ljust(len(text.encode()))
    if not byte_level:
        yield from (bytes([byte]) for byte in range(256))
