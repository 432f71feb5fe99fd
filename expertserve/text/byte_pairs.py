"""Byte-pair encoding with ranked merges, run by the `tokenizers` library.

Owns the hand-over of a GGUF's vocabulary and merges to that library, and what it does not do as llama.cpp does: symbols
that no token covers, and runs of newlines that are tokens. Does not know special tokens. Every id it returns is one of
the file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Regex
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from expertserve.text.pretokenizers import PreTokenizer


def byte_alphabet() -> dict[int, str]:
    """Returns the printable character GPT-2's alphabet writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class BytePairEncoder:
    """Turns text without special tokens into token ids.

    Args:
        vocabulary: token text to id.
        merges: "left right" lines in rank order.
        pretokenizer: how text is cut into words first.
    """

    def __init__(self, vocabulary: Mapping[str, int], merges: Sequence[str], pretokenizer: PreTokenizer) -> None:
        self._ids = vocabulary
        self._byte_level = pretokenizer.byte_level
        self._whole_newlines = pretokenizer.whole_newlines
        pairs = _pairs(merges)
        extended = dict(vocabulary)
        # Symbols the library must know while it merges but for which the file has no token: their ids lie past the
        # file's.
        alphabet = list(byte_alphabet().values()) if self._byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        wanted = {*alphabet, *map("".join, pairs), *(part for pair in pairs for part in pair)}
        missing = wanted - vocabulary.keys()
        for symbol in missing:
            extended[symbol] = len(extended)
        self._fallback = {extended[symbol]: () if symbol in alphabet else self._spelt(symbol) for symbol in missing}
        model = BPE(
            vocab=extended,
            merges=pairs,
            ignore_merges=pretokenizer.ignore_merges,
            byte_fallback=not self._byte_level,
        )
        steps = [Split(Regex(pattern), behavior="isolated") for pattern in pretokenizer.patterns]
        self._pipeline = Pipeline(model)
        self._pipeline.pre_tokenizer = Steps(
            [*steps, ByteLevel(add_prefix_space=False, use_regex=False)] if self._byte_level else steps
        )

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`."""
        if not self._byte_level:
            text = text.replace(" ", "\u2581")
        if not self._whole_newlines:
            return self._merge(text)
        output: list[int] = []
        for piece in re.findall(r"\n+|[^\n]+", text):
            token = self._ids.get(piece) if piece[0] == "\n" else None
            output += self._merge(piece) if token is None else [token]
        return output

    def _merge(self, text: str) -> list[int]:
        # Of the library's ways only those for several texts let other threads run meanwhile.
        ids: list[int] = self._pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._fallback and max(ids, default=0) >= len(self._ids):
            return [token for id_ in ids for token in self._fallback.get(id_, (id_,))]
        return ids

    def _spelt(self, symbol: str) -> tuple[int, ...]:
        """Returns the tokens of the bytes of a symbol that is no token; bytes without a token are dropped."""
        names: Iterable[str] = symbol if self._byte_level else (f"<0x{byte:02X}>" for byte in symbol.encode())
        return tuple(self._ids[name] for name in names if name.isascii() and name in self._ids)


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the merge pairs in rank order; where a pair is listed twice, its first rank counts."""
    cuts = ((line, line.find(" ", 1)) for line in merges)
    return list(dict.fromkeys((line[:cut], line[cut + 1 :]) for line, cut in cuts if 0 < cut < len(line) - 1))
