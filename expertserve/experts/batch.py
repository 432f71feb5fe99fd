"""What the lane hands to the expert kernel: which experts, where they lie, which pairs of the batch they serve.

Owns no memory. Invariant: the addresses are good until the kernel that reads them has finished, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SlotBatch:
    """Groups of (token, expert) pairs whose experts are resident.

    Attributes:
        slices: by role, [groups] uint64 address of the first byte of the group's expert's slice.
        group_start: [groups + 1] int32 offsets into `pairs`.
        pairs: [n] int32 flat pair index, token * k + j, by group.
        layer: the layer.
        experts: [groups] int32 the expert of each group, for what kernels keep by expert beside the slices.
    """

    slices: tuple[NDArray[np.uint64], ...]
    group_start: NDArray[np.int32]
    pairs: NDArray[np.int32]
    layer: int
    experts: NDArray[np.int32]


class Fence(Protocol):
    """The end of kernels that were launched; what they read stays pinned until then."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


# Returns None when the kernel has finished, a fence when it was only launched.
ComputeFn = Callable[[SlotBatch], Fence | None]
