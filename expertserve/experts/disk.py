"""The files of a model as the reader sees them: opened once, read by position, watched for change.

Owns file descriptors and the question what alignment direct reads need; knows nothing of experts. Invariant: a file
whose size or modification time changed since it was opened is reported by name, so bytes of two versions are never
mixed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from expertserve.errors import ExpertReadError

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_OFFSET = 152  # of stx_dio_mem_align and stx_dio_offset_align in struct statx
_PROBED_ALIGNMENTS = (512, 4096)


class Disk(ABC):
    """Positional reads of numbered files; the seam where tests put a disk with delays and faults."""

    @property
    @abstractmethod
    def descriptors(self) -> Sequence[int]:
        """Open files for the reader threads; none where reads go through `read_into` instead."""

    def read_into(self, file_index: int, buffer: memoryview, offset: int) -> int:
        """Reads at most `len(buffer)` bytes, returns how many came; 0 at the end of the file; OSError when it fails."""
        raise NotImplementedError

    @abstractmethod
    def name(self, file_index: int) -> str:
        """The file's name, for messages."""

    @abstractmethod
    def check_unchanged(self, file_index: int) -> None:
        """Raises ExpertReadError where the file is no longer the one that was opened."""

    @abstractmethod
    def close(self) -> None: ...


class FileDisk(Disk):
    """Real files, through the page cache or around it."""

    def __init__(self, paths: Sequence[str | Path], *, direct: bool) -> None:
        self._paths = [str(path) for path in paths]
        self._fds: list[int] = []
        self._opened_as: list[tuple[int, int]] = []
        try:
            for path in self._paths:
                self._open(path, direct)
        except OSError as error:
            self.close()
            raise ExpertReadError(f"{error.filename}: cannot be opened for expert reads: {error.strerror}") from error

    def _open(self, path: str, direct: bool) -> None:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
        self._fds.append(fd)
        if not direct and hasattr(os, "posix_fadvise"):
            # Exactly what is asked for: the kernel's own read-ahead would read past every slice.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._opened_as.append(_identity(fd))

    @property
    def descriptors(self) -> Sequence[int]:
        return self._fds

    def name(self, file_index: int) -> str:
        return self._paths[file_index]

    def check_unchanged(self, file_index: int) -> None:
        if _identity(self._fds[file_index]) != self._opened_as[file_index]:
            raise ExpertReadError(
                f"{self._paths[file_index]}: the file changed on disk while loaded; restart to load the new one"
            )

    def matches(self, fingerprint: Sequence[tuple[str, int, int, int]]) -> bool:
        """Whether these are the files a header was read from: (path, size, mtime_ns, inode) of each."""
        mine = [(os.fstat(fd).st_size, os.fstat(fd).st_mtime_ns, os.fstat(fd).st_ino) for fd in self._fds]
        return mine == [tuple(entry[1:4]) for entry in fingerprint]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def direct_alignment(paths: Sequence[str | Path]) -> int | None:
    """The alignment that direct reads of all files need; None where a file cannot be read directly."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return None
    needed = 1
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None
        try:
            align = _reported_alignment(fd)
            if align is None or not _reads_at(fd, align):
                align = next((candidate for candidate in _PROBED_ALIGNMENTS if _reads_at(fd, candidate)), None)
        finally:
            os.close(fd)
        if align is None:
            return None
        needed = max(needed, align)
    return needed


def _reported_alignment(fd: int) -> int | None:
    """What statx says (Python has no os.statx); None where kernel, library or file system say nothing."""
    if not sys.platform.startswith("linux"):
        return None
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer)
    memory, offset = struct.unpack_from("=II", buffer, _STATX_DIO_OFFSET)
    if not mask & _STATX_DIOALIGN or not memory or not offset:
        return None
    return int(max(memory, offset))


def _reads_at(fd: int, align: int) -> bool:
    """Whether a direct read at `align` works; the second unit is read, so that the offset is no larger power of two."""
    if align & (align - 1) or align > mmap.PAGESIZE:
        return False
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory, memoryview(memory) as view, view[align : 2 * align] as target:
        try:
            os.preadv(fd, [target], align)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ExpertReadError(f"direct reads fail: {error.strerror}; check the disk") from error
            return False
    return True
