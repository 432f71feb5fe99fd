"""The reader pool: demand first, guesses only on an idle disk, every fill back exactly once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from expertserve.errors import ExpertReadError
from expertserve.experts.layout import SlotLayout
from expertserve.experts.pool import Fill, ReaderPool
from expertserve.experts.reader import BufferedReader, SliceReads
from expertserve.gguf.spans import Span
from tests.experts.worlds import FakeDisk, threads_left


def submit(pool: ReaderPool, key: int, slices: int = 1, *, urgent: bool = True) -> Fill:
    """Reads at offsets that tell whose they are."""
    layout = SlotLayout.plan([10] * slices, 1)
    reads = SliceReads([Span(0, 100 * key + i, 10) for i in range(slices)], layout, pool.reader)
    fill = Fill(key, key, reads, lambda fill: None)
    pool.submit(fill, memoryview(bytearray(layout.slot_bytes)), urgent=urgent)
    return fill


def make_pool(threads: int = 2) -> tuple[ReaderPool, FakeDisk]:
    disk = FakeDisk([bytes(range(256)) * 40])
    return ReaderPool(BufferedReader(disk), threads), disk


def collect(pool: ReaderPool, count: int) -> list[Fill]:
    fills: list[Fill] = []
    while len(fills) < count:
        fills += pool.collect(wait=True)
    return fills


def wait_for_reads(disk: FakeDisk, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(disk.reads) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def offsets(disk: FakeDisk) -> list[int]:
    return [offset for _, offset, _ in disk.reads]


def test_every_fill_comes_back_once_and_only_when_all_its_slices_are_read() -> None:
    pool, disk = make_pool(4)
    for key in range(20):
        submit(pool, key, 3, urgent=key % 2 == 0)
    fills = collect(pool, 20)
    assert sorted(fill.key for fill in fills) == list(range(20))
    assert all(fill.asked == 30 and fill.error is None for fill in fills)
    assert pool.in_flight == 0 and pool.collect(wait=False) == [] and pool.busy_s > 0
    assert len(disk.reads) == 60
    pool.close()


def test_slices_of_one_expert_are_read_side_by_side() -> None:
    pool, disk = make_pool(3)
    disk.gate.clear()
    submit(pool, 1, 3)
    wait_for_reads(disk, 3)  # all three have begun though none has ended
    disk.gate.set()
    collect(pool, 1)
    pool.close()


def test_demand_is_read_before_guesses_that_came_earlier() -> None:
    pool, disk = make_pool(1)
    disk.gate.clear()
    submit(pool, 0)
    wait_for_reads(disk, 1)
    for key in (1, 2):
        submit(pool, key, urgent=False)
    for key in (3, 4):
        submit(pool, key)
    disk.gate.set()
    collect(pool, 5)
    assert offsets(disk) == [0, 300, 400, 100, 200]
    pool.close()


def test_a_guess_does_not_begin_while_demand_is_being_read() -> None:
    pool, disk = make_pool(4)
    disk.gate.clear()
    submit(pool, 0)
    wait_for_reads(disk, 1)
    submit(pool, 1, urgent=False)
    time.sleep(0.05)
    assert offsets(disk) == [0]
    disk.gate.set()
    collect(pool, 2)
    pool.close()


def test_guesses_leave_threads_for_demand() -> None:
    pool, disk = make_pool(4)
    disk.gate.clear()
    for key in range(1, 7):
        submit(pool, key, urgent=False)
    wait_for_reads(disk, 2)
    submit(pool, 9)
    wait_for_reads(disk, 3)
    assert offsets(disk)[2] == 900
    disk.gate.set()
    collect(pool, 7)
    pool.close()


def test_a_promoted_guess_is_read_as_demand() -> None:
    pool, disk = make_pool(1)
    disk.gate.clear()
    submit(pool, 0)
    wait_for_reads(disk, 1)
    submit(pool, 1, urgent=False)
    wanted = submit(pool, 2, urgent=False)
    pool.promote(wanted)
    pool.promote(wanted)
    disk.gate.set()
    collect(pool, 3)
    assert offsets(disk) == [0, 200, 100]
    pool.close()


def test_a_guess_that_has_not_begun_can_be_taken_back_and_one_that_has_cannot() -> None:
    pool, disk = make_pool(2)
    disk.gate.clear()
    begun = submit(pool, 1, 2, urgent=False)
    wait_for_reads(disk, 1)
    waiting = submit(pool, 2, 2, urgent=False)
    assert not pool.cancel(begun)
    assert pool.cancel(waiting) and pool.in_flight == 1
    disk.gate.set()
    assert collect(pool, 1) == [begun]
    time.sleep(0.02)
    assert all(offset < 200 for offset in offsets(disk))
    pool.close()


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), MemoryError()])
def test_whatever_a_read_raises_reaches_the_one_who_waits_and_the_thread_lives(error: BaseException) -> None:
    pool, disk = make_pool(1)

    def fault(file_index: int, offset: int, length: int) -> None:
        if offset == 100:
            raise error

    disk.fault = fault  # type: ignore[assignment]
    submit(pool, 1)
    assert collect(pool, 1)[0].error is error
    submit(pool, 2)
    assert collect(pool, 1)[0].error is None
    pool.close()


def test_after_one_slice_failed_the_rest_of_the_expert_is_not_read() -> None:
    pool, disk = make_pool(1)
    disk.fault = lambda file_index, offset, length: OSError(5, "Input/output error")
    submit(pool, 1, 3)
    assert isinstance(collect(pool, 1)[0].error, ExpertReadError)
    assert len(disk.reads) == 1
    pool.close()


def test_a_forward_does_not_wait_for_threads_that_are_gone() -> None:
    pool, _ = make_pool(1)
    pool.close()
    submit(pool, 1)
    with pytest.raises(ExpertReadError, match="reader threads are gone"):
        pool.collect(wait=True)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by /proc")
def test_closing_ends_the_threads_and_the_disk() -> None:
    before = len(os.listdir("/proc/self/task"))
    pool, disk = make_pool(4)
    assert len(os.listdir("/proc/self/task")) == before + 4
    submit(pool, 1, 3)
    pool.close()
    pool.close()
    assert threads_left(before) == before and disk.closed


def test_what_a_read_that_never_ends_writes_to_outlives_the_pool() -> None:
    pool, disk = make_pool(1)
    disk.gate.clear()
    fill = submit(pool, 1)
    wait_for_reads(disk, 1)
    buffer = fill.buffer
    pool.close(timeout_s=0.01)
    assert not disk.closed and fill.buffer is buffer
    disk.gate.set()
