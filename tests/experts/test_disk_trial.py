"""The trial of the disk: its sums, what it reads of what is there, and a disk that fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertserve.data import model_path
from expertserve.errors import ExpertReadError
from expertserve.experts.budget import size_classes
from expertserve.experts.disk_trial import DiskTrial, TrialPart, disk_rate, open_trial
from expertserve.experts.pool import ReaderPool
from expertserve.experts.reader import BufferedReader
from expertserve.experts.store import HostExpertSlotStore
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from tests.experts.worlds import FakeDisk, make_world

DEMO = Path(model_path("demo"))
AT_ONCE = 4


@contextmanager
def trial_of(disk: FakeDisk, experts: int) -> Iterator[DiskTrial]:
    world = make_world(2, experts)
    disk.files[:] = world.files
    (group,) = size_classes(world.towers, 1)
    pool = ReaderPool(BufferedReader(disk), 2)
    store = HostExpertSlotStore(AT_ONCE, group.layout.slot_bytes)
    try:
        yield DiskTrial(group, pool, store, [len(file) for file in world.files])
    finally:
        pool.close()
        store.close()


def test_rates_are_means_of_a_part_and_the_median_of_parts() -> None:
    first = TrialPart([9.0], [40.0])
    usual = TrialPart([3.0, 5.0], [9.0, 11.0])  # one takes 4 s, each further one 2 s
    slow = TrialPart([30.0], [90.0])
    rate = disk_rate([first, usual, slow, usual], AT_ONCE, 100)
    assert rate.bandwidth == pytest.approx(50.0) and rate.latency_s == pytest.approx(2.0)
    assert (rate.slowest, rate.fastest, rate.first) == pytest.approx((5.0, 50.0, 10.0))


def test_one_slow_read_alone_makes_no_fast_disk() -> None:
    parts = [TrialPart([1.0], [8.0]), TrialPart([90.0, 1.0], [8.0])]
    assert disk_rate(parts, AT_ONCE, 100).bandwidth == pytest.approx(2 * AT_ONCE * 100 / 8.0)


def test_each_part_reads_whole_experts_of_the_files_once() -> None:
    disk = FakeDisk([])
    with trial_of(disk, 40) as trial:
        trial.take(60.0)
        first = list(disk.reads)
        trial.take(60.0)
        assert len(first) == len(set(first)) == 80 * trial.reads
        assert sum(nbytes for _, _, nbytes in first) == 80 * trial.expert_bytes
        assert sorted(disk.reads[len(first) :]) == sorted(first)
        assert trial.rate().bandwidth > 0


def test_a_part_that_was_cut_short_names_the_experts_of_the_others() -> None:
    disk = FakeDisk([])
    with trial_of(disk, 40) as trial:
        trial.take(0.0)
        first = sorted(disk.reads)
        assert len(first) == (4 + AT_ONCE) * trial.reads
        trial.take(60.0)
        assert sorted(disk.reads)[::2] == first


def test_a_read_that_fails_is_raised_when_nothing_is_under_way() -> None:
    disk = FakeDisk([])
    with trial_of(disk, 40) as trial:
        disk.fault = lambda file_index, offset, length: OSError(errno.EIO, "no") if len(disk.reads) > 13 else None
        with pytest.raises(ExpertReadError, match=r"fake-\d.gguf: reading .* failed"):
            trial.take(60.0)
        assert trial._pool.in_flight == 0


def test_a_file_that_has_hardly_begun_to_come_gives_no_trial(tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    with GGUFFile.open(DEMO) as whole:
        towers = load_model(whole).towers
    begins = min(span.offset for tower in towers.values() for span in tower.slices)
    for nbytes, there in ((begins, False), (DEMO.stat().st_size, True)):
        part.write_bytes(DEMO.read_bytes()[:nbytes])
        with open_trial(towers, [part], 2) as (trial, _):
            assert (trial is not None) == there
