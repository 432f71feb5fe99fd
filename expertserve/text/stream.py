"""Text that grows token by token.

Owns holding back bytes until they make a whole UTF-8 character. Does not know about stop strings. What `push` and
`flush` return, joined, is the text of all the bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Decodes one sequence of tokens; not shared between sequences.

    Args:
        bytes_of: bytes of a token id, empty for a token that is not shown.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; may be empty. Bytes that can begin no character become U+FFFD."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """Returns what is left at the end: U+FFFD for an unfinished character, else nothing. Starts afresh."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest
