"""Opens the parts of a lane: a reader, a plan, stores, caches, streamers, tables.

Owns the order of construction and its undoing. Everything that can be refused is refused before memory is taken, and
nothing leaks when a later part cannot be made. Invariant: the files that are read are the files whose header was read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ConfigError, ExpertReadError
from expertserve.experts.budget import SlotPlan, least_slots, plan_slots, size_classes, tier_places
from expertserve.experts.cache import ExpertSlotCache
from expertserve.experts.disk import FileDisk
from expertserve.experts.factory import has_host_tier, make_host_tier, make_slot_store, reads_mapped_files
from expertserve.experts.knee import knee_slots
from expertserve.experts.memory import available_memory
from expertserve.experts.pool import ReaderPool
from expertserve.experts.profile import ModelIdentity, load_profile
from expertserve.experts.reader import FileReader, open_reader
from expertserve.experts.stats import ExpertStats
from expertserve.experts.streamer import ExpertStreamer
from expertserve.experts.table import LayerTable
from expertserve.experts.trace import TraceRecorder
from expertserve.experts.unstreamed import UnstreamedTowers
from expertserve.gguf.spans import ExpertTower
from expertserve.values import ExpertBudget


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How a lane streams.

    Attributes:
        device: where the slots are.
        budget: room for slots.
        reader: direct, buffered, mmap or auto.
        threads: reader threads.
        lookahead: on, off, or auto to let it measure itself.
        huge_pages: ask for huge pages behind the slots.
        profile: file that keeps hotness between runs.
        trace: file that records routing.
        forced: serve experts unstreamed, from a mapping of the file, as the page cache has them; the budget is void.
        host_cache: room in host memory for experts that lose their slot on a device.
    """

    device: str = "cpu"
    budget: ExpertBudget = ExpertBudget("auto")
    reader: str = "auto"
    threads: int = 4
    lookahead: Literal["on", "off", "auto"] = "auto"
    huge_pages: bool = True
    profile: Path | None = None
    trace: Path | None = None
    forced: bool = False
    host_cache: ExpertBudget = ExpertBudget("auto")


