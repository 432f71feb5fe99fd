"""Prefixes of ended sequences: kept with their cells until the cells are needed.

It decides what a new prompt can reuse and what is given up first. It holds references to KV cells and no memory; who
runs is the scheduler's business. The invariant: each entry holds exactly one reference to each of its cells, so that
giving everything up leaves only the cells of running sequences in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.kv.cache import Cells, KVCells

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: Tokens
    cells: Cells


class PrefixCache:
    """Token prefixes whose K and V are still in their cells, least recently used first."""

    def __init__(self, kv: KVCells) -> None:
        self._kv = kv
        self._entries: list[_Entry] = []
        self.held = np.zeros(kv.capacity, np.int32)  # references this cache holds, one count a cell
        self._evictable = 0
        self._stale = False  # whether the number above has to be counted again

    def take(self, tokens: Tokens, limit: int, running: Iterable[tuple[Tokens, Cells]]) -> Cells:
        """The cells of the longest known prefix of `tokens`, at most `limit` of them, retained for the caller.

        `running` are the sequences whose cells may be shared beside the cached ones.
        """
        wanted = tokens[: max(limit, 0)]
        best, cells, source = 0, np.empty(0, np.int64), None
        for entry in self._entries:
            if (length := common_prefix(wanted, entry.tokens)) > best:
                best, cells, source = length, entry.cells, entry
        for other_tokens, other_cells in running:
            if (length := common_prefix(wanted, other_tokens[: len(other_cells)])) > best:
                best, cells, source = length, other_cells, None
        if source is not None:
            self._touch(source)
        taken = cells[:best].copy()
        self._kv.retain(taken)
        self._stale = True
        return taken

    def give_back(self, cells: Cells) -> None:
        """Drops a sequence's references: its cells become free or stay with whoever else holds them."""
        self._kv.release(cells)
        self._stale = True

    def add(self, tokens: Tokens, cells: Cells) -> None:
        """Keeps a prefix as the most recently used; the caller's references to the cells become the cache's."""
        if not len(cells):
            return
        self._stale = True
        for entry in list(self._entries):
            length = common_prefix(entry.tokens, tokens)
            if length == len(tokens):  # nothing new in it
                self._kv.release(cells)
                self._touch(entry)
                return
            if length == len(entry.tokens):
                self._drop_tail(entry, length)
        self._entries.append(_Entry(tokens.copy(), cells.copy()))
        self.held[cells] += 1

    def reclaim(self, wanted_free: int) -> None:
        """Gives cells up, from the ends of the least recently used prefixes, until that many are free or none is left.

        Only the ends, because what precedes them can still be reused.
        """
        while self._entries and (short := wanted_free - self._kv.free) > 0:
            entry = self._entries[0]
            freed = np.cumsum(self._kv.refs[entry.cells[::-1]] == 1)
            self._drop_tail(entry, min(int(np.searchsorted(freed, short)) + 1, len(entry.cells)))

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
        assert bool(np.all(held == self.held)), "held counts differ from the entries"
        assert bool(np.all(held <= self._kv.refs)), "an entry holds a free cell"
        counted = int(np.count_nonzero((held > 0) & (held == self._kv.refs)))
        assert self.evictable == counted, "the count of evictable cells is stale"

    def _touch(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _drop_tail(self, entry: _Entry, count: int) -> None:
        kept = len(entry.cells) - count
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
