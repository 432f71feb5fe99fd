"""The slot cache: which expert sits in which slot, and whom to evict. Policy only; allocates no slots, reads nothing.

A key is the dense index of (tower uid, expert), made by `key`; tables over all keys are NumPy arrays so that a
layer's hits cost a few vector operations. Victim: the resident key whose next use the forecast puts farthest.
Invariant: keys and slots are a bijection, and pinned or loading keys are never victims. One thread, the forward's, owns
an instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.forecast import RoutingForecast, prefill_runs

NO_SLOT = -1


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
        hotness: how often each key was selected of late, resident or not.
    """

    def __init__(self, towers: Iterable[tuple[int, int]], slot_count: int) -> None:
        """Args:
        towers: (uid, number of experts) of each tower, in the order in which their layers run.
        slot_count: slots there are.
        """
        self._first_key: dict[int, int] = {}
        self._place: dict[int, int] = {}
        experts: list[int] = []
        for uid, num_experts in towers:
            if uid in self._first_key:
                raise ValueError(f"tower uid {uid} was given twice: uids never repeat in a process")
            self._first_key[uid] = sum(experts)
            self._place[uid] = len(experts)
            experts.append(num_experts)
        total = sum(experts)
        self.num_keys = total
        self.slot_count = slot_count
        self.slot_of = np.full(total, NO_SLOT, np.int32)
        self.pins = np.zeros(total, np.int32)
        self._key_in: list[int | None] = [None] * slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._loading = np.zeros(total, np.uint8)
        self._loading_count = 0
        self._forecast = RoutingForecast(experts, learns=slot_count < total)
        self._victims: list[
            int
        ] = []  # the first last; cleared when others come into question, and some may be pinned by now
        self._began = False
        self.hotness = self._forecast.hotness

    def key(self, uid: int, expert: int) -> int:
        """The key of an expert; unknown uids raise KeyError."""
        return self._first_key[uid] + expert

    # -- residency -----------------------------------------------------------------------------------------------

    def resident(self, key: int) -> bool:
        """Whether the key's bytes are whole and in a slot; does not touch the order."""
        return bool(self.slot_of[key] != NO_SLOT and not self._loading[key])

    @property
    def resident_count(self) -> int:
        return self.slot_count - len(self._free) - self._loading_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    def begin_fill(self, key: int, *, spare_sooner: bool = False) -> Placement | None:
        """Reserves a slot for a key that has none; None when every slot is pinned or loading.

        With `spare_sooner` also None when that would evict a key that is needed sooner than this one.
        """
        if self.slot_of[key] != NO_SLOT:
            raise ValueError(f"key {key} is resident or being read: it must not be read again")
        evicted: int | None = None
        if self._free:
            slot = self._free.pop()
        else:
            evicted = self._pop_victim(key if spare_sooner else None)
            if evicted is None:
                return None
            slot = int(self.slot_of[evicted])
            self.slot_of[evicted] = NO_SLOT
        self.slot_of[key] = slot
        self._key_in[slot] = key
        self._loading[key] = 1
        self._loading_count += 1
        return Placement(slot, evicted)

    def finish_fill(self, key: int) -> None:
        """The key's bytes are whole: it is resident from now on."""
        assert self._loading[key], f"key {key} is not being read"
        self._loading[key] = 0
        self._loading_count -= 1
        self._victims.clear()

    def invalidate(self, key: int) -> None:
        """Forgets a key whose bytes are not whole or no longer right; its slot is free again."""
        slot = int(self.slot_of[key])
        if slot == NO_SLOT:
            raise ValueError(f"key {key} has no slot to give back")
        if self.pins[key]:
            raise ValueError(f"key {key} is pinned: a kernel may be reading it")
        self._loading_count -= int(self._loading[key])
        self._loading[key] = 0
        self.slot_of[key] = NO_SLOT
        self._key_in[slot] = None
        self._free.append(slot)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, keys: NDArray[np.int64]) -> None:
        """Holds distinct keys in their slots until `unpin`."""
        self.pins[keys] += 1

    def unpin(self, keys: NDArray[np.int64]) -> None:
        self.pins[keys] -= 1
        self._victims.clear()

    # -- order -----------------------------------------------------------------------------------------------------

    def place(self, uid: int) -> int:
        """The place of a tower among those of the cache."""
        return self._place[uid]

    def note(self, place: int, keys: NDArray[np.int64]) -> None:
        """A layer, by its tower's place, selected distinct keys in a decode step."""
        self._began = True
        self._victims.clear()
        self._forecast.note(place, keys)

    def note_prefill(self, place: int, keys: NDArray[np.int64], counts: NDArray[np.int32], rows: int) -> None:
        """The same in a step with a prompt: `counts` of its `rows` tokens selected each key."""
        self._began = True
        self._victims.clear()
        self._forecast.note(place, keys, counts / rows, prefill_runs(rows))

    def seed(self, place: int, hotness: NDArray[np.float64], runs: float) -> None:
        """Starts a tower from known hotness (of a profile), that of `runs` steps; only before anything was selected."""
        if self._began or len(self._free) != self.slot_count:
            raise ValueError("hotness can be seeded only before the first step and fill")
        if runs > 0:
            self._forecast.seed(place, hotness, runs)

    def _pop_victim(self, newcomer: int | None) -> int | None:
        tables = self.slot_of, self.pins, self._loading
        if newcomer is not None:
            return next(iter(self._forecast.victims(*tables, most=1, newcomer=newcomer)), None)
        while self._victims:
            key = self._victims.pop()
            if self.slot_of[key] != NO_SLOT and not self.pins[key] and not self._loading[key]:
                return key
        self._victims = self._forecast.victims(*tables)[::-1]
        return self._victims.pop() if self._victims else None

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError where tables, slots, free list and pins disagree."""
        held = {slot: key for slot, key in enumerate(self._key_in) if key is not None}
        assert sorted(self._free + list(held)) == list(range(self.slot_count)), "a slot is lost or counted twice"
        for slot, key in held.items():
            assert self.slot_of[key] == slot, f"slot {slot} says key {key}, which says slot {self.slot_of[key]}"
        owners = np.flatnonzero(self.slot_of != NO_SLOT).tolist()
        assert sorted(held.values()) == owners, "a key claims a slot that does not know it"
        loading = np.flatnonzero(self._loading).tolist()
        assert set(loading) <= set(owners), "a loading key has no slot"
        assert self._loading_count == len(loading), "the loading keys are counted wrongly"
        assert not (self.pins < 0).any(), "a key was unpinned more often than pinned"
        assert set(np.flatnonzero(self.pins).tolist()) <= set(owners), "a pinned key has no slot"
