"""Readers: put one slice of an expert into its region, in one of three modes.

Owns how bytes come from the file: `direct` around the page cache, `buffered` through it, `mmap` by copying from a
mapping. Knows spans and regions, not experts or slots. Invariant: a region is reported good only when every byte of
the span came from the file; a short read, an end of file and an I/O error raise by name, and nothing is ever
substituted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from expertserve.errors import ConfigError, ExpertReadError
from expertserve.experts.disk import Disk, FileDisk, direct_alignment
from expertserve.experts.layout import SHIFT_ALIGN, round_up
from expertserve.gguf.spans import Span

READ_MODES = ("auto", "direct", "buffered", "mmap")


class SliceRead(NamedTuple):
    """What a read did.

    Attributes:
        shift: where in the region the slice's first byte lies.
        asked: bytes asked of the file.
        advised: a page-aligned read-ahead hint was accepted.
    """

    shift: int
    asked: int
    advised: bool


class FileReader(ABC):
    """Reads slices; called by several threads at once.

    Attributes:
        mode: name of the mode, for the statistics.
        align: room for aligned reads that the slot layout must leave (1: none).
        disk: the files.
    """

    mode: str
    align: int = 1

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    @abstractmethod
    def read(self, span: Span, region: memoryview) -> SliceRead:
        """Reads all of `span` into `region`, or raises ExpertReadError."""

    def close(self) -> None:
        self.disk.close()

    def _fill(self, span: Span, target: memoryview, offset: int, needed: int, align: int = 1) -> None:
        """Reads from `offset` until at least `needed` bytes of `target` came."""
        done = 0
        while done < needed:
            try:
                got = self.disk.read_into(span.file_index, target[done:], offset + done)
            except OSError as error:
                raise self._failed(span, error.strerror or str(error)) from error
            done += got
            if got <= 0 or (done < needed and done % align):
                raise self._failed(span, f"short read, {done} of {needed} bytes came")

    def _failed(self, span: Span, reason: str) -> ExpertReadError:
        return ExpertReadError(
            f"{self.disk.name(span.file_index)}: reading {span.nbytes} bytes at byte {span.offset} failed: {reason}"
        )


class BufferedReader(FileReader):
    """preadv through the page cache, straight into the region."""

    mode = "buffered"

    def read(self, span: Span, region: memoryview) -> SliceRead:
        self._fill(span, region[: span.nbytes], span.offset, span.nbytes)
        return SliceRead(0, span.nbytes, False)


class DirectReader(FileReader):
    """preadv around the page cache.

    The aligned range that encloses the slice lands in the region and the slice starts `shift` bytes in; where a
    kernel could not work at that shift, the range lands in the thread's bounce buffer and is copied.
    """

    mode = "direct"

    def __init__(self, disk: Disk, align: int) -> None:
        super().__init__(disk)
        self.align = align
        self._local = threading.local()

    def read(self, span: Span, region: memoryview) -> SliceRead:
        shift = span.offset % self.align
        length = round_up(shift + span.nbytes, self.align)
        straight = shift % SHIFT_ALIGN == 0
        target = region[:length] if straight else self._bounce(length)
        # The padded range of a file's last expert passes its end: what counts is the bytes needed.
        self._fill(span, target, span.offset - shift, shift + span.nbytes, self.align)
        if straight:
            return SliceRead(shift, length, False)
        copy_bytes(region, target[shift : shift + span.nbytes])
        return SliceRead(0, length, False)

    def _bounce(self, length: int) -> memoryview:
        """The calling thread's page-aligned buffer."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = memoryview(mmap.mmap(-1, round_up(length, mmap.PAGESIZE)))
            self._local.buffer = buffer
        return buffer[:length]


class MappedReader(FileReader):
    """Copies from a mapping of the file, after an aligned read-ahead hint: the portable mode.

    A mapping of a file that shrinks is deadly to touch, so the size is looked at before every copy.
    """

    mode = "mmap"

    def __init__(self, disk: FileDisk, num_files: int) -> None:
        super().__init__(disk)
        self._maps = [mmap.mmap(disk.fileno(i), 0, access=mmap.ACCESS_READ) for i in range(num_files)]
        self._views = [memoryview(mapping) for mapping in self._maps]

    def read(self, span: Span, region: memoryview) -> SliceRead:
        end = span.offset + span.nbytes
        size = min(self.disk.size(span.file_index), len(self._maps[span.file_index]))
        if end > size:
            raise self._failed(span, f"short read, the file ends at byte {size}")
        advised = self._advise(self._maps[span.file_index], span.offset, end)
        copy_bytes(region, self._views[span.file_index][span.offset : end])
        return SliceRead(0, span.nbytes, advised)

    def _advise(self, mapping: mmap.mmap, start: int, end: int) -> bool:
        """Asks the kernel to read the pages of [start, end); False where it refuses or cannot be asked."""
        if not hasattr(mapping, "madvise"):
            return False
        first = start - start % mmap.PAGESIZE
        try:
            mapping.madvise(mmap.MADV_WILLNEED, first, end - first)
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        for view, mapping in zip(self._views, self._maps, strict=True):
            view.release()
            try:
                mapping.close()
            except BufferError:
                pass  # a thread is copying from it; the mapping goes with its last buffer
        super().close()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies `source` to the start of `target` without holding the interpreter's lock."""
    if len(source) > len(target):
        raise ValueError(f"{len(source)} bytes do not fit {len(target)}")
    to, come_from = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    ctypes.memmove(to.ctypes.data, come_from.ctypes.data, len(source))


def open_reader(mode: str, paths: Sequence[str | Path], *, cacheable_bytes: int | None = None) -> FileReader:
    """Opens the files in a mode.

    Args:
        mode: one of READ_MODES.
        paths: the model's files, in the order of the spans' `file_index`.
        cacheable_bytes: memory the page cache may have; `auto` reads around it when the files are larger.

    Raises:
        ConfigError: the mode is unknown or cannot work here.
    """
    if mode not in READ_MODES:
        raise ConfigError(f"read mode {mode!r} is none of {', '.join(READ_MODES)}")
    if mode in ("auto", "direct"):
        total = sum(os.path.getsize(path) for path in paths)
        fits_cache = mode == "auto" and cacheable_bytes is not None and total <= cacheable_bytes
        align = None if fits_cache else direct_alignment(paths)
        if align is not None:
            return DirectReader(FileDisk(paths, direct=True), align)
        if mode == "direct":
            raise ConfigError(f"{paths[0]}: this file system has no direct reads; use read mode buffered or auto")
    if mode == "mmap" or not hasattr(os, "preadv"):
        return MappedReader(FileDisk(paths, direct=False), len(paths))
    return BufferedReader(FileDisk(paths, direct=False))
