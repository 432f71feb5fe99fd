"""Readers: how one slice of an expert gets into its region, in one of three modes.

Owns the choice of mode, what it asks of the layout and what a slice's reading will leave where: `direct` goes around
the page cache, `buffered` through it, `mmap` copies from a mapping. The reading itself is done by the threads of
`reads.c`. Knows spans and regions, not experts or slots.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ConfigError
from expertserve.experts.disk import Disk, FileDisk, direct_alignment
from expertserve.experts.layout import SHIFT_ALIGN, SlotLayout
from expertserve.gguf.spans import Span

READ_MODES = ("auto", "direct", "buffered", "mmap")


class FileReader:
    """A mode over a model's files.

    Attributes:
        mode: its name, for the statistics.
        align: room for aligned reads that the slot layout must leave (1: none).
        disk: the files.
        maps: where the files are mapped, int64 [files, 2] of address and bytes; empty unless the mode is mmap.
    """

    align = 1

    def __init__(self, mode: str, disk: Disk) -> None:
        self.mode = mode
        self.disk = disk
        self.maps: NDArray[np.int64] = np.zeros((0, 2), np.int64)

    def shift(self, span: Span) -> int:
        """Where in its region a slice begins once it is read."""
        return 0

    def close(self) -> None:
        self.disk.close()


class BufferedReader(FileReader):
    """Through the page cache, straight into the region."""

    def __init__(self, disk: Disk) -> None:
        super().__init__("buffered", disk)


class DirectReader(FileReader):
    """Around the page cache.

    The aligned range that encloses a slice lands in the region and the slice begins `shift` bytes in; where a kernel
    could not work at that shift, the range lands in a bounce buffer and is copied.
    """

    def __init__(self, disk: Disk, align: int) -> None:
        super().__init__("direct", disk)
        self.align = align

    def shift(self, span: Span) -> int:
        shift = span.offset % self.align
        return shift if shift % SHIFT_ALIGN == 0 else 0


class MappedReader(FileReader):
    """Copies from a mapping of the file, after an aligned read-ahead hint: the portable mode."""

    def __init__(self, disk: Disk) -> None:
        super().__init__("mmap", disk)
        self._maps = [mmap.mmap(fd, 0, access=mmap.ACCESS_READ) for fd in disk.descriptors]
        self.maps = np.array([(np.frombuffer(m, np.uint8).ctypes.data, len(m)) for m in self._maps], np.int64)

    def close(self) -> None:
        for mapping in self._maps:
            mapping.close()
        super().close()


class SliceReads:
    """The reads of one expert, laid out once as the reader threads take them.

    Attributes:
        spans: in the file, by role.
        shifts: where in its region each slice begins once it is read.
        table: int64 [slices, 5] of file, offset, bytes, region's start in the slot, region's bytes.
        address: of the table.
    """

    __slots__ = ("address", "shifts", "spans", "table")

    def __init__(self, spans: Sequence[Span], layout: SlotLayout, reader: FileReader) -> None:
        self.spans = tuple(spans)
        self.shifts = tuple(reader.shift(span) for span in spans)
        rows = [
            (span.file_index, span.offset, span.nbytes, start, room)
            for span, start, room in zip(spans, layout.offsets, layout.region_bytes, strict=True)
        ]
        self.table: NDArray[np.int64] = np.array(rows, np.int64)
        self.address = int(self.table.ctypes.data)


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
    if mode == "mmap":
        return MappedReader(FileDisk(paths, direct=False))
    return BufferedReader(FileDisk(paths, direct=False))