class ModelFile(Protocol):
    """What the lane needs of an opened model."""

    @property
    def paths(self) -> Sequence[Path]: ...

    def fingerprint(self) -> Sequence[tuple[str, int, int, int]]: ...


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane is made of.

    Attributes:
        warnings: lines for the user.
    """

    plan: SlotPlan
    pool: ReaderPool
    tables: dict[int, LayerTable]
    streamers: tuple[ExpertStreamer, ...]
    identity: ModelIdentity | None
    warnings: tuple[str, ...]
    unstreamed: UnstreamedTowers | None = None
    trace: TraceRecorder | None = None


def plan_lane(
    paths: Sequence[Path],
    towers: Mapping[int, ExpertTower],
    top_k: int,
    settings: LaneSettings,
    *,
    available_bytes: int | None = None,
    hotness: Mapping[int, NDArray[np.float64]] | None = None,
) -> tuple[SlotPlan, FileReader]:
    """Chooses slots and opens the reader they are laid out for; the caller closes the reader.

    Raises:
        CapacityError: the budget is too small, or larger than the memory there is.
    """
    rough = plan_slots(size_classes(towers, 1), settings.budget, top_k, available_bytes=available_bytes)
    cacheable = None if available_bytes is None else available_bytes - rough.arena_bytes
    reader = open_reader(settings.reader, paths, cacheable_bytes=cacheable)
    try:
        classes = size_classes(towers, reader.align)
        plan = plan_slots(classes, settings.budget, top_k, available_bytes=available_bytes)
        if hotness and settings.budget.kind == "auto":
            plan = knee_slots(plan, hotness, top_k)
        return plan, reader
    except BaseException:
        reader.close()
        raise


def open_parts(
    file: ModelFile,
    towers: Mapping[int, ExpertTower],
    top_k: int,
    settings: LaneSettings,
    stats: ExpertStats,
    *,
    available_bytes: int | None = None,
) -> LaneParts:
    """Plans and opens; see `ExpertLane.open`."""
    if settings.forced:
        if not reads_mapped_files(settings.device):
            raise ConfigError(
                "--expert-cache off: this device cannot compute where a file is mapped; give a size or auto"
            )
        least = ExpertBudget("slots", sum(least_slots(size_classes(towers, 1), top_k)))
        settings = replace(settings, budget=least)  # never touched, so no memory
    identity = ModelIdentity.of(towers, [os.path.getsize(path) for path in file.paths])
    hotness: Mapping[int, NDArray[np.float64]] = {}
    warnings: tuple[str, ...] = ()
    if settings.profile is not None:
        hotness, warnings = load_profile(settings.profile, identity)
    plan, reader = plan_lane(file.paths, towers, top_k, settings, available_bytes=available_bytes, hotness=hotness)
    trace = unstreamed = None
    try:
        if isinstance(reader.disk, FileDisk) and not reader.disk.matches(file.fingerprint()):
            raise ExpertReadError(f"{file.paths[0]}: the file changed on disk while it was being loaded; restart")
        if settings.trace is not None:
            trace = TraceRecorder(settings.trace, towers)
        if settings.forced or _serves_mapped(settings, plan):
            unstreamed = UnstreamedTowers(file.paths, towers)
        parts = assemble_parts(plan, reader, settings, stats)
        for layer, known in hotness.items():
            table = parts.tables[layer]
            table.cache.seed(table.place, known, float(known.sum()) / top_k)
    except BaseException:
        for part in (trace, unstreamed, reader):
            if part is not None:
                part.close()
        raise
    return replace(parts, identity=identity, warnings=warnings, trace=trace, unstreamed=unstreamed)


def _serves_mapped(settings: LaneSettings, plan: SlotPlan) -> bool:
    """Whether experts are best left where they are: memory holds them all, and the kernels can read a mapped file.

    Copying them into slots would only delay the first answer and hold every byte twice while the page cache has it.
    """
    asked = settings.budget.kind == "auto" and settings.reader == "auto"
    return asked and plan.all_resident and reads_mapped_files(settings.device)


def assemble_parts(plan: SlotPlan, reader: FileReader, settings: LaneSettings, stats: ExpertStats) -> LaneParts:
    """Builds the parts of a plan; takes the reader over, also when it fails."""
    tables: dict[int, LayerTable] = {}
    streamers: list[ExpertStreamer] = []
    with ExitStack() as undo:
        undo.callback(reader.close)
        pool = ReaderPool(reader, settings.threads)
        undo.pop_all()
        undo.callback(pool.close)
        places = _tier_places(plan, settings)
        for group, slot_count in zip(plan.classes, plan.slots, strict=True):
            store = make_slot_store(
                settings.device, slot_count, group.layout.slot_bytes, huge_pages=settings.huge_pages
            )
            undo.callback(store.close)
            uids = [(tower.uid, tower.num_experts) for tower in group.towers]
            cache = ExpertSlotCache(uids, slot_count)
            tier = make_host_tier(store, places[len(streamers)], cache.hotness)
            streamer = ExpertStreamer(group.towers, group.layout, store, cache, pool, stats, tier)
            streamers.append(streamer)
            tables.update((tower.layer, LayerTable.of(tower, streamer)) for tower in group.towers)
        undo.pop_all()
    return LaneParts(plan, pool, tables, tuple(streamers), None, ())


def _tier_places(plan: SlotPlan, settings: LaneSettings) -> tuple[int, ...]:
    """Experts of each class that the host holds behind the slots."""
    if not has_host_tier(settings.device):
        return (0,) * len(plan.classes)
    memory = available_memory()
    return tier_places(plan, settings.host_cache, memory.nbytes - memory.reserve_bytes)


def _about_tiers(streamers: Sequence[ExpertStreamer]) -> dict[str, int]:
    """What the ON line says of host tiers, where there are any."""
    places = sum(streamer.tier.places for streamer in streamers if streamer.tier is not None)
    return {"host_slots": places} if places else {}


def announce(stats: ExpertStats, parts: LaneParts, settings: LaneSettings) -> None:
    """The ON line of a lane, and which read mode is in force."""
    unstreamed = "forced" if settings.forced else "mapped"
    stats.read_mode = parts.pool.reader.mode if parts.unstreamed is None else unstreamed
    stats.announce(
        slots=parts.plan.total_slots,
        slot_bytes=max(group.layout.slot_bytes for group in parts.plan.classes),
        resident_bytes=sum(streamer.store.resident_bytes for streamer in parts.streamers),
        classes=len(parts.plan.classes),
        mode=stats.read_mode,
        io_threads=settings.threads,
        **_about_tiers(parts.streamers),
    )


def inert_settings(settings: LaneSettings, plan: SlotPlan, *, mapped: bool = False) -> tuple[str, ...]:
    """Settings that have no effect in the mode in force, each as a line for the user."""
    lines = []
    if settings.forced:
        lines.append("experts are served unstreamed: reader, io-threads, lookahead and profile have no effect")
    elif plan.all_resident:
        if settings.lookahead == "on" and settings.trace is None:
            lines.append("--lookahead on has no effect: every expert has a slot")
        if settings.profile is not None and mapped:
            lines.append("--profile has no effect: every expert is resident, served from the mapped file")
        elif settings.profile is not None:
            lines.append("--profile starts nothing warmer: every expert has a slot and is loaded at start")
    return tuple(lines)
