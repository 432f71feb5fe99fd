"""Slot layout and host slot store."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.errors import CapacityError, KernelUnavailableError
from expertserve.experts.factory import make_slot_store
from expertserve.experts.layout import KERNEL_ALIGN, SlotLayout
from expertserve.experts.store import ExpertSlotStore, HostExpertSlotStore


@given(
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=4),
    align=st.sampled_from([1, 32, 512, 4096]),
    shift=st.integers(0, 4095),
)
def test_any_enclosing_aligned_range_fits_its_region(sizes: list[int], align: int, shift: int) -> None:
    layout = SlotLayout.plan(sizes, align)
    end = 0
    for nbytes, offset, region in zip(layout.slice_bytes, layout.offsets, layout.region_bytes, strict=True):
        assert offset >= end and offset % max(align, KERNEL_ALIGN) == 0
        end = offset + region
        enclosing = -(-(shift % align + nbytes) // align) * align
        assert enclosing <= region
    assert end <= layout.slot_bytes and layout.slot_bytes % mmap.PAGESIZE == 0


@pytest.fixture
def store() -> HostExpertSlotStore:
    return HostExpertSlotStore(4, 8192)


def test_what_was_committed_is_what_a_kernel_reads(store: HostExpertSlotStore) -> None:
    for slot in range(4):
        store.write_slot(slot, bytes([slot + 1]) * 8192)
    for slot in range(4):
        view = store.slot_for_read(slot)
        assert (view.nbytes, view.device) == (8192, "cpu")
        assert view.pointer == store.base + slot * store.stride and view.pointer % mmap.PAGESIZE == 0
        assert ctypes.string_at(view.pointer, 8192) == bytes([slot + 1]) * 8192


def test_a_slot_that_is_not_committed_cannot_be_read(store: HostExpertSlotStore) -> None:
    store.slot_for_write(1)
    with pytest.raises(ValueError, match="commit"):
        store.slot_for_read(1)
    store.commit_slot(1, 8192)
    store.slot_for_read(1)


def test_committing_or_discarding_a_slot_that_is_not_open_raises(store: HostExpertSlotStore) -> None:
    with pytest.raises(ValueError, match="not open"):
        store.commit_slot(2, 8192)
    with pytest.raises(ValueError, match="not open"):
        store.discard_slot(2)
    store.slot_for_write(2)
    with pytest.raises(ValueError, match="already"):
        store.slot_for_write(2)
    with pytest.raises(ValueError, match="fit"):
        store.commit_slot(2, 8193)
    store.discard_slot(2)
    store.slot_for_write(2)


def test_slots_do_not_overlap_and_have_bounds(store: HostExpertSlotStore) -> None:
    buffers = [np.frombuffer(store.slot_for_write(slot), np.uint8) for slot in range(4)]
    starts = [buffer.ctypes.data for buffer in buffers]
    assert np.diff(starts).tolist() == [8192] * 3
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            store.slot_for_write(slot)
    assert store.resident_bytes == 4 * 8192


def test_a_closed_store_refuses_instead_of_touching_freed_memory(store: HostExpertSlotStore) -> None:
    held = store.slot_for_write(0)
    store.close()
    with pytest.raises(IndexError):
        store.slot_for_read(0)
    held[:4] = b"late"  # a reader that ends after closing writes into memory that still is


def test_every_store_must_publish() -> None:
    required = ExpertSlotStore.__abstractmethods__
    assert {"commit_slot", "discard_slot", "slot_for_read", "slot_for_write", "close"} <= required


def test_the_factory_gives_the_host_store_and_refuses_unknown_devices() -> None:
    store = make_slot_store("cpu", 1, 4096, huge_pages=False)
    assert isinstance(store, HostExpertSlotStore)
    store.close()
    with pytest.raises(KernelUnavailableError, match="'abacus'"):
        make_slot_store("abacus", 1, 4096)


def test_memory_that_is_refused_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="--expert-cache"):
        HostExpertSlotStore(1 << 40, 1 << 20)
