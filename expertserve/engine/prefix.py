"""Prefixes of ended sequences: kept with their cells until the cells are needed.

It decides what a new prompt can reuse and what is given up first. It holds references to KV cells and no memory; who
runs is the scheduler's business. The invariant: each entry holds exactly one reference to each of its cells, so that
giving everything up leaves only the cells of running sequences in use. Where the model has recurrent state, a prefix is
reused up to a length at which its state was kept, and one without such a length is not kept at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.kv.cache import Cells, KVCells
from expertserve.kv.states import NO_STATE, StateSlots

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: Tokens
    cells: Cells
    states: dict[int, int]  # slots by length


class PrefixCache:
    """Token prefixes whose K and V are still in their cells, least recently used first."""

    def __init__(self, kv: KVCells, states: StateSlots) -> None:
        self._kv = kv
        self._states = states
        self._entries: list[_Entry] = []
        self.held = np.zeros(kv.capacity, np.int32)  # references this cache holds, one count a cell
        self._evictable = 0
        self._stale = False  # whether the number above has to be counted again

    def take(self, tokens: Tokens, limit: int, running: Iterable[tuple[Tokens, Cells]]) -> tuple[Cells, int]:
        """The cells of the longest known prefix of `tokens`, at most `limit` of them, and the slot of the state after
        them, all retained for the caller.

        `running` are the sequences whose cells may be shared beside the cached ones; with recurrent state none are,
        because those have moved on.
        """
        wanted = tokens[: max(limit, 0)]
        best, cells, source = 0, np.empty(0, np.int64), None
        for entry in self._entries:
            if (length := self._reusable(entry, common_prefix(wanted, entry.tokens))) > best:
                best, cells, source = length, entry.cells, entry
        for other_tokens, other_cells in () if self._states.capacity else running:
            if (length := common_prefix(wanted, other_tokens[: len(other_cells)])) > best:
                best, cells, source = length, other_cells, None
        state = NO_STATE
        if source is not None:
            self._touch(source)
            state = source.states.get(best, NO_STATE)
        taken = cells[:best].copy()
        self._kv.retain(taken)
        self._states.retain(state)
        self._stale = True
        return taken, state

    def _reusable(self, entry: _Entry, length: int) -> int:
        if not self._states.capacity:
            return length
        return max((at for at in entry.states if at <= length), default=0)

    def give_back(self, cells: Cells) -> None:
        """Drops a sequence's references: its cells become free or stay with whoever else holds them."""
        self._kv.release(cells)
        self._stale = True

    def add(self, tokens: Tokens, cells: Cells, states: dict[int, int]) -> None:
        """Keeps a prefix as the most recently used, with the slots of its states by length.

        The caller's references to the cells and slots become the cache's.
        """
        if not len(cells):
            return
        if self._states.capacity and not states:
            self.give_back(cells)
            return
        self._stale = True
        for entry in list(self._entries):
            length = common_prefix(entry.tokens, tokens)
            if length == len(tokens):  # nothing new in it
                self._kv.release(cells)
                self._add_states(entry.states, states)
                self._touch(entry)
                return
            if length == len(entry.tokens):
                self._add_states(states, entry.states)
                entry.states = {}
                self._drop_tail(entry, length)
        self._entries.append(_Entry(tokens.copy(), cells.copy(), states))
        self.held[cells] += 1

    def reclaim(self, wanted_free: int) -> None:
        """Gives cells up, from the ends of the least recently used prefixes, until that many are free or none is left.

        Only the ends, because what precedes them can still be reused.
        """
        while self._entries and (short := wanted_free - self._kv.free) > 0:
            entry = self._entries[0]
            freed = np.cumsum(self._kv.refs[entry.cells[::-1]] == 1)
            self._drop_tail(entry, min(int(np.searchsorted(freed, short)) + 1, len(entry.cells)))

    def drop_state(self) -> bool:
        """Gives up one state, of the least recently used prefix the shortest; False if there is none."""
        entry = next((entry for entry in self._entries if entry.states), None)
        if entry is None:
            return False
        self._states.release(entry.states.pop(min(entry.states)))
        self._drop_tail(entry, 0)
        return True

    def clear(self) -> None:
        """Gives everything up."""
        for entry in list(self._entries):
            self._drop_tail(entry, len(entry.cells))

    @property
    def evictable(self) -> int:
        """Cells that would become free if everything were given up."""
        if self._stale:
            self._evictable = int(np.count_nonzero((self.held > 0) & (self.held == self._kv.refs)))
            self._stale = False
        return self._evictable

    @property
    def tokens(self) -> int:
        """Total length of the prefixes kept."""
        return sum(len(entry.tokens) for entry in self._entries)

    def check_integrity(self) -> None:
        """Raises AssertionError when the entries and the reference counts disagree."""
        held = np.zeros_like(self.held)
        for entry in self._entries:
            assert len(entry.tokens) == len(entry.cells) > 0, "an entry's tokens and cells differ in number"
            held[entry.cells] += 1
            assert bool(entry.states) == bool(self._states.capacity), "an entry has no state to start from"
            assert all(0 < at <= len(entry.tokens) for at in entry.states), "a state lies beyond its prefix"
        assert bool(np.all(held == self.held)), "held counts differ from the entries"
        assert bool(np.all(held <= self._kv.refs)), "an entry holds a free cell"
        counted = int(np.count_nonzero((held > 0) & (held == self._kv.refs)))
        assert self.evictable == counted, "the count of evictable cells is stale"

    def held_states(self) -> list[int]:
        """Every slot held, once for each reference."""
        return [slot for entry in self._entries for slot in entry.states.values()]

    def _add_states(self, to: dict[int, int], states: dict[int, int]) -> None:
        for length, slot in states.items():
            if length in to:
                self._states.release(slot)
            else:
                to[length] = slot

    def _touch(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _drop_tail(self, entry: _Entry, count: int) -> None:
        """Gives up the last `count` cells, and all that is of no use without them."""
        kept = len(entry.cells) - count
        for length in [at for at in entry.states if at > kept]:
            self._states.release(entry.states.pop(length))
        if self._states.capacity and not entry.states:
            kept = 0
        dropped = entry.cells[kept:]
        self.held[dropped] -= 1
        self.give_back(dropped)
        entry.cells, entry.tokens = entry.cells[:kept], entry.tokens[:kept]
        if not kept:
            self._entries.remove(entry)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
