"""Preloads experts into free slots, in file order at the disk's full speed.

Owns the order and the number of reads under way. It evicts nobody and stops when asked, so that a first request waits
for no more than the reads that have begun. Invariant: what was begun has ended when `preload` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

import numpy as np

from expertserve.experts.pool import ReaderPool
from expertserve.experts.stats import ExpertStats
from expertserve.experts.streamer import ExpertStreamer, Purpose
from expertserve.experts.table import LayerTable

Progress = Callable[[int, int], None]  # experts done, experts in all


def hottest_keys(streamer: ExpertStreamer) -> list[int]:
    """Keys of the hottest experts that the free slots have room for, in file order; never those of no hotness."""
    cache = streamer.cache
    absent = np.flatnonzero((cache.slot_of < 0) & (cache.hotness > 0))
    order = np.argsort(-cache.hotness[absent], kind="stable")[: cache.free_count]
    return sorted(absent[order].tolist())


def absent_keys(streamer: ExpertStreamer) -> list[int]:
    """Keys that are not resident, in file order, as far as the free slots go."""
    cache = streamer.cache
    return np.flatnonzero(cache.slot_of < 0)[: cache.free_count].tolist()  # type: ignore[no-any-return]


def file_order(
    keys: Mapping[ExpertStreamer, Iterable[int]], tables: Iterable[LayerTable]
) -> list[tuple[ExpertStreamer, int]]:
    """The keys of several size classes as they lie in the file: by layer, then expert."""
    layers = sorted(tables, key=lambda table: table.layer)
    wanted = {streamer: set(of) for streamer, of in keys.items()}
    return [
        (table.streamer, key)
        for table in layers
        for key in range(table.keys.start, table.keys.stop)
        if key in wanted.get(table.streamer, ())
    ]


def preload(
    wanted: list[tuple[ExpertStreamer, int]],
    pool: ReaderPool,
    stats: ExpertStats,
    *,
    depth: int,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> int:
    """Reads the wanted experts; returns how many were read.

    Args:
        wanted: in the order of reading.
        depth: experts under way at once, at most; fewer where a store has fewer write buffers.
        progress: called as experts arrive.
        should_stop: looked at as experts arrive; True ends the preload early.

    Raises:
        ExpertReadError: one of them could not be read.
    """
    began, busy = perf_counter(), pool.busy_s
    done, failure = 0, None
    queue = iter(wanted)
    more = True
    depth = min([depth, *(streamer.store.write_depth for streamer, _ in wanted)])
    while more or pool.in_flight:
        while more and pool.in_flight < depth:
            streamer, key = next(queue, (None, 0))
            more = streamer is not None and streamer.begin(key, Purpose.PRELOAD) is not None
        if not pool.in_flight:
            break
        for fill in pool.collect(wait=True):
            error = fill.settle(fill)
            failure = failure or error
            done += 1
        if progress is not None:
            progress(done, len(wanted))
        more = more and failure is None and not (should_stop is not None and should_stop())
    stats.current.wall_s += perf_counter() - began
    stats.current.reading_s += pool.busy_s - busy
    if failure is not None:
        raise failure
    return done
