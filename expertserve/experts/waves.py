"""Runs one layer in waves: resident experts while the misses are read, then the misses as they come.

Owns the order of reading, pinning and computing within a layer. Invariants: every pair is computed exactly once; what
is being computed is pinned; waiting for the disk happens between calls of the kernel, never inside; experts that
arrived together are computed together, because a call has a fixed cost.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, ExpertReadError
from expertserve.experts.batch import ComputeFn, SlotBatch
from expertserve.experts.grouping import Grouping
from expertserve.experts.kernels import RunningKernels
from expertserve.experts.lookahead import LookAhead
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.stats import ExpertStats
from expertserve.experts.streamer import Purpose
from expertserve.experts.table import LayerTable


class Waves:
    """The waves of a lane's layers, one layer at a time."""

    def __init__(
        self, pool: ReaderPool, stats: ExpertStats, ahead: LookAhead, running: RunningKernels, *, keep_busy: int
    ) -> None:
        """`keep_busy` is how many reads under way a disk needs to run at full speed."""
        self._pool = pool
        self._stats = stats
        self._ahead = ahead
        self._running = running
        self._keep_busy = keep_busy

    def run(
        self,
        table: LayerTable,
        groups: Grouping,
        prefill_rows: int,
        compute: ComputeFn,
        began: float,
    ) -> None:
        """Resident experts while the misses are read, then the misses as they come.

        Args:
            prefill_rows: tokens of the step if it has some of a prompt, else 0.
        """
        counters = self._stats.current
        spent_before = counters.expert_s + counters.stalled_s
        keys = groups.experts + table.first_key
        if prefill_rows:
            table.cache.note_prefill(table.place, keys, groups.counts, prefill_rows)
        else:
            table.cache.note(table.place, keys)
        resident = table.address[0, groups.experts] != 0
        hits = np.flatnonzero(resident)
        table.cache.pin(keys[hits])
        pinned = keys[hits]
        try:
            awaited, missing, below = self._sort_out(table, keys, np.flatnonzero(~resident))
            counters.hits += len(hits) + len(awaited)
            counters.misses += len(missing)
            self._start_reads(table, keys, missing, awaited)
            self._look_ahead(missing)
            if len(hits):
                pinned = pinned[:0]  # the kernel's call lets go of them from here on
                self._compute(table, groups, hits, compute)
            while awaited or missing or below:
                self._start_reads(table, keys, missing, awaited)
                self._look_ahead(missing)
                ready = self._lift(table, keys, below, missing)
                if not len(ready):
                    ready = self._await_reads(table, keys, awaited, missing or below)
                if len(ready):
                    self._compute(table, groups, ready, compute)
        except BaseException:
            table.cache.unpin(pinned)
            raise
        finally:
            spent = counters.expert_s + counters.stalled_s - spent_before
            counters.lane_s += perf_counter() - began - spent

    def _sort_out(
        self, table: LayerTable, keys: NDArray[np.int64], absent: NDArray[np.int64]
    ) -> tuple[dict[Fill, int], deque[int], deque[int]]:
        """Splits absent groups into those already being read, those to read, and those in the host tier."""
        awaited: dict[Fill, int] = {}
        missing: deque[int] = deque()
        below: deque[int] = deque()
        for group in absent.tolist():
            key = int(keys[group])
            fill = table.streamer.filling.get(key)
            if fill is None:
                (below if table.streamer.is_below(key) else missing).append(group)
            else:
                awaited[fill] = group
                self._pool.promote(fill)
        return awaited, missing, below

    def _lift(
        self, table: LayerTable, keys: NDArray[np.int64], below: deque[int], missing: deque[int]
    ) -> NDArray[np.int64]:
        """Brings up as many from the host tier as there are slots for; pins and returns their groups.

        One that a fill has pushed out of the tier meanwhile is missing like any other.
        """
        if below:
            self._running.release()
        counters, lifted = self._stats.current, list[int]()
        while below:
            key = int(keys[below[0]])
            if not table.streamer.is_below(key):
                missing.append(below.popleft())
                counters.misses += 1
            elif table.streamer.lift(key):
                lifted.append(below.popleft())
                table.cache.pin(keys[lifted[-1:]])
            else:
                break
        counters.hits += len(lifted)
        counters.lifted += len(lifted)
        return np.sort(np.array(lifted, np.int64))

    def _start_reads(
        self, table: LayerTable, keys: NDArray[np.int64], missing: deque[int], awaited: dict[Fill, int]
    ) -> None:
        """Starts as many of the missing as there are slots for.

        Beyond what keeps the disk busy, only experts that are needed later give way: a wide batch reads through the
        slots its own experts leave, and what decode uses stays.
        """
        if missing:
            self._running.release()
        while missing:
            spare = len(awaited) >= self._keep_busy
            fill = table.streamer.begin(int(keys[missing[0]]), Purpose.DEMAND, spare_sooner=spare)
            if fill is None:
                return
            awaited[fill] = missing.popleft()

    def _look_ahead(self, missing: deque[int]) -> None:
        """Starts guesses once all demand is under way."""
        if self._ahead.asked and not missing:
            self._ahead.issue()

    def _drain(self, awaited: dict[Fill, int]) -> None:
        """Lets the reads that the layer still waits for end, whatever comes of them."""
        while awaited and self._pool.in_flight:
            for fill in self._pool.collect(wait=True):
                fill.settle(fill)
                awaited.pop(fill, None)

    def _await_reads(
        self, table: LayerTable, keys: NDArray[np.int64], awaited: dict[Fill, int], missing: deque[int]
    ) -> NDArray[np.int64]:
        """Waits until a read ends or a slot comes free; pins and returns the groups that are ready."""
        if not self._pool.in_flight:
            self._free_a_slot(table, missing)
            return np.zeros(0, np.int64)
        began = perf_counter()
        fills = self._pool.collect(wait=True)
        self._stats.current.stalled_s += perf_counter() - began
        ready: list[int] = []
        failure: ExpertReadError | None = None
        for fill in fills:
            error = fill.settle(fill)
            group = awaited.pop(fill, None)
            if group is not None and error is None:
                ready.append(group)
            elif group is not None:
                failure = failure or error
        if failure is not None:
            self._drain(awaited)  # or a later step would wait for reads that were begun in this one, and fail with them
            raise failure
        groups = np.sort(np.array(ready, np.int64))
        table.cache.pin(keys[groups])
        return groups

    def _free_a_slot(self, table: LayerTable, missing: deque[int]) -> None:
        """Nothing is being read and no slot is to be had: only a kernel still running can give one back."""
        if not self._running:
            self._stats.current.exhausted += len(missing)
            raise CapacityError(
                f"layer {table.layer}: {len(missing)} experts and no unpinned slot among {table.cache.slot_count}; "
                "raise --expert-cache"
            )
        self._running.release(wait=True)

    def _compute(self, table: LayerTable, groups: Grouping, which: NDArray[np.int64], compute: ComputeFn) -> None:
        """Runs the kernel over pinned groups and lets go of them when it has finished."""
        counters = self._stats.current
        experts = groups.experts[which]
        keys = experts + table.first_key
        start, pairs = groups.subset(which)
        slices = tuple(table.address.take(experts, axis=1))
        batch = SlotBatch(slices, start, pairs, table.layer, experts.astype(np.int32))
        began = perf_counter()
        try:
            fence = compute(batch)
        except BaseException:
            table.cache.unpin(keys)
            raise
        counters.expert_s += perf_counter() - began
        counters.computes += 1
        if fence is not None:
            self._running.add(fence, table.cache, keys)
        else:
            table.cache.unpin(keys)
