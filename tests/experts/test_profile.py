"""Warm start: the profile's file, and what a lane does with it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.errors import ExpertReadError
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.profile import ModelIdentity, load_profile, save_profile
from expertserve.experts.stats import ExpertStats
from expertserve.values import ExpertBudget
from tests.experts.test_failures import OpenedWorld
from tests.experts.worlds import FakeDisk, World, make_world, open_lane, row, write_files

WORLD = make_world()
IDENTITY = ModelIdentity.of(WORLD.towers, [len(data) for data in WORLD.files])
HOTNESS = {layer: np.linspace(0, layer + 1, 8) for layer in WORLD.towers}


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "hot"
    assert save_profile(path, IDENTITY, HOTNESS) is None
    loaded, warnings = load_profile(path, IDENTITY)
    assert warnings == () and sorted(loaded) == sorted(HOTNESS)
    for layer, values in HOTNESS.items():
        np.testing.assert_allclose(loaded[layer], values, rtol=1e-6)
    assert os.listdir(tmp_path) == ["hot"]


def test_the_model_is_known_by_its_experts_and_not_by_uids_or_path(tmp_path: Path) -> None:
    again = make_world()
    assert again.towers[0].uid != WORLD.towers[0].uid
    assert ModelIdentity.of(again.towers, [len(data) for data in again.files]) == IDENTITY


def test_another_models_profile_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "hot"
    save_profile(path, IDENTITY, HOTNESS)
    other = make_world(seed=4)
    loaded, warnings = load_profile(path, ModelIdentity.of(other.towers, [len(data) for data in other.files]))
    assert loaded == {} and "another model's" in warnings[0] and str(path) in warnings[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_profile_does_more_than_warn(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    save_profile(path, IDENTITY, HOTNESS)
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:at]
    else:
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    path.write_bytes(bad)
    loaded, warnings = load_profile(path, IDENTITY)
    assert loaded == {} and len(warnings) == 1


def test_a_profile_that_is_not_there_is_a_cold_start_without_a_word(tmp_path: Path) -> None:
    assert load_profile(tmp_path / "none", IDENTITY) == ({}, ())
    _, warnings = load_profile(tmp_path, IDENTITY)  # a folder
    assert "cannot be read" in warnings[0]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device without an end")
def test_a_device_in_place_of_a_profile_is_ignored_and_not_read_for_ever() -> None:
    loaded, warnings = load_profile(Path("/dev/zero"), IDENTITY)
    assert loaded == {} and "not a regular file" in warnings[0]


def test_a_file_too_large_for_a_profile_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "hot"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    loaded, warnings = load_profile(path, IDENTITY)
    assert loaded == {} and "too large" in warnings[0]


def test_a_full_disk_costs_the_new_profile_and_not_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hot"
    save_profile(path, IDENTITY, HOTNESS)
    good = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    warning = save_profile(path, IDENTITY, HOTNESS)
    assert warning is not None and "No space left" in warning
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["hot"]
    assert "was not saved" in (save_profile(tmp_path / "absent" / "hot", IDENTITY, HOTNESS) or "")


def open_with_profile(world: World, folder: Path, budget: ExpertBudget) -> ExpertLane:
    paths = [path if path.exists() else write_files(world, folder)[0] for path in [folder / "world-0.bin"]]
    settings = LaneSettings(budget=budget, reader="buffered", profile=folder / "hot")
    return ExpertLane.open(OpenedWorld(paths), world.towers, 2, settings, ExpertStats(every=0, emit=lambda line: None))


def test_the_next_run_starts_with_the_hottest_experts_of_the_last(tmp_path: Path) -> None:
    world = make_world(files=1)
    lane = open_with_profile(world, tmp_path, ExpertBudget("slots", 4))
    assert lane.warm_up() == 0  # nothing is known yet
    for step in range(6):
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(3, 5))
            world.run(lane, 2, row(1, step % 2))
    lane.close()
    lane.close()
    lane = open_with_profile(world, tmp_path, ExpertBudget("slots", 4))
    seen: list[tuple[int, int]] = []
    assert lane.warm_up(progress=lambda done, total: seen.append((done, total))) == 4
    assert seen[-1] == (4, 4)
    with lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 0, row(3, 5))
        world.run(lane, 2, row(1))
    total = lane.stats.total()
    assert (total.misses, total.preloads, total.fills) == (0, 4, 4)
    lane.close()


def test_an_auto_budget_stops_at_the_knee_of_the_profile(tmp_path: Path) -> None:
    world = make_world(files=1)
    lane = open_with_profile(world, tmp_path, ExpertBudget("auto"))
    assert lane.plan.all_resident
    for _ in range(50):
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(3, 5, 6))
    lane.close()
    lane = open_with_profile(world, tmp_path, ExpertBudget("auto"))
    assert lane.plan.total_slots == 3
    lane.close()


def test_a_lane_that_ran_nothing_leaves_the_profile_alone(tmp_path: Path) -> None:
    world = make_world(files=1)
    open_with_profile(world, tmp_path, ExpertBudget("slots", 4)).close()
    assert not (tmp_path / "hot").exists()


def test_a_damaged_profile_is_a_warning_of_the_lane(tmp_path: Path) -> None:
    world = make_world(files=1)
    (tmp_path / "hot").write_bytes(b"rubbish")
    lane = open_with_profile(world, tmp_path, ExpertBudget("slots", 4))
    assert any("ignored" in warning for warning in lane.warnings)
    lane.close()


def test_a_resident_lane_preloads_everything_in_file_order() -> None:
    disk = FakeDisk(WORLD.files)
    with open_lane(WORLD, 24, disk=disk, threads=1) as lane:
        assert lane.warm_up() == 24
        total = lane.stats.total()
        assert (total.preloads, total.fills, total.misses) == (24, 24, 0)
        first_of_each = [offset for _, offset, _ in disk.reads[::3]]
        assert first_of_each == [WORLD.towers[layer].span(e, 0).offset for layer in range(3) for e in range(8)]
        before = len(disk.reads)
        with lane.step(decode_rows=1, prefill_rows=0):
            for layer in WORLD.towers:
                WORLD.run(lane, layer, row(2, 7))
        assert len(disk.reads) == before and lane.warm_up() == 0


def test_a_preload_stops_for_a_request_after_the_reads_that_have_begun() -> None:
    disk = FakeDisk(WORLD.files)
    disk.delay_s = 0.002
    with open_lane(WORLD, 24, disk=disk, threads=1) as lane:
        read = lane.warm_up(should_stop=lambda: True)
        assert 1 <= read <= 4 + 1 and lane.pool.in_flight == 0
        with lane.step(decode_rows=1, prefill_rows=0):
            WORLD.run(lane, 2, row(6, 7))


def test_a_preload_that_cannot_read_says_which_expert() -> None:
    disk = FakeDisk(WORLD.files)
    disk.fault = lambda file_index, offset, length: OSError(5, "Input/output error")
    with open_lane(WORLD, 24, disk=disk) as lane:
        with pytest.raises(ExpertReadError, match=r"expert \d of layer 0"):
            lane.warm_up()
        assert lane.pool.in_flight == 0
