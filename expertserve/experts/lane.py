"""The lane: what a model's forward talks to.

Owns stores, caches, streamers, readers and the clock for the life of a loaded model; knows neither shapes nor
kernels. A layer's resident experts are computed while its misses are read, then the misses as they come, in as many
waves as the slots force. Invariants: every pair is computed exactly once, only from experts read in full; what a
kernel reads is pinned until it has finished; waiting for the disk happens outside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ExpertReadError
from expertserve.experts.batch import ComputeFn, SlotBatch
from expertserve.experts.budget import SlotPlan
from expertserve.experts.disk_trial import trial_with
from expertserve.experts.grouping import group_pairs, one_row
from expertserve.experts.kernels import RunningKernels
from expertserve.experts.lookahead import MOST_ROWS, WIDE, LookAhead
from expertserve.experts.opening import (
    LaneParts,
    LaneSettings,
    ModelFile,
    announce,
    assemble_parts,
    inert_settings,
    open_parts,
)
from expertserve.experts.preload import Progress, absent_keys, file_order, hottest_keys, preload
from expertserve.experts.profile import save_profile
from expertserve.experts.reader import FileReader
from expertserve.experts.stats import ExpertStats, write_line
from expertserve.experts.step import Step, StepClock, StepRows
from expertserve.experts.table import LayerTable
from expertserve.experts.waves import Waves
from expertserve.gguf.spans import ExpertTower

_TRIAL_S = 0.3


def _is_decode(rows: StepRows) -> bool:
    return rows.prefill_rows == 0 and 0 < rows.decode_rows <= MOST_ROWS and not rows.draft


class ExpertLane:
    """Experts of one model; the forward's thread alone calls it.

    Attributes:
        clock: counts steps.
        stats: counters of every lane that shares them.
        plan: slots by size class.
        wants_guesses: the forward should say, with `look_ahead`, what the next layer will likely choose.
        warnings: lines for the user from opening: an unusable profile, settings without effect.
    """

    def __init__(self, parts: LaneParts, settings: LaneSettings, stats: ExpertStats) -> None:
        """Takes the parts over; use `open`."""
        self.clock = StepClock()
        self.stats = stats
        self.plan = parts.plan
        self.pool = parts.pool
        self.streamers = parts.streamers
        self.wants_guesses = False
        self.warnings = (*parts.warnings, *inert_settings(settings, parts.plan, mapped=parts.unstreamed is not None))
        self._settings = settings
        self._tables = parts.tables
        self._identity = parts.identity
        self._unstreamed = parts.unstreamed
        self._trace = parts.trace
        self._guesses = not parts.plan.all_resident and settings.lookahead != "off" and parts.unstreamed is None
        self._notes_guesses = parts.trace is not None and settings.lookahead == "on"
        self._ahead = LookAhead(settings.lookahead if self._guesses else "off", stats)
        self._running = RunningKernels()
        self._waves = Waves(self.pool, stats, self._ahead, self._running, keep_busy=max(8, 2 * settings.threads))
        self._files = {part.file_index for table in self._tables.values() for part in table.tower.slices}
        self._files_checked = False  # in this step
        self._prefill = False  # this step has rows of a prompt
        self._step_began = 0.0
        self._closed = False
        self._busy_before = 0.0
        announce(stats, parts, settings)

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
        """Opens the lane of a model: reader, slots by size class, tables by layer.

        Args:
            file: the model; its paths and fingerprint are used.
            towers: by layer.
            top_k: experts a token uses in a layer.
            settings: how to stream.
            stats: counters to add to.
            available_bytes: memory left for slots once everything else has its own; None to trust the budget.

        Raises:
            CapacityError: the budget is under one layer's top-k, or over the memory there is.
            ExpertReadError: a file cannot be read or is not the one whose header was read.
        """
        return cls(open_parts(file, towers, top_k, settings, stats, available_bytes=available_bytes), settings, stats)

    @classmethod
    def assemble(cls, plan: SlotPlan, reader: FileReader, settings: LaneSettings, stats: ExpertStats) -> ExpertLane:
        """A lane over a reader of the caller's, which it takes over; no profile."""
        return cls(assemble_parts(plan, reader, settings, stats), settings, stats)

    def warm_up(self, progress: Progress | None = None, should_stop: Callable[[], bool] | None = None) -> int:
        """Preloads what the slots have room for: every expert where all fit, else the profile's hottest.

        Args:
            progress: called with (experts done, experts in all).
            should_stop: asked as experts arrive; True ends it early, as when a request came.

        Returns:
            How many experts were read.
        """
        if self._unstreamed is not None:
            self._unstreamed.read_ahead()
            return 0
        choose = absent_keys if self.plan.all_resident else hottest_keys
        wanted = file_order({streamer: choose(streamer) for streamer in self.streamers}, self._tables.values())
        depth = 4 * self._settings.threads
        return preload(wanted, self.pool, self.stats, depth=depth, progress=progress, should_stop=should_stop)

    def disk_rate(self) -> float | None:
        """Bytes a second at which its threads could read experts, by a short trial; None where none is read any more or
        nothing can be said. For a lane that is idle."""
        if self._unstreamed is not None or self.plan.all_resident:
            return None
        try:
            with trial_with(self.pool, self.plan.classes) as trial:
                if trial is None:
                    return None
                trial.take(_TRIAL_S)
                trial.take(_TRIAL_S)
        except ExpertReadError:
            return None
        return trial.rate().bandwidth

    def save_profile(self) -> str | None:
        """Saves hotness to the profile, if there is one and anything ran; returns a warning where that failed."""
        path, identity = self._settings.profile, self._identity
        if path is None or identity is None or self.clock.steps == 0 or self._unstreamed is not None:
            return None
        hotness = {layer: table.cache.hotness[table.keys].astype(np.float64) for layer, table in self._tables.items()}
        return save_profile(path, identity, hotness)

    def heat(self) -> dict[int, tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        """Hotness of each expert and whether it is resident, by layer. From any thread: a reading may be a step old."""
        if self._unstreamed is not None:
            counts = {layer: table.tower.num_experts for layer, table in self._tables.items()}
            return {layer: (np.zeros(count), np.ones(count, bool)) for layer, count in counts.items()}
        return {
            layer: (table.cache.hotness[table.keys].astype(np.float64), table.address[0] != 0)
            for layer, table in self._tables.items()
        }

    def close(self) -> None:
        """Ends the readers, saves the profile and gives the memory back; idempotent."""
        if self._closed:
            return
        self._closed = True
        warning = self.save_profile()
        if warning is not None:
            write_line(f"warning: {warning}")
        if self._trace is not None:
            self._trace.close()
            if self._trace.warning is not None:
                write_line(f"warning: {self._trace.warning}")
        self.pool.close()
        for streamer in self.streamers:
            streamer.store.close()
        if self._unstreamed is not None:
            self._unstreamed.close()

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, *, decode_rows: int, prefill_rows: int, draft: bool = False) -> Step:
        """One forward: `with lane.step(...)`. Leaving it unpins everything and advances the clock exactly once."""
        return Step(self.clock, StepRows(decode_rows, prefill_rows, draft), self._begin_step, self._end_step)

    def _begin_step(self, rows: StepRows) -> None:
        self.stats.enter_phase(rows.decode_rows, rows.prefill_rows)
        self._prefill = rows.prefill_rows > 0
        self.wants_guesses = _is_decode(rows) and (self._notes_guesses or (self._guesses and self._ahead.trial.active))
        if self._trace is not None:
            self._trace.step(rows)
        self._busy_before = self.pool.busy_s
        self._step_began = perf_counter()

    def _check_mapped_files(self) -> None:
        """A mapped file that was cut short would end the process where it is touched; refuse the step instead."""
        for file_index in self._files:
            self.pool.reader.disk.check_unchanged(file_index)

    def _end_step(self, rows: StepRows) -> None:
        self._running.wait_all()
        if self._guesses:
            self._ahead.settle(None)
        counters = self.stats.current
        wall_s = perf_counter() - self._step_began
        counters.wall_s += wall_s
        counters.reading_s += self.pool.busy_s - self._busy_before
        if self._guesses and _is_decode(rows):
            self._ahead.trial.add(wall_s)
            self.stats.about["lookahead"] = self._ahead.trial.verdict
        self.wants_guesses = False
        self._files_checked = False
        self.stats.leave_phase(draft=rows.draft)

    # -- the layer -------------------------------------------------------------------------------------------------

    def look_ahead(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Says which experts a later layer will likely choose, before the layer in between is run; see `wants_guesses`.

        They are read while the disk is idle, and forgotten if that layer is not the next to run.
        """
        self.clock.require_open()
        if not self.wants_guesses:
            return
        if self._trace is not None:
            self._trace.guess(layer, ids)
        if self._guesses:
            self._ahead.ask(self._tables[layer], ids)

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
        if self._trace is not None:
            self._trace.layer(layer, ids)
        if self._unstreamed is not None:
            if not self._files_checked:
                self._check_mapped_files()
                self._files_checked = True
            self._run_unstreamed(self._unstreamed.address[layer], table, ids, compute)
            return
        if self.pool.in_flight:
            for fill in self.pool.collect(wait=False):
                fill.settle(fill)  # read in the background; a failure there fails nobody
        if self._ahead.pending:
            self._ahead.settle(ids.ravel() + np.int64(table.first_key) if self._ahead.is_for(table) else None)
        if ids.shape[0] == 1:
            experts = ids[0]
            address = table.address.take(experts, axis=1)
            if 0 not in address[0].tolist():
                self._run_resident(table, experts, address, compute, began)
                return
        groups = group_pairs(ids)
        following = self._tables.get(layer + 1)
        if self._guesses and following is not None and ids.size >= WIDE * following.tower.num_experts:
            self._ahead.ask_all(following)
        self._waves.run(table, groups, len(ids) if self._prefill else 0, compute, began)

    def _run_unstreamed(
        self, address: NDArray[np.uint64], table: LayerTable, ids: NDArray[np.int32], compute: ComputeFn
    ) -> None:
        """Experts are computed where the file is mapped: one call, all of them hits unless that was forced."""
        groups = group_pairs(ids)
        began = perf_counter()
        slices, experts = tuple(address.take(groups.experts, axis=1)), groups.experts.astype(np.int32)
        fence = compute(SlotBatch(slices, groups.group_start, groups.pairs, table.layer, experts))
        if fence is not None:
            fence.wait()
        counters = self.stats.current
        counters.expert_s += perf_counter() - began
        counters.computes += 1
        if self._settings.forced:
            counters.forced += len(groups.experts)
        else:
            counters.hits += len(groups.experts)

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
        start, pairs = one_row(len(experts))
        keys = experts + np.int64(table.first_key)
        table.cache.note(table.place, keys)
        table.pins[experts] += 1
        if self._ahead.asked:
            self._ahead.issue()
        computing = perf_counter()
        try:
            fence = compute(SlotBatch(tuple(address), start, pairs, table.layer, experts))
        except BaseException:
            table.cache.unpin(keys)
            raise
        computed = perf_counter()
        if fence is not None:
            self._running.add(fence, table.cache, keys)
        else:
            table.pins[experts] -= 1
        counters.hits += len(experts)
        counters.computes += 1
        counters.expert_s += computed - computing
        counters.lane_s += perf_counter() - began - (computed - computing)
