"""The streamer: makes experts of one size class resident: asks the cache, has the file read, fills the store.

Owns the address table a kernel dereferences: address[role, key] is where an expert's slice lies, 0 while it is not
resident. Does not decide when to read or whom to pin. Invariant: an address is published only after every slice was
read in full and the slot was committed, and it is withdrawn before the slot is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ExpertReadError
from expertserve.experts.cache import ExpertSlotCache
from expertserve.experts.host_tier import HostTier
from expertserve.experts.layout import SlotLayout
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.reader import SliceReads
from expertserve.experts.stats import ExpertStats
from expertserve.experts.store import ExpertSlotStore
from expertserve.gguf.spans import ExpertTower


class Purpose(Enum):
    """Why an expert is read."""

    DEMAND = "demand"
    LOOK_AHEAD = "look-ahead"
    PRELOAD = "preload"


class ExpertStreamer:
    """Fills of one size class.

    Attributes:
        address: [roles, keys] uint64.
        filling: fills under way, by key.
        tier: where evicted experts go and come back from, or None.
    """

    def __init__(
        self,
        towers: Sequence[ExpertTower],
        layout: SlotLayout,
        store: ExpertSlotStore,
        cache: ExpertSlotCache,
        pool: ReaderPool,
        stats: ExpertStats,
        tier: HostTier | None = None,
    ) -> None:
        self.layout = layout
        self.store = store
        self.cache = cache
        self.address: NDArray[np.uint64] = np.zeros((len(layout.slice_bytes), cache.num_keys), np.uint64)
        self.filling: dict[int, Fill] = {}
        self.tier = tier
        self._pool = pool
        self._stats = stats
        self._purpose: dict[int, Purpose] = {}
        self._where = [(tower, expert) for tower in towers for expert in range(tower.num_experts)]
        self._reads: list[SliceReads | None] = [None] * cache.num_keys  # made when first read

    def begin(self, key: int, purpose: Purpose, *, spare_sooner: bool = False) -> Fill | None:
        """Starts reading an expert; None when no slot or no write buffer is to be had now (see `begin_fill`)."""
        if len(self.filling) >= self.store.write_depth:
            return None
        place = self.cache.begin_fill(key, spare_sooner=spare_sooner)
        if place is None:
            return None
        if place.evicted is not None:
            self._withdraw(place.evicted)
            if self.tier is not None:
                self._stats.current.kept += self.tier.keep(place.evicted, place.slot)
        try:
            buffer = self.store.slot_for_write(place.slot)
        except BaseException:
            self.cache.invalidate(key)
            raise
        fill = Fill(key, place.slot, self._reads_of(key), self.settle)
        self.filling[key] = fill
        self._purpose[key] = purpose
        self._pool.submit(fill, buffer, urgent=purpose is not Purpose.LOOK_AHEAD)
        return fill

    def is_below(self, key: int) -> bool:
        """Whether an expert lies in the host tier."""
        return self.tier is not None and key in self.tier

    def lift(self, key: int) -> bool:
        """Makes an expert of the host tier resident without a read; False when no slot is to be had now."""
        assert self.tier is not None
        place = self.cache.begin_fill(key)
        if place is None:
            return False
        if place.evicted is not None:
            self._withdraw(place.evicted)
        self._stats.current.kept += self.tier.lift(key, place.slot, place.evicted)
        self._publish(key, place.slot)
        return True

    def _withdraw(self, key: int) -> None:
        self.address[:, key] = 0
        self._stats.current.evictions += 1

    def _publish(self, key: int, slot: int) -> None:
        base = self.store.slot_for_read(slot).pointer
        for role, (offset, shift) in enumerate(zip(self.layout.offsets, self._reads_of(key).shifts, strict=True)):
            self.address[role, key] = base + offset + shift
        self.cache.finish_fill(key)

    def cancel(self, key: int) -> bool:
        """Takes a guess back if its reading has not begun."""
        fill = self.filling[key]
        if not self._pool.cancel(fill):
            return False
        self._forget(fill)
        return True

    def settle(self, fill: Fill) -> ExpertReadError | None:
        """Publishes a complete fill, or gives its slot back and returns the error."""
        purpose = self._purpose[fill.key]
        counters = self._stats.current
        counters.bytes += fill.asked
        error = fill.error or self._changed(fill)
        if error is not None:
            counters.failed += 1
            counters.failed_misses += purpose is Purpose.DEMAND
            self._forget(fill)
            return self._named(fill.key, error)
        del self.filling[fill.key], self._purpose[fill.key]
        self.store.commit_slot(fill.slot, self.layout.slot_bytes)
        self._publish(fill.key, fill.slot)
        counters.fills += 1
        counters.advised += fill.advised
        counters.lookahead_reads += purpose is Purpose.LOOK_AHEAD
        counters.preloads += purpose is Purpose.PRELOAD
        return None

    def _forget(self, fill: Fill) -> None:
        del self.filling[fill.key], self._purpose[fill.key]
        self.store.discard_slot(fill.slot)
        self.cache.invalidate(fill.key)

    def _reads_of(self, key: int) -> SliceReads:
        reads = self._reads[key]
        if reads is None:
            tower, expert = self._where[key]
            spans = [tower.span(expert, role) for role in range(len(tower.slices))]
            reads = self._reads[key] = SliceReads(spans, self.layout, self._pool.reader)
        return reads

    def _changed(self, fill: Fill) -> ExpertReadError | None:
        """Whether the files changed under the read: bytes of two versions must not be mixed."""
        try:
            for file_index in {span.file_index for span in fill.reads.spans}:
                self._pool.reader.disk.check_unchanged(file_index)
        except ExpertReadError as error:
            return error
        return None

    def _named(self, key: int, error: BaseException) -> ExpertReadError:
        tower, expert = self._where[key]
        named = ExpertReadError(f"expert {expert} of layer {tower.layer}: {error or type(error).__name__}")
        named.__cause__ = error
        return named
