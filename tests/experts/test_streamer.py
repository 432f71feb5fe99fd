"""The streamer: publication only through the store, single flight, withdrawal before a slot is written again."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from expertserve.experts import opening
from expertserve.experts.store import ExpertSlotStore, HostExpertSlotStore, SlotView
from expertserve.experts.streamer import Purpose
from tests.experts.worlds import FakeDisk, make_world, open_lane, row


class StagedStore(ExpertSlotStore):
    """As a device's store: what is written lies in a staging buffer until it is committed; two buffers in all."""

    def __init__(self, device: str, slot_count: int, slot_bytes: int, *, huge_pages: bool = True) -> None:
        self._slots = HostExpertSlotStore(slot_count, slot_bytes)
        self._staged: dict[int, bytearray] = {}
        self.commits = 0

    slot_bytes = property(lambda self: self._slots.slot_bytes)  # type: ignore[assignment]
    slot_count = property(lambda self: self._slots.slot_count)  # type: ignore[assignment]
    resident_bytes = property(lambda self: self._slots.resident_bytes)  # type: ignore[assignment]
    base = property(lambda self: self._slots.base)  # type: ignore[assignment]
    stride = property(lambda self: self._slots.stride)  # type: ignore[assignment]
    write_depth = property(lambda self: 2)  # type: ignore[assignment]

    def slot_for_write(self, slot: int) -> memoryview:
        assert len(self._staged) < self.write_depth, "more slots open than there are staging buffers"
        self._staged[slot] = bytearray(self.slot_bytes)
        return memoryview(self._staged[slot])

    def commit_slot(self, slot: int, nbytes: int) -> None:
        self._slots.write_slot(slot, self._staged.pop(slot)[:nbytes])
        self.commits += 1

    def discard_slot(self, slot: int) -> None:
        del self._staged[slot]

    def slot_for_read(self, slot: int) -> SlotView:
        assert slot not in self._staged
        return self._slots.slot_for_read(slot)

    def close(self) -> None:
        assert not self._staged, "a staging buffer was lost"
        self._slots.close()


def test_a_store_with_few_staging_buffers_serves_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "make_slot_store", StagedStore)
    world = make_world()
    rng = np.random.default_rng(0)
    with open_lane(world, 10, align=32) as lane:
        for _ in range(4):
            with lane.step(decode_rows=0, prefill_rows=6):
                for layer in world.towers:
                    world.run(lane, layer, rng.permuted(np.tile(np.arange(8), (6, 1)), axis=1)[:, :2].astype(np.int32))
        store = lane.streamers[0].store
        assert isinstance(store, StagedStore) and store.commits == lane.stats.total().fills > 20


def test_a_failed_fill_gives_its_staging_buffer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "make_slot_store", StagedStore)
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 10, disk=disk) as lane:
        disk.fault = lambda file_index, offset, length: OSError(5, "Input/output error")
        for _ in range(3):
            with pytest.raises(Exception, match="expert"), lane.step(decode_rows=1, prefill_rows=0):
                world.run(lane, 0, row(0, 1))
        disk.fault = lambda file_index, offset, length: None
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))


def test_an_address_is_withdrawn_when_its_slot_is_given_away() -> None:
    world = make_world(layers=1)
    with open_lane(world, 2) as lane:
        streamer = lane.streamers[0]
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
            assert np.count_nonzero(streamer.address) == 6
            world.run(lane, 0, row(2, 3))
            assert np.flatnonzero(streamer.address[0]).tolist() == [2, 3]
            for role in range(3):
                want = world.expert_bytes(0, 3, role)
                assert ctypes.string_at(int(streamer.address[role, 3]), len(want)) == want


def test_a_miss_of_an_expert_that_is_being_read_reads_it_no_second_time() -> None:
    world = make_world(layers=1)
    disk = FakeDisk(world.files)
    with open_lane(world, 8, disk=disk) as lane:
        disk.gate.clear()
        streamer = lane.streamers[0]
        assert streamer.begin(3, Purpose.LOOK_AHEAD) is not None
        with pytest.raises(ValueError, match="again"):
            streamer.begin(3, Purpose.DEMAND)
        disk.gate.set()
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(3, 4))
        assert len(disk.reads) == 6
        total = lane.stats.total()
        assert (total.misses, total.hits, total.fills, total.lookahead_reads) == (1, 1, 2, 1)
