"""Slots in the memory of a GPU.

Owns one arena on the device, a few page-locked staging buffers and the upload stream. What the reader writes lands in a
staging buffer; `commit_slot` queues one copy to the slot. Invariants: kernels launched after `slot_for_read` start
after that copy; a staging buffer is handed out again only after its copy; nothing is left when construction fails.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.store import ExpertSlotStore, SlotView
from expertserve.ops.cuda.device import Device, Download, Event, Upload

STAGING_BUFFERS = 8
"""Experts on their way at once: what keeps a fast disk busy, and one copy's worth of slack."""


class DeviceExpertSlotStore(ExpertSlotStore):
    """Slots in one device allocation; the write buffer is page-locked host memory."""

    def __init__(self, device: Device, slot_count: int, slot_bytes: int) -> None:
        """Raises CapacityError where the arena or the staging buffers are refused."""
        if slot_count < 1 or slot_bytes < 1:
            raise ValueError(f"cannot make {slot_count} slots of {slot_bytes} bytes")
        super().__init__(slot_count, slot_bytes)
        self._device = device
        with ExitStack() as undo:
            self._arena = device.allocate(slot_count * slot_bytes, "expert slots (lower --expert-cache)")
            undo.callback(self._arena.free)
            depth = min(STAGING_BUFFERS, slot_count)
            self._free = [device.allocate_pinned(slot_bytes, "staging of expert slots") for _ in range(depth)]
            self._stream = device.make_stream()
            undo.pop_all()
        self._depth = depth
        self._writing: dict[int, NDArray[np.uint8]] = {}
        self._copying: deque[tuple[Event, NDArray[np.uint8]]] = deque()  # oldest first: one stream, so in order
        self._copied: dict[int, Event] = {}  # by slot, until the compute stream was made to wait

    @property
    def base(self) -> int:
        return self._arena.address

    @property
    def write_depth(self) -> int:
        return self._depth

    def slot_for_write(self, slot: int) -> memoryview:
        self._start(slot)
        if slot in self._writing:
            raise ValueError(f"slot {slot} is open for writing already")
        self._reclaim()
        if not self._free:
            if not self._copying:
                raise ValueError(f"{len(self._writing)} slots are open for writing, which is all there is room for")
            self._copying[0][0].wait()
            self._reclaim()
        buffer = self._writing[slot] = self._free.pop()
        return buffer.data

    def _reclaim(self) -> None:
        """Takes staging buffers back whose copies are done."""
        while self._copying and self._copying[0][0].done():
            self._free.append(self._copying.popleft()[1])

    def commit_slot(self, slot: int, nbytes: int) -> None:
        self._require_fit(nbytes)
        buffer = self._close_writing(slot)
        self.copy_in(slot, buffer[:nbytes])
        self._copying.append((self._copied[slot], buffer))

    def discard_slot(self, slot: int) -> None:
        self._free.append(self._close_writing(slot))

    def slot_for_read(self, slot: int) -> SlotView:
        address = self.base + self._start(slot)
        if slot in self._writing:
            raise ValueError(f"slot {slot} is open for writing; commit it first")
        event = self._copied.pop(slot, None)
        if event is not None:
            self._device.compute.wait(event)
        return SlotView(address, self._slot_bytes, self._device.name)

    def page_locked(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory for `copy_out` and `copy_in`; raises CapacityError where it is refused."""
        return self._device.allocate_pinned(nbytes, "experts on the host (lower --host-cache)")

    def copy_out(self, slot: int, target: NDArray[np.uint8]) -> None:
        """Queues a copy of a slot's bytes to the host, behind the copies queued before it."""
        self._stream.run(Download(target, self.base + self._start(slot)))

    def copy_in(self, slot: int, source: NDArray[np.uint8]) -> None:
        """Queues a copy from page-locked memory to a slot, behind the copies queued before it."""
        self._stream.run(Upload(self.base + self._start(slot), source))
        self._copied[slot] = self._stream.record()

    def close(self) -> None:
        if self._slot_count == 0:
            return
        self._slot_count = 0  # every later access raises instead of touching memory that is gone
        self._stream.synchronize()
        self._device.compute.synchronize()
        self._copying.clear()
        self._copied.clear()
        self._free.clear()
        self._writing.clear()  # a reader thread that still writes holds its buffer itself
        self._arena.free()

    def _close_writing(self, slot: int) -> NDArray[np.uint8]:
        self._start(slot)
        if slot not in self._writing:
            raise ValueError(f"slot {slot} is not open for writing")
        return self._writing.pop(slot)
