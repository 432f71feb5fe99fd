"""The lane: what a model's forward talks to.

Owns stores, caches, streamers, readers and the clock for the life of a loaded model; knows neither shapes nor
kernels. A layer's resident experts are computed while its misses are read, then the misses as they come, in as many
waves as the slots force. Invariants: every pair is computed exactly once, only from experts read in full; what a
kernel reads is pinned until it has finished; waiting for the disk happens outside the kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, ExpertReadError
from expertserve.experts.batch import ComputeFn, Fence, SlotBatch
from expertserve.experts.budget import SlotPlan, plan_slots, size_classes
from expertserve.experts.cache import DEFAULT_DECAY, ExpertSlotCache
from expertserve.experts.disk import FileDisk
from expertserve.experts.factory import make_slot_store
from expertserve.experts.grouping import Grouping, group_pairs
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.reader import FileReader, open_reader
from expertserve.experts.stats import ExpertStats
from expertserve.experts.step import Step, StepClock, StepRows
from expertserve.experts.store import ExpertSlotStore
from expertserve.experts.streamer import ExpertStreamer, Purpose
from expertserve.gguf.spans import ExpertTower
from expertserve.values import ExpertBudget


@dataclass(frozen=True, slots=True)
class LayerTable:
    """One layer's window on its size class.

    Attributes:
        first_key: key of the layer's expert 0.
        address: [roles, experts] uint64, 0 where not resident.
        pins: [experts] int32.
    """

    layer: int
    streamer: ExpertStreamer
    cache: ExpertSlotCache
    first_key: int
    address: NDArray[np.uint64]
    pins: NDArray[np.int32]


def layer_table(tower: ExpertTower, streamer: ExpertStreamer) -> LayerTable:
    """The window of one tower."""
    cache = streamer.cache
    first = cache.key(tower.uid, 0)
    keys = slice(first, first + tower.num_experts)
    return LayerTable(tower.layer, streamer, cache, first, streamer.address[:, keys], cache.pins[keys])


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How a lane streams.

    Attributes:
        device: where the slots are.
        budget: room for slots.
        reader: direct, buffered, mmap or auto.
        threads: reader threads.
        decay: of hotness, per step.
        huge_pages: ask for huge pages behind the slots.
    """

    device: str = "cpu"
    budget: ExpertBudget = ExpertBudget("auto")
    reader: str = "auto"
    threads: int = 4
    decay: float = DEFAULT_DECAY
    huge_pages: bool = True


class ModelFile(Protocol):
    """What the lane needs of an opened model."""

    @property
    def paths(self) -> Sequence[Path]: ...

    def fingerprint(self) -> Sequence[tuple[str, int, int, int]]: ...


