"""How fast experts come from the file: a trial with the reader threads, spans and sizes of serving.

Owns the trial: some experts of the largest size class are read at random, one alone and many at once in turn, the way
of the pool's reader, past the page cache or through it. The disk of a shared machine may give twice as much in one
second as in the next, so a trial is taken in parts that its caller spreads over what else it measures. Rates are means
of a part, since a step waits for slow reads too, and the median of parts. What a host or a drive keeps in caches of its
own cannot be seen from here; so the first reading is told from the others: decode misses what it read before, a cold
start does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

from expertserve.experts.budget import SizeClass, size_classes
from expertserve.experts.disk import direct_alignment
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.reader import SliceReads, open_reader
from expertserve.experts.store import HostExpertSlotStore
from expertserve.gguf.spans import ExpertTower

_ALONE = 4  # experts of a round that are read one by one
_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 16
_BUFFER_BYTES = 64 << 20
_MOST_BYTES = 512 << 20  # of the experts that take part


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What a trial found of its experts' readings.

    Attributes:
        bandwidth: bytes a second of all reads together, once they are under way.
        latency_s: of an expert's reads before their bytes come.
        slowest, fastest: the bandwidth of single parts of the trial.
        first: bytes a second of experts read for the first time.
    """

    bandwidth: float
    latency_s: float
    slowest: float
    fastest: float
    first: float


@dataclass(frozen=True, slots=True)
class TrialPart:
    """Seconds until one expert, and until `at_once` experts asked for together, had arrived."""

    alone: Sequence[float]
    many: Sequence[float]


def disk_rate(parts: Sequence[TrialPart], at_once: int, expert_bytes: int) -> DiskRate:
    """What a trial's parts say: the first, of first readings, and at least one more."""
    first, again = parts[0], parts[1:]
    each = [_each_s(mean(part.alone), mean(part.many), at_once) for part in again]
    return DiskRate(
        bandwidth=expert_bytes / median(each),
        latency_s=max(0.0, median(mean(part.alone) for part in again) - median(each)),
        slowest=expert_bytes / max(each),
        fastest=expert_bytes / min(each),
        first=at_once * expert_bytes / mean(first.many),
    )


def _each_s(alone: float, many: float, at_once: int) -> float:
    """Seconds that each further expert takes; no less than half of what each took among many, if one alone was slow."""
    return max((many - alone) / (at_once - 1), many / at_once / 2)


class DiskTrial:
    """Reads experts through a pool that is idle.

    Attributes:
        expert_bytes: of each expert.
        reads: of each expert.
    """

    def __init__(self, group: SizeClass, pool: ReaderPool, store: HostExpertSlotStore, present: Sequence[int]) -> None:
        """Chooses the experts.

        Args:
            group: whose experts are read.
            pool: what reads them.
            store: slots of the group's size to read into; at most as many are read at once.
            present: bytes that are there of each file.

        Raises:
            ValueError: hardly an expert is in the files.
        """
        self.expert_bytes, self.reads = group.layout.expert_bytes, len(group.layout.offsets)
        self._pool = pool
        each = (
            [tower.span(expert, role) for role in range(self.reads)]
            for tower in group.towers
            for expert in range(tower.num_experts)
        )
        here = [spans for spans in each if all(s.offset + s.nbytes <= present[s.file_index] for s in spans)]
        at_once = min(store.slot_count, len(here) - _ALONE)
        if at_once < 2:
            raise ValueError(f"{len(here)} experts are in the files, too few for a trial")
        self._buffers = [store.slot_for_write(slot) for slot in range(at_once)]
        width = _ALONE + at_once
        rounds = min(len(here), max(width, _MOST_BYTES // group.layout.slot_bytes)) // width
        draws = np.random.default_rng([os.getpid()]).permutation(len(here))[: rounds * width]
        experts = [SliceReads(here[i], group.layout, pool.reader) for i in draws.tolist()]
        self._rounds = [experts[at : at + width] for at in range(0, len(experts), width)]
        self._parts: list[TrialPart] = []

    def take(self, seconds: float = 1.0) -> None:
        """Reads each expert once, or as many as come within about so long; later those of the first time.

        Raises:
            ExpertReadError: a read failed.
        """
        until = perf_counter() + seconds
        alone: list[float] = []
        many: list[float] = []
        for experts in self._rounds:
            alone += [self._time([expert]) for expert in experts[:_ALONE]]
            many.append(self._time(experts[_ALONE:]))
            if perf_counter() >= until:
                break
        if not self._parts:
            self._rounds = self._rounds[: len(many)]
        self._parts.append(TrialPart(alone, many))

    def rate(self) -> DiskRate:
        """What was found; for two parts at the least."""
        return disk_rate(self._parts, len(self._buffers), self.expert_bytes)

    def _time(self, experts: Sequence[SliceReads]) -> float:
        began = perf_counter()
        for number, (reads, buffer) in enumerate(zip(experts, self._buffers, strict=False)):
            self._pool.submit(Fill(number, number, reads, lambda fill: None), buffer, urgent=True)
        failed: list[BaseException] = []
        while self._pool.in_flight:  # also after a failure: the others still write to the buffers
            failed += [fill.error for fill in self._pool.collect(wait=True) if fill.error is not None]
        if failed:
            raise failed[0]
        return perf_counter() - began


@contextmanager
def trial_with(pool: ReaderPool, classes: Sequence[SizeClass]) -> Iterator[DiskTrial | None]:
    """A trial by a pool's threads; None where too few of the experts are in the files yet."""
    group = max(classes, key=lambda group: group.layout.slot_bytes)
    at_once = max(_LEAST_AT_ONCE, min(_MOST_AT_ONCE, _BUFFER_BYTES // group.layout.slot_bytes))
    store = HostExpertSlotStore(at_once, group.layout.slot_bytes)
    try:
        present = [os.fstat(descriptor).st_size for descriptor in pool.reader.disk.descriptors]
        try:
            trial = DiskTrial(group, pool, store, present)
        except ValueError:
            trial = None
        yield trial
    finally:
        store.close()


@contextmanager
def open_trial(
    towers: Mapping[int, ExpertTower], paths: Sequence[Path], threads: int
) -> Iterator[tuple[DiskTrial | None, str]]:
    """A trial with threads of its own, and how it reads: past the page cache where the file system lets it.

    Raises:
        ExpertReadError: a file cannot be opened.
    """
    reader = open_reader("direct" if direct_alignment(paths) is not None else "buffered", paths)
    with ExitStack() as opened:
        pool = ReaderPool(reader, threads)
        opened.callback(pool.close)
        trial = opened.enter_context(trial_with(pool, size_classes(towers, reader.align)))
        opened.callback(pool.close)  # before the slots that its threads write to
        yield trial, reader.mode
