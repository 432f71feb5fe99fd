"""The host tier: where experts go that lose their slot on a device, and from where they come back without a read.

Owns page-locked places of the size of a slot, and which expert lies in which. All copies go through the store's stream
in the order in which they are asked for, so that a place may be written again as soon as its content was sent. It has
no heat of its own: the slot cache's decides. Invariant: an expert lies in a slot or here, never in both.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class MovingStore(Protocol):
    """A slot store whose content can be moved to page-locked host memory and back."""

    @property
    def slot_bytes(self) -> int: ...

    def page_locked(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies can use.

        Raises:
            CapacityError: refused.
        """

    def copy_out(self, slot: int, target: NDArray[np.uint8]) -> None:
        """Queues a copy of a slot's bytes to the host."""

    def copy_in(self, slot: int, source: NDArray[np.uint8]) -> None:
        """Queues a copy from the host, which publishes the slot."""


class HostTier:
    """`places` experts of one size class; one place more is kept for exchanges."""

    def __init__(self, store: MovingStore, places: int, hotness: NDArray[np.float32]) -> None:
        """`hotness` is the slot cache's, by key."""
        self.places = places
        self._store = store
        self._hotness = hotness
        self._memory = store.page_locked((places + 1) * store.slot_bytes).reshape(places + 1, store.slot_bytes)
        self._free = list(range(places, -1, -1))
        self._place_of: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def __contains__(self, key: int) -> bool:
        return key in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def keep(self, key: int, slot: int) -> bool:
        """Takes the expert in `slot` before that is written again, unless all that lie here are hotter."""
        if len(self._place_of) == self.places:
            keys = np.fromiter(self._place_of, np.int64, self.places)
            coldest = int(keys[self._hotness[keys].argmin()])
            if self._hotness[coldest] > self._hotness[key]:
                return False
            self._free.append(self._place_of.pop(coldest))
        place = self._place_of[key] = self._free.pop()
        self._store.copy_out(slot, self._memory[place])
        return True

    def lift(self, key: int, slot: int, evicted: int | None) -> bool:
        """Moves an expert that lies here into `slot`, and the one that was in it here; whether that was kept."""
        place = self._place_of.pop(key)
        kept = evicted is not None and self.keep(evicted, slot)
        self._store.copy_in(slot, self._memory[place])
        self._free.append(place)
        return kept

    def close(self) -> None:
        """Forgets everything; the memory goes with the last copy under way."""
        self._place_of.clear()
