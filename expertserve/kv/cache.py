"""KV cells: which are in use, by how many holders, and which of them a row may see.

One cell is the place of one token's K and V in every layer. This module hands out cell numbers and counts references,
so that sequences share the cells of a common prefix; the memory behind the cells belongs to the operators, and who
holds a cell to the engine. The invariant: a cell is free exactly when its count is zero, and a cell is never written
after a second holder took it (a sequence writes only cells it has just allocated).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError

Cells = NDArray[np.int64]

BUCKET = 256  # attention lengths are multiples of this, so that a compiled segment serves many tokens


class KVCells:
    """Allocator of KV cells with reference counts; lowest free cell first, so that attention stays short."""

    def __init__(self, capacity: int) -> None:
        if capacity <= 0 or capacity % BUCKET:
            raise CapacityError(f"the KV cache has {capacity} cells; it must be a positive multiple of {BUCKET}")
        self.capacity = capacity
        self.free = capacity
        self._refs = np.zeros(capacity, np.int32)
        self._first_free = 0  # no free cell lies below this one
        self._high_water = 0  # upper bound of the true value; tightened when it is asked for

    def allocate(self, n: int) -> Cells:
        """Takes the n lowest free cells, each with one reference."""
        if n > self.free:
            raise CapacityError(f"{n} KV cells are needed and {self.free} of {self.capacity} are free")
        cells = self._lowest_free(n)
        self._refs[cells] = 1
        self.free -= n
        if n:
            last = int(cells[-1]) + 1
            self._first_free = last
            self._high_water = max(self._high_water, last)
        return cells

    def retain(self, cells: Cells) -> None:
        """Adds one reference to each of these distinct cells, all of them in use."""
        assert bool(np.all(self._refs[cells] > 0)), "a free KV cell was retained"
        self._refs[cells] += 1

    def release(self, cells: Cells) -> None:
        """Drops one reference of each of these distinct cells; the ones nobody holds any more become free."""
        if not len(cells):
            return
        counts = self._refs[cells] - 1
        assert bool(np.all(counts >= 0)), "a free KV cell was released"
        self._refs[cells] = counts
        freed = cells[counts == 0]
        if len(freed):
            self.free += len(freed)
            self._first_free = min(self._first_free, int(freed.min()))

    @property
    def refs(self) -> NDArray[np.int32]:
        """Reference counts, one a cell (read only)."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    @property
    def high_water(self) -> int:
        """One past the highest cell in use."""
        while self._high_water and not self._refs[self._high_water - 1]:
            window = self._refs[max(0, self._high_water - 4096) : self._high_water]
            used = np.flatnonzero(window)
            self._high_water -= len(window) - (int(used[-1]) + 1 if len(used) else 0)
        return self._high_water

    def bucket(self, high: int | None = None) -> int:
        """Attention length that covers the cells below `high` (all cells in use by default), rounded up."""
        return bucket_length(self.high_water if high is None else high, self.capacity)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts and what is derived from them disagree."""
        assert self.free == int(np.count_nonzero(self._refs == 0)), "free count differs from the reference counts"
        assert bool(np.all(self._refs >= 0)), "negative reference count"
        assert bool(np.all(self._refs[: self._first_free] > 0)), "a free cell lies below the first free one"
        used = np.flatnonzero(self._refs)
        assert self.high_water == (int(used[-1]) + 1 if len(used) else 0), "high water mark is wrong"

    def _lowest_free(self, n: int) -> Cells:
        width = max(64, 2 * n)  # cells in use are mostly at the low end: look at a window first, then at wider ones
        while True:
            window = self._refs[self._first_free : self._first_free + width]
            found = np.flatnonzero(window == 0)
            if len(found) >= n:
                return (found[:n] + self._first_free).astype(np.int64, copy=False)
            width *= 4


def bucket_length(high: int, capacity: int) -> int:
    """`high` rounded up to a whole bucket, at least one and at most the capacity."""
    return min(max(BUCKET, -(-high // BUCKET) * BUCKET), capacity)


def attention_mask(
    rows: Sequence[tuple[Cells, int]], n_kv: int, out: NDArray[np.float16] | None = None
) -> NDArray[np.float16]:
    """Builds `Batch.mask`, [T, n_kv], for sequences given as (cells, first_new).

    A sequence has one row for each cell from index `first_new` on; the row of index i sees cells[: i + 1].
    `out`, if given, is a [T, n_kv] array to build it in.
    """
    total = sum(len(cells) - first_new for cells, first_new in rows)
    mask = np.empty((total, n_kv), np.float16) if out is None else out
    row = 0
    for cells, first_new in rows:
        block = mask[row : row + len(cells) - first_new]
        _fill_causal(block, cells[:first_new], cells[first_new:])
        row += len(block)
    return mask


def _fill_causal(block: NDArray[np.float16], past: Cells, new: Cells) -> None:
    block[0] = -np.inf
    block[0, past] = 0
    block[0, new[0]] = 0
    if len(new) == 1:
        return
    block[1:] = block[0]
    first, last = int(new[0]), int(new[-1])
    ahead = np.triu(np.full((len(new), len(new)), -np.inf, np.float16), 1)
    if last - first == len(new) - 1 and bool(np.all(np.diff(new) == 1)):
        block[:, first : last + 1] = ahead
    else:
        block[:, new] = ahead
