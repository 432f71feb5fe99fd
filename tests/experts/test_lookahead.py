"""Look-ahead: reads ahead while the disk is idle, never costs demand its slots, judges every guess and itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from expertserve.experts.batch import SlotBatch
from expertserve.experts.lane import ExpertLane
from expertserve.experts.lookahead import TRIAL
from expertserve.experts.trial import Trial
from tests.experts.worlds import FakeDisk, World, make_world, open_lane, row


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def idle(lane: ExpertLane) -> Callable[[SlotBatch], None]:
    """A kernel that takes as long as all reads."""
    return lambda batch: wait_until(lambda: not lane.pool.pending_reads)


def warmed(world: World, lane: ExpertLane, layer: int = 0) -> None:
    with lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, layer, row(0, 1))


def test_a_right_guess_is_there_when_its_layer_runs() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on") as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            assert lane.wants_guesses
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(0, 1), idle(lane))
            before = len(disk.reads)
            world.run(lane, 1, row(4, 5))
            assert len(disk.reads) == before
        counters = lane.stats.phases["decode"]
        assert (counters.lookahead_reads, counters.lookahead_used, counters.lookahead_wasted) == (2, 2, 0)
        assert (counters.misses, counters.hits) == (2, 4)
        assert counters.fills == counters.misses + counters.lookahead_reads


def test_a_wrong_guess_is_counted_wasted_and_changes_no_answer() -> None:
    world = make_world()
    with open_lane(world, 20, lookahead="on") as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(0, 1), idle(lane))
            world.run(lane, 1, row(6, 7))
        assert lane.stats.total().lookahead_wasted == 2


def test_a_guess_still_being_read_is_awaited_and_read_once() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on") as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            disk.delay_s = 0.02
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(0, 1), lambda batch: None)
            before = len(disk.reads)
            world.run(lane, 1, row(4, 5))
        total = lane.stats.total()
        assert (total.lookahead_used, total.misses) == (2, 2) and total.lookahead_late >= 1
        assert len(disk.reads) <= before + 6 and total.fills == 4


def test_guesses_that_were_not_begun_are_taken_back_when_their_layer_chooses_otherwise() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on", threads=2) as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            disk.gate.clear()
            lane.look_ahead(1, row(4, 5, 6))
            lane.run_layer(0, row(0, 1), lambda batch: None)
            wait_until(lambda: len(disk.reads) == 7)  # of the first guess one slice has begun: half the threads read
            lane.run_layer(2, row(), lambda batch: None)  # another layer runs: guesses expire
            disk.gate.set()
            world.run(lane, 1, row(7, 3))
        wait_until(lambda: not lane.pool.pending_reads)
        total = lane.stats.total()
        assert (total.lookahead_used, total.lookahead_wasted) == (0, 1)
        assert len(disk.reads) == 6 + 3 + 6
        with lane.step(decode_rows=1, prefill_rows=0):
            pass
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))  # publishes what came meanwhile
        cache = lane.streamers[0].cache
        assert not lane.streamers[0].filling and cache.resident_count + cache.free_count == cache.slot_count


def test_a_guess_that_is_demanded_is_no_longer_put_off() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on", threads=1) as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            disk.gate.clear()
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(0, 1), lambda batch: None)
            wait_until(lambda: len(disk.reads) == 7)  # the first guess has begun, the second waits for an idle disk
            opener = threading.Timer(0.05, disk.gate.set)
            opener.start()
            world.run(lane, 1, row(5, 7))
            opener.join()
        order = [offset for _, offset, _ in disk.reads[7:]]
        guessed, missed = (world.towers[1].span(expert, 0).offset for expert in (5, 7))
        assert order.index(guessed) < order.index(missed)


def test_guesses_do_not_begin_before_the_demand_of_the_layer_that_runs() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on", threads=1) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(2, 3), lambda batch: None)
        demand = {world.towers[0].span(e, role).offset for e in (2, 3) for role in range(3)}
        assert {offset for _, offset, _ in disk.reads[:6]} == demand


@pytest.mark.parametrize("slots", [2, 6])
def test_scarce_slots_are_left_to_demand(slots: int) -> None:
    world = make_world()
    with open_lane(world, slots, lookahead="on") as lane:
        for _ in range(3):
            with lane.step(decode_rows=1, prefill_rows=0):
                for layer in range(2):
                    lane.look_ahead(layer + 1, row(4, 5))
                    world.run(lane, layer, row(layer, 3))
        total = lane.stats.total()
        assert total.lookahead_reads == 0 and total.exhausted == 0


def test_a_failed_guess_fails_nobody_and_its_slot_is_free() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 20, disk=disk, lookahead="on") as lane:
        warmed(world, lane)
        with lane.step(decode_rows=1, prefill_rows=0):
            disk.fault = lambda file_index, offset, length: OSError(5, "Input/output error")
            lane.look_ahead(1, row(4, 5))
            lane.run_layer(0, row(0, 1), idle(lane))
            disk.fault = lambda file_index, offset, length: None
            world.run(lane, 1, row(4, 5))
        assert lane.stats.total().failed == 2


@pytest.mark.parametrize(
    ("decode_rows", "prefill_rows", "draft", "slots", "mode", "wanted"),
    [
        (1, 0, False, 12, "on", True),
        (1, 0, False, 12, "auto", True),
        (1, 0, False, 12, "off", False),
        (1, 0, False, 24, "on", False),  # everything is resident
        (1, 5, False, 12, "on", False),
        (64, 0, False, 12, "on", False),
        (1, 0, True, 12, "on", False),
    ],
)
def test_guesses_are_wanted_only_where_they_can_pay(
    decode_rows: int, prefill_rows: int, draft: bool, slots: int, mode: str, wanted: bool
) -> None:
    world = make_world()
    with open_lane(world, slots, lookahead=mode) as lane:
        with lane.step(decode_rows=decode_rows, prefill_rows=prefill_rows, draft=draft):
            assert lane.wants_guesses is wanted
        assert not lane.wants_guesses


def play(trial: Trial, steps: int, with_it: float, without: float) -> list[bool]:
    sides = []
    for step in range(steps):
        sides.append(trial.active)
        drift = 1 - 0.2 * step / steps  # everything gets faster as the cache warms
        trial.add(drift * (with_it if trial.active else without))
    return sides


@pytest.mark.parametrize(("with_it", "without", "kept"), [(1.0, 1.3, True), (1.3, 1.0, False), (1.0, 1.0, False)])
def test_the_trial_keeps_what_pays_and_stops_what_does_not(with_it: float, without: float, kept: bool) -> None:
    trial = Trial("auto", TRIAL)
    sides = play(trial, 9 * 16, with_it, without)
    assert set(sides[16:]) == {True, False}
    assert trial.active is kept and trial.verdict.startswith("on" if kept else "off")
    assert set(play(trial, 1024, with_it, without)) == {kept}
    assert len(set(play(trial, 64, with_it, without))) == 2  # measured again after a while


@pytest.mark.parametrize("mode", ["on", "off"])
def test_on_and_off_are_not_measured(mode: str) -> None:
    trial = Trial(mode, TRIAL)  # type: ignore[arg-type]
    assert set(play(trial, 400, 1.0, 2.0)) == {mode == "on"}
