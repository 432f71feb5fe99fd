"""The device slot store against a device whose copies lag behind and whose memory is poison until they arrive."""

from __future__ import annotations

import numpy as np
import pytest

from expertserve.errors import CapacityError
from expertserve.experts.device_store import STAGING_BUFFERS, DeviceExpertSlotStore
from expertserve.experts.factory import make_slot_store
from expertserve.experts.store import HostExpertSlotStore
from expertserve.ops.cuda.device import Download
from expertserve.values import size_text
from tests.cuda.emulator import available
from tests.cuda.fake_device import POISON, FakeDevice, at, installed

SLOT = 8192


def content(device: FakeDevice, address: int) -> bytes:
    """What a kernel launched now would read."""
    target = np.zeros(SLOT, np.uint8)
    device.compute.run(Download(target, address))
    device.compute.synchronize()
    return target.tobytes()


def test_a_kernel_launched_after_the_view_sees_the_bytes_and_one_before_sees_poison() -> None:
    device = FakeDevice()
    store = DeviceExpertSlotStore(device, 3, SLOT)
    store.write_slot(1, b"a" * SLOT)
    assert content(device, store.base + SLOT) == bytes([POISON]) * SLOT, (
        "the fake device is no test: copies are instant"
    )
    view = store.slot_for_read(1)
    assert (view.pointer, view.nbytes, view.device) == (store.base + store.stride, SLOT, "emulated")
    assert content(device, view.pointer) == b"a" * SLOT


def test_a_staging_buffer_is_not_handed_out_before_its_copy() -> None:
    device = FakeDevice()
    store = DeviceExpertSlotStore(device, 40, SLOT)
    for slot in range(40):
        store.write_slot(slot, bytes([slot]) * SLOT)
    for slot in range(40):
        assert content(device, store.slot_for_read(slot).pointer) == bytes([slot]) * SLOT
    assert device.pinned_bytes == STAGING_BUFFERS * SLOT


def test_a_rewritten_slot_holds_what_came_last() -> None:
    device = FakeDevice()
    store = DeviceExpertSlotStore(device, 2, SLOT)
    for value in b"xyz":
        store.write_slot(0, bytes([value]) * SLOT)
        store.slot_for_read(0)
    store.write_slot(0, b"w" * SLOT)
    assert content(device, store.slot_for_read(0).pointer) == b"w" * SLOT


def test_as_many_slots_can_be_open_as_it_says_and_no_more() -> None:
    store = DeviceExpertSlotStore(FakeDevice(), 40, SLOT)
    for slot in range(store.write_depth):
        store.slot_for_write(slot)
    with pytest.raises(ValueError, match="all there is room for"):
        store.slot_for_write(store.write_depth)
    store.discard_slot(0)
    store.slot_for_write(store.write_depth)


def test_a_slot_must_be_open_to_be_committed_and_closed_to_be_read() -> None:
    store = DeviceExpertSlotStore(FakeDevice(), 2, SLOT)
    with pytest.raises(ValueError, match="not open"):
        store.commit_slot(0, SLOT)
    with pytest.raises(ValueError, match="not open"):
        store.discard_slot(0)
    store.slot_for_write(0)
    with pytest.raises(ValueError, match="open for writing already"):
        store.slot_for_write(0)
    with pytest.raises(ValueError, match="commit it first"):
        store.slot_for_read(0)
    with pytest.raises(ValueError, match="do not fit"):
        store.commit_slot(0, SLOT + 1)
    with pytest.raises(IndexError):
        store.slot_for_write(2)


def test_an_arena_that_does_not_fit_is_refused_with_the_numbers() -> None:
    device = FakeDevice(vram_bytes=10 * SLOT)
    with pytest.raises(
        CapacityError, match=f"{size_text(11 * SLOT)} for expert slots .*--expert-cache.*{size_text(10 * SLOT)}"
    ):
        DeviceExpertSlotStore(device, 11, SLOT)
    assert device.used_bytes == 0


@pytest.mark.parametrize("part", ["allocate_pinned", "make_stream"])
def test_nothing_is_left_when_a_later_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()

    def refuse(*args: object) -> None:
        raise CapacityError("refused")

    monkeypatch.setattr(device, part, refuse)
    with pytest.raises(CapacityError, match="refused"):
        DeviceExpertSlotStore(device, 3, SLOT)
    assert device.used_bytes == 0


def test_close_frees_the_arena_once_and_later_access_raises() -> None:
    device = FakeDevice()
    store = DeviceExpertSlotStore(device, 3, SLOT)
    store.write_slot(0, b"a" * SLOT)
    open_slot = store.slot_for_write(1)
    store.close()
    store.close()
    assert device.used_bytes == 0
    open_slot[:] = b"b" * SLOT  # a reader thread that is late harms nobody
    with pytest.raises(IndexError):
        store.slot_for_read(0)


def test_the_factory_follows_the_device() -> None:
    with installed(FakeDevice()):
        assert isinstance(make_slot_store("cuda", 2, SLOT), DeviceExpertSlotStore)
    with installed(FakeDevice(reads_host_memory=True)):
        assert isinstance(make_slot_store("cuda", 2, SLOT), HostExpertSlotStore)


@pytest.mark.skipif(not available, reason="needs g++")
def test_the_fake_device_refuses_what_is_not_device_memory() -> None:
    device = FakeDevice()
    memory = device.allocate(64, "a test")
    with pytest.raises(AssertionError, match="not device memory"):
        device.execute(Download(np.zeros(65, np.uint8), memory.address))
    assert (at(memory.address, 64) == POISON).all()
