"""Groups the (token, expert) pairs of a layer by expert.

Owns the order of pairs: experts ascending (as routed where there is one token), pairs of one expert in the order of
the batch. Invariant: every pair of the batch is in exactly one group, and a subset of groups has exactly their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Grouping:
    """Attributes:
    experts: distinct experts.
    group_start: [groups + 1] offsets into `pairs`.
    pairs: flat pair indices, token * k + j, by group.
    """

    experts: NDArray[np.int64]
    group_start: NDArray[np.int32]
    pairs: NDArray[np.int32]

    @property
    def counts(self) -> NDArray[np.int32]:
        """Pairs of each group."""
        return np.diff(self.group_start)

    def subset(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`group_start` and `pairs` of ascending `groups` alone."""
        if len(groups) == len(self.experts):
            return self.group_start, self.pairs
        if len(self.pairs) == len(self.experts):  # one pair a group
            return self.group_start[: len(groups) + 1], self.pairs[groups]
        counts = self.counts
        kept = np.zeros(len(counts), np.bool_)
        kept[groups] = True
        start = np.zeros(len(groups) + 1, np.int32)
        np.cumsum(counts[groups], out=start[1:])
        return start, self.pairs[np.repeat(kept, counts)]


def group_pairs(ids: NDArray[np.int32]) -> Grouping:
    """Groups `ids` [tokens, k] by expert."""
    flat = ids.ravel()
    if ids.shape[0] == 1 and len(set(flat.tolist())) == len(flat):
        return _one_token(flat)
    order = np.argsort(flat.astype(np.uint16), kind="stable")  # 16-bit keys: a radix sort
    ordered = flat[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    start = np.append(first, len(flat)).astype(np.int32)
    return Grouping(ordered[first].astype(np.int64), start, order.astype(np.int32))


def _one_token(experts: NDArray[np.int32]) -> Grouping:
    """Decode's case, where sorting would cost more than all the rest: each pair is its own group."""
    return Grouping(experts.astype(np.int64), *one_row(len(experts)))


@cache
def one_row(k: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`group_start` and `pairs` of one token's k distinct experts; shared, not to be written to."""
    start, pairs = np.arange(k + 1, dtype=np.int32), np.arange(k, dtype=np.int32)
    start.flags.writeable = pairs.flags.writeable = False
    return start, pairs