class ExpertLane:
    """Experts of one model; the forward's thread alone calls it."""

    def __init__(
        self, tables: Mapping[int, LayerTable], pool: ReaderPool, stats: ExpertStats, settings: LaneSettings
    ) -> None:
        self.clock = StepClock()
        self.stats = stats
        self._tables = dict(tables)
        self.pool = pool
        self.streamers = tuple(dict.fromkeys(table.streamer for table in tables.values()))
        self._fenced: deque[tuple[Fence, LayerTable, NDArray[np.int64]]] = deque()
        self._rows_of_one: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        self._enough_reads = max(8, 2 * settings.threads)
        self._step_began = 0.0
        self._busy_before = 0.0

    @classmethod
    def open(
        cls,
        file: ModelFile,
        towers: Mapping[int, ExpertTower],
        top_k: int,
        settings: LaneSettings,
        stats: ExpertStats,
        *,
        available_bytes: int | None = None,
    ) -> ExpertLane:
        """Opens the lane of a model: readers, slots by size class, tables by layer.

        Args:
            file: the model; its paths and fingerprint are used.
            towers: by layer.
            top_k: experts a token uses in a layer.
            settings: how to stream.
            stats: counters to add to.
            available_bytes: memory left for slots once everything else has its own; None to trust the budget.
        """
        reader = open_reader(settings.reader, file.paths, cacheable_bytes=available_bytes)
        try:
            plan = plan_slots(
                size_classes(towers, reader.align),
                settings.budget,
                top_k,
                available_bytes=available_bytes,
            )
            if isinstance(reader.disk, FileDisk) and not reader.disk.matches(file.fingerprint()):
                raise ExpertReadError(f"{file.paths[0]}: the file changed on disk while it was being loaded; restart")
            return cls.assemble(plan, reader, settings, stats)
        except BaseException:
            reader.close()
            raise

    @classmethod
    def assemble(cls, plan: SlotPlan, reader: FileReader, settings: LaneSettings, stats: ExpertStats) -> ExpertLane:
        """Builds a lane from its parts; takes the reader over."""
        pool = ReaderPool(reader, settings.threads)
        stores: list[ExpertSlotStore] = []
        tables: dict[int, LayerTable] = {}
        try:
            for group, slot_count in zip(plan.classes, plan.slots, strict=True):
                store = make_slot_store(
                    settings.device, slot_count, group.layout.slot_bytes, huge_pages=settings.huge_pages
                )
                stores.append(store)
                cache = ExpertSlotCache(
                    [(tower.uid, tower.num_experts) for tower in group.towers], slot_count, decay=settings.decay
                )
                streamer = ExpertStreamer(group.towers, group.layout, store, cache, pool, stats)
                for tower in group.towers:
                    tables[tower.layer] = layer_table(tower, streamer)
        except BaseException:
            pool.close()
            for store in stores:
                store.close()
            raise
        stats.read_mode = reader.mode
        stats.announce(
            slots=plan.total_slots,
            slot_bytes=max(c.layout.slot_bytes for c in plan.classes),
            resident_bytes=sum(store.resident_bytes for store in stores),
            classes=len(plan.classes),
            mode=reader.mode,
            threads=settings.threads,
        )
        return cls(tables, pool, stats, settings)

    def close(self) -> None:
        """Ends the readers and gives the memory back; the lane is unusable afterwards."""
        self.pool.close()
        for streamer in self.streamers:
            streamer.store.close()

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, *, decode_rows: int, prefill_rows: int, draft: bool = False) -> Step:
        """One forward: `with lane.step(...)`. Leaving it unpins everything and advances the clock exactly once."""
        return Step(self.clock, StepRows(decode_rows, prefill_rows, draft), self._begin_step, self._end_step)

    def _begin_step(self, rows: StepRows) -> None:
        self.stats.enter_phase(rows.decode_rows, rows.prefill_rows)
        self._busy_before = self.pool.busy_s
        self._step_began = perf_counter()

    def _end_step(self, rows: StepRows) -> None:
        while self._fenced:
            self._release_fenced(wait=True)
        for streamer in self.streamers:
            streamer.cache.advance(decay=not rows.draft)
        counters = self.stats.current
        counters.wall_s += perf_counter() - self._step_began
        counters.reading_s += self.pool.busy_s - self._busy_before
        self.stats.leave_phase(draft=rows.draft)

    # -- the layer -------------------------------------------------------------------------------------------------

    def run_layer(self, layer: int, ids: NDArray[np.int32], compute: ComputeFn) -> None:
        """Computes every (token, expert) pair of `ids` [tokens, k] once.

        Calls `compute` one or more times, resident experts first.

        Raises:
            StepError: no step is open.
            ExpertReadError: an expert could not be read; nothing of the layer may be used.
        """
        began = perf_counter()
        self.clock.require_open()
        table = self._tables[layer]
        if self.pool.in_flight:
            self._settle_reads()
        if ids.shape[0] == 1:
            experts = ids[0]
            address = table.address.take(experts, axis=1)
            if 0 not in address[0].tolist():
                self._run_resident(table, experts, address, compute, began)
                return
        self._run_waves(table, group_pairs(ids), compute, began)

    def _run_resident(
        self,
        table: LayerTable,
        experts: NDArray[np.int32],
        address: NDArray[np.uint64],
        compute: ComputeFn,
        began: float,
    ) -> None:
        """One token whose experts are all there: each pair is its own group."""
        counters = self.stats.current
        start, pairs = self._one_row(len(experts))
        keys = experts + np.int64(table.first_key)
        table.cache.touch(keys)
        table.pins[experts] += 1
        computing = perf_counter()
        try:
            fence = compute(SlotBatch(tuple(address), start, pairs, table.layer))
        except BaseException:
            table.cache.unpin(keys)
            raise
        computed = perf_counter()
        if fence is not None:
            self._fenced.append((fence, table, keys))
        else:
            table.pins[experts] -= 1
            if table.cache.parked:
                table.cache.unpark()
        counters.hits += len(experts)
        counters.computes += 1
        counters.expert_s += computed - computing
        counters.lane_s += perf_counter() - began - (computed - computing)

    def _one_row(self, k: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        row = self._rows_of_one.get(k)
        if row is None:
            row = np.arange(k + 1, dtype=np.int32), np.arange(k, dtype=np.int32)
            self._rows_of_one[k] = row
        return row

    def _run_waves(self, table: LayerTable, groups: Grouping, compute: ComputeFn, began: float) -> None:
        """Resident experts while the misses are read, then the misses as they come."""
        counters = self.stats.current
        spent_before = counters.expert_s + counters.stalled_s
        keys = groups.experts + table.first_key
        table.cache.touch(keys)
        resident = table.address[0, groups.experts] != 0
        hits = np.flatnonzero(resident)
        table.cache.pin(keys[hits])
        pinned = keys[hits]
        try:
            awaited, missing = self._sort_out(table, keys, np.flatnonzero(~resident))
            counters.hits += len(hits) + len(awaited)
            counters.misses += len(missing)
            self._start_reads(table, keys, missing, awaited)
            if len(hits):
                pinned = pinned[:0]  # the kernel's call lets go of them from here on
                self._compute(table, groups, hits, compute)
            while awaited or missing:
                self._start_reads(table, keys, missing, awaited)
                ready = self._await_reads(table, keys, awaited, missing)
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
    ) -> tuple[dict[Fill, int], deque[int]]:
        """Splits absent groups into those already being read and those to read."""
        awaited: dict[Fill, int] = {}
        missing: deque[int] = deque()
        for group in absent.tolist():
            fill = table.streamer.filling.get(int(keys[group]))
            if fill is None:
                missing.append(group)
            else:
                awaited[fill] = group
                self.pool.promote(fill)
        return awaited, missing

    def _start_reads(
        self, table: LayerTable, keys: NDArray[np.int64], missing: deque[int], awaited: dict[Fill, int]
    ) -> None:
        """Starts as many of the missing as there are slots for.

        Beyond what keeps the disk busy, only colder experts give way: a wide batch reads through the slots its own
        experts leave, and what decode uses stays.
        """
        if missing and self._fenced:
            self._release_fenced(wait=False)
        while missing:
            spare = len(awaited) >= self._enough_reads
            fill = table.streamer.begin(int(keys[missing[0]]), Purpose.DEMAND, spare_hotter=spare)
            if fill is None:
                return
            awaited[fill] = missing.popleft()

    def _await_reads(
        self, table: LayerTable, keys: NDArray[np.int64], awaited: dict[Fill, int], missing: deque[int]
    ) -> NDArray[np.int64]:
        """Waits until a read ends or a slot comes free; pins and returns the groups that are ready."""
        if not self.pool.in_flight:
            self._free_a_slot(table, missing)
            return np.zeros(0, np.int64)
        began = perf_counter()
        fills = self.pool.collect(wait=True)
        self.stats.current.stalled_s += perf_counter() - began
        ready: list[int] = []
        failure: ExpertReadError | None = None
        for fill in fills:
            error = fill.settle(fill)
            group = awaited.pop(fill, None)
            if group is not None and error is None:
                ready.append(group)
            elif group is not None:
                failure = error
        if failure is not None:
            raise failure
        groups = np.sort(np.array(ready, np.int64))
        table.cache.pin(keys[groups])
        return groups

    def _free_a_slot(self, table: LayerTable, missing: deque[int]) -> None:
        """Nothing is being read and no slot is to be had: only a kernel still running can give one back."""
        if not self._fenced:
            self.stats.current.exhausted += len(missing)
            raise CapacityError(
                f"layer {table.layer}: {len(missing)} experts and no unpinned slot among {table.cache.slot_count}; "
                "raise --expert-cache"
            )
        self._release_fenced(wait=True)

    def _compute(self, table: LayerTable, groups: Grouping, which: NDArray[np.int64], compute: ComputeFn) -> None:
        """Runs the kernel over pinned groups and lets go of them when it has finished."""
        counters = self.stats.current
        experts = groups.experts[which]
        keys = experts + table.first_key
        start, pairs = groups.subset(which)
        batch = SlotBatch(tuple(table.address.take(experts, axis=1)), start, pairs, table.layer)
        began = perf_counter()
        try:
            fence = compute(batch)
        except BaseException:
            table.cache.unpin(keys)
            raise
        counters.expert_s += perf_counter() - began
        counters.computes += 1
        if fence is not None:
            self._fenced.append((fence, table, keys))
        else:
            table.cache.unpin(keys)

    def _settle_reads(self) -> None:
        """Publishes what was read in the background; a failure there fails nobody."""
        for fill in self.pool.collect(wait=False):
            fill.settle(fill)

    def _release_fenced(self, *, wait: bool) -> None:
        """Lets go of what finished kernels read; with `wait`, at least of the oldest."""
        while self._fenced:
            fence, table, keys = self._fenced[0]
            if not fence.done():
                if not wait:
                    return
                fence.wait()
            wait = False
            self._fenced.popleft()
            table.cache.unpin(keys)
