"""Failing reads: the step that needed them fails by name, nothing half-read is computed with, later steps work."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from expertserve.errors import ExpertReadError
from expertserve.experts.budget import plan_slots, size_classes
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.values import ExpertBudget
from tests.experts.worlds import FakeDisk, World, make_world, open_lane, row, threads_left, write_files


def eio(file_index: int, offset: int, length: int) -> OSError:
    return OSError(errno.EIO, "Input/output error")


def short(file_index: int, offset: int, length: int) -> int:
    return 0


def died(file_index: int, offset: int, length: int) -> int:
    raise SystemExit("a reader thread was told to go")


@pytest.mark.parametrize("fault", [eio, short, died])
@pytest.mark.parametrize("align", [None, 512])
def test_a_failed_read_fails_its_step_and_nothing_else(fault: Callable[..., object], align: int | None) -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    bad = world.towers[1].span(5, 1)

    def only_expert_5(file_index: int, offset: int, length: int) -> object:
        if file_index == bad.file_index and offset < bad.offset + bad.nbytes and offset + length > bad.offset:
            return fault(file_index, offset, length)
        return None

    with open_lane(world, 6, disk=disk, align=align) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 1, row(1, 2))
        disk.fault = only_expert_5  # type: ignore[assignment]
        for _ in range(2):  # the second time it must not be a hit
            with (
                pytest.raises(ExpertReadError, match=r"expert 5 of layer 1"),
                lane.step(decode_rows=1, prefill_rows=0),
            ):
                world.run(lane, 1, row(1, 5))
            assert all(expert != 5 for _, _, expert in world.computed)
            for streamer in lane.streamers:
                streamer.cache.check_integrity()
                assert not streamer.cache.pins.any()
        disk.fault = lambda file_index, offset, length: None
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 1, row(5, 1))
            world.run(lane, 0, row(7, 0))
        total = lane.stats.total()
        assert (total.failed, total.failed_misses) == (2, 2)
        assert total.fills == total.misses - total.failed_misses + total.lookahead_reads + total.preloads
        assert lane.clock.steps == 4


def test_other_experts_of_a_failed_step_are_kept_when_they_arrive() -> None:
    world = make_world(layers=1)
    disk = FakeDisk(world.files)
    bad = world.towers[0].span(0, 0)
    disk.fault = lambda file_index, offset, length: eio(0, 0, 0) if offset == bad.offset else None
    with open_lane(world, 8, disk=disk) as lane:
        with pytest.raises(ExpertReadError), lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1, 2, 3))
        disk.fault = lambda file_index, offset, length: None
        before = len(disk.reads)
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(1, 2, 3, 0))
        assert len(disk.reads) - before <= 3
        assert lane.stats.total().fills == 4


def test_a_failed_fill_leaves_its_slot_free() -> None:
    world = make_world(layers=1)
    disk = FakeDisk(world.files)
    disk.fault = eio
    with open_lane(world, 2, disk=disk) as lane:
        for _ in range(5):
            with pytest.raises(ExpertReadError), lane.step(decode_rows=1, prefill_rows=0):
                world.run(lane, 0, row(0, 1))
        disk.fault = lambda file_index, offset, length: None
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
        assert lane.streamers[0].cache.resident_count == 2


def test_a_file_that_changes_while_loaded_fails_reads_by_name_but_not_hits() -> None:
    world = make_world(layers=1)
    disk = FakeDisk(world.files)
    with open_lane(world, 8, disk=disk) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
        disk.changed = True
        with pytest.raises(ExpertReadError, match="changed on disk"), lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 2))
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))


class OpenedWorld:
    """A world's real files as the lane takes them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = tuple(paths)
        self._fingerprint = [self._of(path) for path in paths]

    @staticmethod
    def _of(path: Path) -> tuple[str, int, int, int]:
        status = os.stat(path)
        return str(path), status.st_size, status.st_mtime_ns, status.st_ino

    def fingerprint(self) -> list[tuple[str, int, int, int]]:
        return self._fingerprint


