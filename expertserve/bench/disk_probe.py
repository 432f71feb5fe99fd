"""How fast experts come from the file: a short trial with the reader threads, spans and sizes of serving.

Owns the trial. It reads experts at random past the page cache where the file system lets it; elsewhere the kernel is
asked to drop what it holds of the files first, and the answer says so. What a host or a drive keeps in caches of its
own cannot be seen from here; so each expert is read twice: decode misses what it read before, a cold start does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from expertserve.bench.costs import DiskCosts
from expertserve.bench.page_cache import forget
from expertserve.experts.budget import size_classes
from expertserve.experts.disk import direct_alignment
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.reader import SliceReads, open_reader
from expertserve.experts.store import HostExpertSlotStore
from expertserve.models.model import Model

_MANY = 16  # experts under way at once, beside one
_MOST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DiskTrial:
    """What a trial found; `how` says what was read and past which caches.

    Attributes:
        costs: of experts that were read a moment ago.
        first_bandwidth: bytes a second of their first reading.
    """

    costs: DiskCosts
    first_bandwidth: float
    how: str


def try_disk(model: Model, threads: int) -> DiskTrial | None:
    """Reads experts of the largest size class; None where too few of them are in the files yet."""
    paths = model.file.paths
    direct = direct_alignment(paths) is not None
    reader = open_reader("direct" if direct else "buffered", paths)
    with ExitStack() as opened:
        pool = ReaderPool(reader, threads)
        opened.callback(pool.close)
        group = max(size_classes(model.towers, reader.align), key=lambda group: group.layout.slot_bytes)
        present = [path.stat().st_size for path in paths]
        here = [
            (tower, expert)
            for tower in group.towers
            for expert in range(tower.num_experts)
            if all(
                (span := tower.span(expert, role)).offset + span.nbytes <= present[span.file_index]
                for role in range(len(tower.slices))
            )
        ]
        if len(here) < 2 * _MANY:
            return None
        if not direct:
            forget(paths)
        draws = np.random.default_rng([os.getpid()]).permutation(len(here))
        rounds = max(1, min(len(here), _MOST_BYTES // group.layout.slot_bytes) // (_MANY + 1))
        roles = range(len(group.layout.offsets))
        experts = [
            SliceReads([here[i][0].span(here[i][1], role) for role in roles], group.layout, reader)
            for i in draws[: rounds * (_MANY + 1)].tolist()
        ]
        store = HostExpertSlotStore(_MANY, group.layout.slot_bytes)
        opened.callback(store.close)
        opened.callback(pool.close)  # before the slots that its threads write to
        buffers = [store.slot_for_write(slot) for slot in range(_MANY)]
        nbytes = group.layout.expert_bytes
        _, first = _time_reads(pool, experts, buffers)
        one, many = _time_reads(pool, experts, buffers)
    each_s = max(1e-9, (many - one) / (_MANY - 1))
    costs = DiskCosts(nbytes / each_s, max(0.0, one - each_s), threads, len(roles), nbytes)
    return DiskTrial(costs, _MANY * nbytes / first, _how(len(roles), nbytes, threads, direct=direct))


def _time_reads(pool: ReaderPool, experts: Sequence[SliceReads], buffers: Sequence[memoryview]) -> tuple[float, float]:
    """Median seconds until one expert, and until as many as there are buffers, asked for at once, have arrived."""
    width = len(buffers) + 1
    rounds = [experts[at : at + width] for at in range(0, len(experts), width)]
    one = median(_time_batch(pool, batch[:1], buffers) for batch in rounds)
    return one, median(_time_batch(pool, batch[1:], buffers) for batch in rounds)


def _time_batch(pool: ReaderPool, experts: Sequence[SliceReads], buffers: Sequence[memoryview]) -> float:
    began = perf_counter()
    for number, (reads, buffer) in enumerate(zip(experts, buffers, strict=False)):
        pool.submit(Fill(number, number, reads, lambda fill: None), buffer, urgent=True)
    while pool.in_flight:
        for fill in pool.collect(wait=True):
            if fill.error is not None:
                raise fill.error
    return perf_counter() - began


def _how(slices: int, nbytes: int, threads: int, *, direct: bool) -> str:
    size = f"experts of {nbytes} bytes in {slices} reads, {threads} at once"
    if direct:
        return f"{size}, past the page cache (O_DIRECT)"
    return f"{size}, through the page cache, which was asked to drop the file: it may have kept some"
