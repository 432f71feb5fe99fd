"""How fast threads read memory: the bound of what computes with weights once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_PROBE_BYTES = 256 << 20


def memory_rate(threads: int) -> float:
    """Bytes a second at which threads read memory that no cache holds."""
    blocks = np.array_split(np.ones(_PROBE_BYTES // 8, np.int64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, blocks))
            best = max(best, _PROBE_BYTES / (time.perf_counter() - began))
    return best
