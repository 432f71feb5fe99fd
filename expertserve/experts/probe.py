"""How fast a file can be read at random places, by a short trial.

Owns the trial only: the caller opens the file in the mode that is judged. Not for what needs a figure to rely on: other
processes and caches take part.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np


def read_rate(
    descriptor: int, nbytes: int, *, read_bytes: int, align: int, threads: int, seconds: float, most_bytes: int
) -> float:
    """Bytes a second of reads at random places.

    Args:
        descriptor: the file.
        nbytes: its length.
        read_bytes: of one read; a multiple of `align`.
        align: what offsets are a multiple of.
        threads: reads under way at once.
        seconds: for about how long; each thread reads once at least.
        most_bytes: after how many it ends before that.
    """
    places = max(1, (nbytes - read_bytes) // align)
    each = max(1, most_bytes // read_bytes // threads)
    began = perf_counter()

    def read(seed: int) -> int:
        draws = np.random.default_rng([seed, os.getpid()]).integers(0, places, each) * align
        done = 0
        with mmap.mmap(-1, read_bytes) as buffer:
            for offset in draws.tolist():
                done += os.preadv(descriptor, [buffer], offset)
                if perf_counter() - began >= seconds:
                    break
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, range(threads)))
    return done / max(perf_counter() - began, 1e-9)
