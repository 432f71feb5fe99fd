"""SentencePiece-style merging: neighbouring symbols join into the best-scored token, again and again.

Owns the merge order and the byte fallback for characters no token covers. Does not know special tokens or the space
prefix. The order equals llama.cpp's: the highest score first, and of equal scores the leftmost; that a score belongs to
the merged token, not to the pair, is what a merge list with ranks cannot express, so the algorithm is written out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from expertserve.errors import GGUFError

# Words are merged once and remembered; natural text repeats them. Long ones are rare and would only fill the memory.
_CACHED_WORDS = 65536
_CACHED_WORD_LENGTH = 64


class ScoreMerger:
    """Turns text (spaces already written as U+2581) into token ids.

    Args:
        vocabulary: token text to id.
        scores: score of every id.
    """

    def __init__(self, vocabulary: Mapping[str, int], scores: Sequence[float]) -> None:
        self._ids = vocabulary
        self._scores = scores
        # Two characters that stand side by side in no token can never be merged over: text is cut there.
        self._joints = {pair for token in vocabulary for pair in zip(token, token[1:], strict=False)}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`."""
        output: list[int] = []
        joints, cache = self._joints, self._cache
        start = 0
        for end, pair in enumerate(zip(text, text[1:], strict=False), 1):
            if pair not in joints:
                word = text[start:end]
                output += cache.get(word) or self._encode_word(word)
                start = end
        if start < len(text):
            output += self._encode_word(text[start:])
        return output

    def _encode_word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [token for symbol in self._merge(word) for token in self._tokens(symbol)]
            if len(word) <= _CACHED_WORD_LENGTH:
                if len(self._cache) >= _CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[str]:
        symbols = list(word)
        following = [*range(1, len(symbols)), -1]
        preceding = list(range(-1, len(symbols) - 1))
        ids, scores = self._ids, self._scores
        queue: list[tuple[float, int, int, str]] = []

        def candidate(left: int, right: int) -> tuple[float, int, int, str] | None:
            merged = symbols[left] + symbols[right]
            token = ids.get(merged)
            return None if token is None else (-scores[token], left, right, merged)

        for left in range(len(symbols) - 1):
            if (entry := candidate(left, left + 1)) is not None:
                queue.append(entry)
        heapify(queue)
        while queue:
            _, left, right, merged = heappop(queue)
            # A symbol that was merged away is empty; one that grew makes the entry out of date.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(merged):
                continue
            symbols[left], symbols[right] = merged, ""
            after = following[left] = following[right]
            if after >= 0:
                preceding[after] = left
                if (entry := candidate(left, after)) is not None:
                    heappush(queue, entry)
            if (before := preceding[left]) >= 0 and (entry := candidate(before, left)) is not None:
                heappush(queue, entry)
        return [symbol for symbol in symbols if symbol]

    def _tokens(self, symbol: str) -> list[int]:
        token = self._ids.get(symbol)
        if token is not None:
            return [token]
        return [self._byte_token(byte) for byte in symbol.encode()]

    def _byte_token(self, byte: int) -> int:
        token = self._ids.get(f"<0x{byte:02X}>")
        if token is None:
            token = self._ids.get(chr(byte)) if byte < 0x80 else None
        if token is None:
            raise GGUFError(
                f"the tokenizer has no token for byte 0x{byte:02X} (no <0x{byte:02X}> in tokenizer.ggml.tokens); "
                "convert the model again"
            )
        return token