def open_real(world: World, folder: Path, mode: str, slots: int) -> tuple[ExpertLane, OpenedWorld]:
    file = OpenedWorld(write_files(world, folder))
    settings = LaneSettings(budget=ExpertBudget("slots", slots), reader=mode)
    return ExpertLane.open(file, world.towers, 2, settings, ExpertStats(every=0, emit=lambda line: None)), file


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_a_real_file_truncated_under_the_lane_is_a_named_error(mode: str, tmp_path: Path) -> None:
    world = make_world(files=1)
    lane, file = open_real(world, tmp_path, mode, 6)
    with lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 0, row(0, 1))
    os.truncate(file.paths[0], 5000)
    with pytest.raises(ExpertReadError, match=r"expert \d of layer 2.*world-0\.bin"):
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 2, row(6, 7))
    while lane.pool.pending_reads:  # the other expert of the failed step
        time.sleep(0.001)
    with lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 0, row(0, 1))
    file.paths[0].write_bytes(world.files[0])
    with pytest.raises(ExpertReadError, match="changed on disk"), lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 2, row(6, 7))  # the bytes are back, but nobody can vouch for them
    for streamer in lane.streamers:
        streamer.cache.check_integrity()
    lane.close()


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_a_file_replaced_by_renaming_keeps_serving_the_old_bytes(mode: str, tmp_path: Path) -> None:
    world = make_world(files=1)
    lane, file = open_real(world, tmp_path, mode, 6)
    (tmp_path / "new").write_bytes(bytes(len(world.files[0])))
    os.replace(tmp_path / "new", file.paths[0])
    with lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 2, row(6, 7))
    lane.close()


def test_a_file_that_is_not_the_one_whose_header_was_read_is_refused(tmp_path: Path) -> None:
    world = make_world(files=1)
    paths = write_files(world, tmp_path)
    file = OpenedWorld(paths)
    os.utime(paths[0], ns=(5, 5))
    with pytest.raises(ExpertReadError, match="changed on disk"):
        ExpertLane.open(file, world.towers, 2, LaneSettings(), ExpertStats(every=0, emit=lambda line: None))


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_real_files_in_every_mode_give_the_right_bytes_and_true_counts(mode: str, tmp_path: Path) -> None:
    world = make_world(layers=4, experts=16, slices=(1536, 1056, 2080))
    lane, _ = open_real(world, tmp_path, mode, 12)
    rng = np.random.default_rng(3)
    for _ in range(6):
        with lane.step(decode_rows=1, prefill_rows=0):
            for layer in world.towers:
                world.run(lane, layer, rng.permutation(16)[:2].astype(np.int32)[None])
    total = lane.stats.total()
    assert lane.stats.read_mode == mode
    assert total.fills == total.misses > 12
    assert total.advised == (total.fills if mode == "mmap" else 0)
    assert total.bytes >= total.fills * sum(world.towers[0].slice_bytes(i) for i in range(3))
    lane.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by /proc")
def test_a_constructor_that_fails_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from expertserve.experts import opening

    world = make_world(odd_layers={1: (512, 512, 512)})
    disk = FakeDisk(world.files)
    made = []
    real = opening.make_slot_store

    def second_fails(*arguments: object, **more: object) -> object:
        if made:
            raise MemoryError
        made.append(real(*arguments, **more))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr(opening, "make_slot_store", second_fails)
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(MemoryError), open_lane(world, 24, disk=disk):
        pass
    assert threads_left(before) == before and disk.closed
    with pytest.raises(IndexError):
        made[0].slot_for_read(0)  # closed


def test_the_plan_is_refused_before_any_weight_is_read() -> None:
    world = make_world()
    with pytest.raises(Exception, match="expert-cache"):
        plan_slots(size_classes(world.towers, 512), ExpertBudget("slots", 1), 2)
