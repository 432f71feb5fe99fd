"""Kernels that were launched and have not finished, and what they read.

Owns the pins of launched kernels: an expert stays in its slot until the kernel that reads it has finished, not until it
was launched. Invariant: every pin handed over is let go of exactly once, in the order of launching.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.batch import Fence
from expertserve.experts.cache import ExpertSlotCache


class RunningKernels:
    """Launched kernels, oldest first; true while there are any."""

    def __init__(self) -> None:
        self._launched: deque[tuple[Fence, ExpertSlotCache, NDArray[np.int64]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._launched)

    def add(self, fence: Fence, cache: ExpertSlotCache, keys: NDArray[np.int64]) -> None:
        """Takes over the pins of `keys` until `fence` is done."""
        self._launched.append((fence, cache, keys))

    def release(self, *, wait: bool = False) -> None:
        """Lets go of what finished kernels read; with `wait`, at least of the oldest."""
        while self._launched:
            fence, cache, keys = self._launched[0]
            if not fence.done():
                if not wait:
                    return
                fence.wait()
            wait = False
            self._launched.popleft()
            cache.unpin(keys)

    def wait_all(self) -> None:
        while self._launched:
            self.release(wait=True)
