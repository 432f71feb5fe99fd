"""Text that grows token by token.

Owns holding back bytes until they make a whole UTF-8 character, and telling tokens that are marks of a dialect from
text that is spelt the same. Does not know about stop strings. What `push` and `flush` return, joined, is the text of
all the bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from types import MappingProxyType

# Stands before the spelling of a token that is a mark. A noncharacter, which Unicode keeps for use within a program.
MARK = "\ufdd0"
NO_MARKS: Mapping[int, str] = MappingProxyType({})


class StreamDecoder:
    """Decodes one sequence of tokens; not shared between sequences.

    Args:
        bytes_of: bytes of a token id, empty for a token that is not shown.
        marks: spellings of the tokens that are shown as MARK and the spelling. Where there are some, no other text
            has a MARK in it.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], marks: Mapping[int, str] = NO_MARKS) -> None:
        self._bytes_of = bytes_of
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; may be empty. Bytes that can begin no character become U+FFFD."""
        if token in self._marks:
            return self.flush() + MARK + self._marks[token]
        return self._unmarked(self._decoder.decode(self._bytes_of(token)))

    def flush(self) -> str:
        """Returns what is left at the end: U+FFFD for an unfinished character, else nothing. Starts afresh."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest

    def _unmarked(self, text: str) -> str:
        return text.replace(MARK, "\ufffd") if self._marks and MARK in text else text
