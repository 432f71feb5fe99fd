"""A cursor that reads a file header forward and never more than there is.

Owns the bounds: every length is compared with what the file still holds and with a fixed ceiling before anything is
allocated for it, so that a corrupt or hostile file costs bounded memory and time. Its failures are one line with the
file, what was being read, the byte offset and what to do. Knows the shape of strings, nothing else of the format.
"""

from __future__ import annotations

import io
from typing import NoReturn

from expertserve.errors import GGUFError, UnsupportedModelError

MAX_HEADER_BYTES = 128 << 20  # vocabularies of 260,000 tokens with merges take about 16 MiB
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays of a file together
_BUFFER_BYTES = 256 << 10
_CORRUPT = "the file is corrupt or incomplete: download or convert it again"


def shown(text: str, limit: int = 80) -> str:
    """`text` quoted for a message: one line, bounded length."""
    return ascii(text if len(text) <= limit else text[:limit] + "...")


class Cursor:
    """Reads forward through a bounded buffer and knows what is left."""

    def __init__(self, raw: io.RawIOBase, size: int, path: str) -> None:
        self._file = io.BufferedReader(raw, _BUFFER_BYTES)
        self._size = size
        self._path = path
        self._end = min(size, MAX_HEADER_BYTES)
        self._elements = 0
        self.at = 0

    def release(self) -> None:
        """Let go of the raw file without closing it."""
        self._file.detach()

    @property
    def left(self) -> int:
        return self._end - self.at

    @property
    def size(self) -> int:
        return self._size

    def fail(self, what: str, remedy: str = _CORRUPT, at: int | None = None) -> NoReturn:
        raise GGUFError(f"{self._path}: {what} (at byte {self.at if at is None else at}); {remedy}")

    def unsupported(self, what: str, remedy: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._path}: {what}; {remedy}")

    def need(self, nbytes: int, what: str) -> None:
        """Refuse before anything is allocated if the header cannot hold `nbytes` more."""
        if nbytes <= self.left:
            return
        if self.at + nbytes > self._size:
            self.fail(f"{what} needs {nbytes} bytes but the file has {self._size - self.at} left")
        self.fail(f"{what} would make the header larger than {MAX_HEADER_BYTES >> 20} MiB")

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        try:
            data = self._file.read(nbytes)
        except OSError as error:
            self.fail(f"cannot read {what}: {error.strerror}", "check the disk")
        if len(data) != nbytes:
            self.fail(f"the file ended inside {what}")
        self.at += nbytes
        return data

    def uint(self, nbytes: int, what: str) -> int:
        return int.from_bytes(self.take(nbytes, what), "little")

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        start = self.at
        length = self.uint(8, f"the length of {what}")
        if length > limit:
            self.fail(f"{what} is {length} bytes long, more than {limit}", at=start)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8", at=start)

    def count_elements(self, count: int, smallest: int, what: str) -> None:
        self.need(count * smallest, f"{what} with {count} elements")
        self._elements += count
        if self._elements > MAX_ARRAY_ELEMENTS:
            self.fail(f"{what} takes the arrays of this file past {MAX_ARRAY_ELEMENTS} elements")

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the loop is flat because vocabularies have hundreds of thousands."""
        self.count_elements(count, 8, what)
        values: list[str] = []
        read, from_bytes = self._file.read, int.from_bytes
        append, at, end, length = values.append, self.at, self._end, 0
        try:
            for _ in range(count):
                length = from_bytes(read(8), "little")
                at += 8 + length
                if at > end:
                    break
                append(read(length).decode())
        except UnicodeDecodeError:
            self.fail(f"element {len(values)} of {what} is not valid UTF-8", at=at - length)
        except OSError as error:
            self.fail(f"cannot read {what}: {error.strerror}", "check the disk", at=at)
        if at > end:
            self.at = min(at - length, end)
            self.need(length, f"element {len(values)} of {what}")
        if at > end or self._file.tell() != at:
            self.fail(f"the file ended inside {what}")
        self.at = at
        return values
