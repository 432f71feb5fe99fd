"""Slots of recurrent state: which are in use, and by how many holders.

One slot is the place of one sequence's state in every recurrent layer, as it is after some number of tokens. A step
reads one slot and writes another, so a slot never changes while anyone holds it: holding it is a snapshot. This module
hands out numbers and counts references; the memory belongs to the operators.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError

NO_STATE = -1
"""The slot of a sequence that has seen nothing."""


class StateSlots:
    """Allocator of state slots with reference counts; lowest free slot first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._refs = np.zeros(capacity, np.int32)

    @property
    def refs(self) -> NDArray[np.int32]:
        """Reference counts, one a slot (read only)."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    def allocate(self) -> int:
        """Takes a slot, with one reference."""
        if not self.free:
            raise CapacityError(f"all {self.capacity} slots of recurrent state are in use")
        slot = int(self._refs.argmin())
        self._refs[slot] = 1
        self.free -= 1
        return slot

    def retain(self, slot: int) -> None:
        """Adds a reference; NO_STATE needs none."""
        if slot != NO_STATE:
            assert self._refs[slot] > 0, "a free state slot was retained"
            self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Drops a reference; a slot that nobody holds any more is free."""
        if slot != NO_STATE:
            assert self._refs[slot] > 0, "a free state slot was released"
            self._refs[slot] -= 1
            self.free += int(self._refs[slot] == 0)
