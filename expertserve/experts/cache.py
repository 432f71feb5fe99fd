"""The slot cache: which expert sits in which slot, and whom to evict. Policy only; allocates nothing, reads nothing.

A key is the dense index of (tower uid, expert), made by `key`; tables over all keys are NumPy arrays so that a
layer's hits cost a few vector operations. Victim: lowest hotness, ties broken by least recent use. Hotness grows by
one per decode step in which a key was selected, in a prefill by `prefill_weights`, and decays per step of the target's
clock; it is kept in a domain that
inflates instead of decaying, so nothing is rescanned and a score only grows, which is what lets a heap with stale
entries find victims in O(log n). Invariant: keys and slots are a bijection, and pinned or loading keys are never
victims. One thread, the forward's, owns an instance.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEFAULT_DECAY = 0.995
PREFILL_STEPS = 64
"""How many decode steps a prefill counts as at most: what a prompt chose says what its answer will choose, but a long
prompt must not flush what other answers use."""
_RESCALE_ABOVE = 1e100
NO_SLOT = -1


def prefill_weights(counts: NDArray[np.int32], rows: int | NDArray[np.int32]) -> NDArray[np.float64]:
    """What a step of `rows` tokens adds to the hotness of experts that `counts` of them chose."""
    weights: NDArray[np.float64] = counts.astype(np.float64) * np.minimum(1.0, PREFILL_STEPS / rows)
    return weights


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot reserved for a fill, and the key that was evicted for it (or None)."""

    slot: int
    evicted: int | None


