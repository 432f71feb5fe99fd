"""The slot store: bounded memory made of slots, each the place of one expert's bytes.

Owns the memory and the publication of what was written to it; which expert sits where is the cache's business.
Everyone but `factory.py` holds the base type. Invariant: a slot that was opened for writing is unreadable until it is
committed or discarded.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass

from expertserve.anonymous import map_anonymous


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a kernel may dereference: the first byte of a slot where its device sees it."""

    pointer: int
    nbytes: int
    device: str


class ExpertSlotStore(ABC):
    """A contiguous array of `slot_count` slots of `slot_bytes`; slot i starts at `base + i * stride`."""

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        self._slot_count = slot_count
        self._slot_bytes = slot_bytes

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def slot_count(self) -> int:
        return self._slot_count

    @property
    def resident_bytes(self) -> int:
        return self._slot_count * self._slot_bytes

    @property
    def stride(self) -> int:
        return self._slot_bytes

    @property
    @abstractmethod
    def base(self) -> int: ...

    @property
    @abstractmethod
    def write_depth(self) -> int:
        """Slots that may be open for writing at once."""

    @abstractmethod
    def slot_for_write(self, slot: int) -> memoryview:
        """A writable host buffer of `slot_bytes`, page-aligned; not necessarily the slot itself."""

    @abstractmethod
    def commit_slot(self, slot: int, nbytes: int) -> None:
        """Publishes the first `nbytes` of what was written; raises if the slot is not open for writing."""

    @abstractmethod
    def discard_slot(self, slot: int) -> None:
        """Takes the write buffer back unpublished; the slot then holds nothing."""

    @abstractmethod
    def slot_for_read(self, slot: int) -> SlotView:
        """What a kernel may read from now on; raises while the slot is open for writing."""

    @abstractmethod
    def close(self) -> None: ...

    def write_slot(self, slot: int, src: bytes | bytearray | memoryview) -> None:
        """Copies host bytes into a slot and publishes them."""
        buffer = self.slot_for_write(slot)
        try:
            buffer[: len(src)] = src
        except BaseException:
            self.discard_slot(slot)
            raise
        self.commit_slot(slot, len(src))

    def _start(self, slot: int) -> int:
        """Where a slot begins, from `base`; IndexError where there is none."""
        if not 0 <= slot < self._slot_count:
            raise IndexError(f"slot {slot} of {self._slot_count}")
        return slot * self._slot_bytes

    def _require_fit(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self._slot_bytes:
            raise ValueError(f"{nbytes} bytes do not fit a slot of {self._slot_bytes}")


class HostExpertSlotStore(ExpertSlotStore):
    """Slots in one page-aligned anonymous mapping; the write buffer is the slot itself."""

    def __init__(self, slot_count: int, slot_bytes: int, *, huge_pages: bool = True) -> None:
        if slot_count < 1 or slot_bytes < 1 or slot_bytes % mmap.PAGESIZE:
            raise ValueError(f"cannot make {slot_count} slots of {slot_bytes} bytes: slots are whole pages")
        super().__init__(slot_count, slot_bytes)
        self._memory = map_anonymous(
            slot_count * slot_bytes, "expert slots (lower --expert-cache)", huge_pages=huge_pages
        )
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._bytes = memoryview(self._memory)
        self._writing = bytearray(slot_count)

    @property
    def base(self) -> int:
        return self._base

    @property
    def write_depth(self) -> int:
        return self._slot_count

    def slot_for_write(self, slot: int) -> memoryview:
        start = self._start(slot)
        if self._writing[slot]:
            raise ValueError(f"slot {slot} is open for writing already")
        self._writing[slot] = 1
        return self._bytes[start : start + self._slot_bytes]

    def commit_slot(self, slot: int, nbytes: int) -> None:
        self._require_fit(nbytes)
        self._close_writing(slot)

    def discard_slot(self, slot: int) -> None:
        self._close_writing(slot)

    def slot_for_read(self, slot: int) -> SlotView:
        start = self._start(slot)
        if self._writing[slot]:
            raise ValueError(f"slot {slot} is open for writing; commit it first")
        return SlotView(self._base + start, self._slot_bytes, "cpu")

    def close(self) -> None:
        self._slot_count = 0  # every later access raises instead of touching memory that is gone
        self._bytes.release()
        try:
            self._memory.close()
        except BufferError:
            pass  # a reader thread still holds a slot; the mapping goes with its last buffer

    def _close_writing(self, slot: int) -> None:
        self._start(slot)
        if not self._writing[slot]:
            raise ValueError(f"slot {slot} is not open for writing")
        self._writing[slot] = 0
