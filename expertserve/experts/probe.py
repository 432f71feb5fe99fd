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

from expertserve.experts.reader import FileReader

_MOST_BYTES = 256 << 20


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


def disk_rate(reader: FileReader, nbytes: int, threads: int, seconds: float = 1.0) -> float | None:
    """Bytes a second of reads of `nbytes`, as those of experts are, at random places of a model's largest file.

    None where too little of the file is there, where reads do not go through a descriptor or where one fails.
    """
    sizes = [os.fstat(descriptor).st_size for descriptor in reader.disk.descriptors]
    align = max(reader.align, mmap.PAGESIZE)
    read_bytes = -(-nbytes // align) * align
    if not sizes or max(sizes) < read_bytes + align or not hasattr(os, "preadv"):
        return None
    index = int(np.argmax(sizes))
    try:
        return read_rate(
            reader.disk.descriptors[index],
            sizes[index],
            read_bytes=read_bytes,
            align=align,
            threads=threads,
            seconds=seconds,
            most_bytes=_MOST_BYTES,
        )
    except OSError:
        return None