class ExpertSlotCache:
    """Residency of the experts of one size class.

    Attributes:
        slot_of: slot of each key, NO_SLOT where it has none; a loading key has one.
        pins: how many readers hold each key.
        hotness: inflated score of each key, resident or not; divide by `increment` for the present value.
        last_used: step of each key's last selection, -1 for never.
        parked: keys the victim search met pinned; `unpin` puts them back into the order.
    """

    def __init__(self, towers: Iterable[tuple[int, int]], slot_count: int, *, decay: float = DEFAULT_DECAY) -> None:
        """Args:
        towers: (uid, number of experts) of each tower.
        slot_count: slots there are.
        decay: factor of hotness per step, in (0, 1].
        """
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], not {decay}")
        self._first_key: dict[int, int] = {}
        total = 0
        for uid, num_experts in towers:
            if uid in self._first_key:
                raise ValueError(f"tower uid {uid} was given twice: uids never repeat in a process")
            self._first_key[uid] = total
            total += num_experts
        self.num_keys = total
        self.slot_count = slot_count
        self.decay = decay
        self.increment = 1.0
        self.clock = 0
        self.slot_of = np.full(total, NO_SLOT, np.int32)
        self.pins = np.zeros(total, np.int32)
        self.hotness = np.zeros(total, np.float64)
        self.last_used = np.full(total, -1, np.int64)
        self.parked: list[int] = []
        self._key_in: list[int | None] = [None] * slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._loading: set[int] = set()
        self._heap: list[tuple[float, int, int]] = []
        self._in_order = bytearray(total)  # 1: the key has its one entry in the heap or in `parked`
        self._touched: list[NDArray[np.int64]] = []

    def key(self, uid: int, expert: int) -> int:
        """The key of an expert; unknown uids raise KeyError."""
        return self._first_key[uid] + expert

    # -- residency -----------------------------------------------------------------------------------------------

    def resident(self, key: int) -> bool:
        """Whether the key's bytes are whole and in a slot; does not touch the order."""
        return self.slot_of[key] != NO_SLOT and key not in self._loading

    @property
    def resident_count(self) -> int:
        return self.slot_count - len(self._free) - len(self._loading)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def begin_fill(self, key: int, *, spare_hotter: bool = False) -> Placement | None:
        """Reserves a slot for a key that has none; None when every slot is pinned or loading.

        With `spare_hotter` also None when that would evict a key hotter than this one.
        """
        if self.slot_of[key] != NO_SLOT:
            raise ValueError(f"key {key} is resident or being read: it must not be read again")
        evicted: int | None = None
        if self._free:
            slot = self._free.pop()
        else:
            evicted = self._pop_victim(key if spare_hotter else None)
            if evicted is None:
                return None
            slot = int(self.slot_of[evicted])
            self.slot_of[evicted] = NO_SLOT
        self.slot_of[key] = slot
        self._key_in[slot] = key
        self._loading.add(key)
        return Placement(slot, evicted)

    def finish_fill(self, key: int) -> None:
        """The key's bytes are whole: it is resident from now on."""
        self._loading.remove(key)
        if not self._in_order[key]:
            self._enter_order(key)

    def invalidate(self, key: int) -> None:
        """Forgets a key whose bytes are not whole or no longer right; its slot is free again."""
        slot = int(self.slot_of[key])
        if slot == NO_SLOT:
            raise ValueError(f"key {key} has no slot to give back")
        if self.pins[key]:
            raise ValueError(f"key {key} is pinned: a kernel may be reading it")
        self._loading.discard(key)
        self.slot_of[key] = NO_SLOT
        self._key_in[slot] = None
        self._free.append(slot)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, keys: NDArray[np.int64]) -> None:
        """Holds distinct keys in their slots until `unpin`."""
        self.pins[keys] += 1

    def unpin(self, keys: NDArray[np.int64]) -> None:
        self.pins[keys] -= 1
        if self.parked:
            self.unpark()

    def unpark(self) -> None:
        """Puts keys the victim search met pinned back into the order, once they are free."""
        still = []
        for key in self.parked:
            if self.pins[key]:
                still.append(key)
            elif self.slot_of[key] == NO_SLOT or key in self._loading:
                self._in_order[key] = 0
            else:
                self._enter_order(key)
        self.parked = still

    # -- order -----------------------------------------------------------------------------------------------------

    def touch(self, keys: NDArray[np.int64], weights: NDArray[np.float64] | None = None) -> None:
        """Notes that keys were selected in this step; `keys` is kept until the order is next needed.

        Args:
            keys: selected keys.
            weights: what each adds to its key's hotness, for distinct keys; None for one each.
        """
        if weights is None:
            self._touched.append(keys)
        else:
            self._heat(keys, weights)

    def advance(self, *, decay: bool = True) -> None:
        """Ends a step. A draft's step passes `decay=False`: it does not age the target's hotness."""
        self._settle()
        self.clock += 1
        if decay:
            self.increment /= self.decay
            if self.increment > _RESCALE_ABOVE:
                self._rescale()

    def current_hotness(self) -> NDArray[np.float64]:
        """Present hotness of every key, the pending selections of the open step left out."""
        return self.hotness / self.increment

    def seed(self, keys: slice, hotness: NDArray[np.float64]) -> None:
        """Starts from known hotness (of a profile); only before anything was selected or filled."""
        if self.clock or len(self._free) != self.slot_count:
            raise ValueError("hotness can be seeded only before the first step and fill")
        self.hotness[keys] = hotness

    def _settle(self) -> None:
        """Applies pending selections."""
        if self._touched:
            keys = self._touched[0] if len(self._touched) == 1 else np.concatenate(self._touched)
            self._touched.clear()
            self._heat(keys, 1.0)

    def _heat(self, keys: NDArray[np.int64], weights: float | NDArray[np.float64]) -> None:
        """Adds to hotness: once per key and step, however often it was selected."""
        added = np.where(self.last_used[keys] != self.clock, weights, 0.0) * self.increment
        self.hotness[keys] += added  # a repeated index counts once in NumPy's indexed addition
        self.last_used[keys] = self.clock

    def _enter_order(self, key: int) -> None:
        self._in_order[key] = 1
        heapq.heappush(self._heap, (float(self.hotness[key]), int(self.last_used[key]), key))

    def _pop_victim(self, newcomer: int | None) -> int | None:
        self._settle()
        limit = float("inf") if newcomer is None else float(self.hotness[newcomer])
        heap = self._heap
        while heap:
            score, used, key = heap[0]
            if self.slot_of[key] == NO_SLOT or key in self._loading:
                heapq.heappop(heap)
                self._in_order[key] = 0
                continue
            now = (float(self.hotness[key]), int(self.last_used[key]), key)
            if now != (score, used, key):
                heapq.heapreplace(heap, now)
                continue
            if score > limit:
                return None  # what remains is hotter still
            heapq.heappop(heap)
            if self.pins[key]:
                self.parked.append(key)
                continue
            self._in_order[key] = 0
            return key
        return None

    def _rescale(self) -> None:
        self.hotness /= self.increment
        self.increment = 1.0
        keys = [key for _, _, key in self._heap]
        self._heap = [(float(self.hotness[key]), int(self.last_used[key]), key) for key in keys]
        heapq.heapify(self._heap)

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError where tables, slots, free list, pins and order disagree."""
        held = {slot: key for slot, key in enumerate(self._key_in) if key is not None}
        assert sorted(self._free + list(held)) == list(range(self.slot_count)), "a slot is lost or counted twice"
        for slot, key in held.items():
            assert self.slot_of[key] == slot, f"slot {slot} says key {key}, which says slot {self.slot_of[key]}"
        owners = np.flatnonzero(self.slot_of != NO_SLOT).tolist()
        assert sorted(held.values()) == owners, "a key claims a slot that does not know it"
        assert self._loading <= set(owners), "a loading key has no slot"
        assert not (self.pins < 0).any(), "a key was unpinned more often than pinned"
        assert set(np.flatnonzero(self.pins).tolist()) <= set(owners), "a pinned key has no slot"
        ordered = [key for _, _, key in self._heap] + self.parked
        assert len(set(ordered)) == len(ordered), "a key is in the order twice"
        assert all(self._in_order[key] for key in ordered) and sum(self._in_order) == len(ordered)
        assert set(owners) - self._loading <= set(ordered), "a resident key can never be evicted"
        for score, used, key in self._heap:
            assert (score, used) <= (self.hotness[key], self.last_used[key]), f"the order overrates key {key}"
