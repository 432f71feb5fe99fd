"""The lane: every pair once with the right bytes at any slot count, pins, waves, overlap, the step guard."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from expertserve.errors import CapacityError
from expertserve.experts.batch import SlotBatch
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.experts.step import StepError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import find_towers
from expertserve.values import ExpertBudget
from tests.experts.worlds import FakeDisk, World, make_world, open_lane, row


@pytest.mark.parametrize("slots", [2, 5, 12, 24])
@pytest.mark.parametrize("align", [None, 32, 512])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_every_pair_is_computed_once_with_the_right_bytes(slots: int, align: int | None, tokens: int) -> None:
    world = make_world()
    rng = np.random.default_rng(slots)
    with open_lane(world, slots, align=align) as lane:
        for _ in range(4):
            with lane.step(decode_rows=0, prefill_rows=tokens):
                for layer in world.towers:
                    ids = np.argsort(rng.random((tokens, 8)), axis=1)[:, :2].astype(np.int32)
                    world.run(lane, layer, ids)
            for streamer in lane.streamers:
                streamer.cache.check_integrity()
                assert not streamer.cache.pins.any()
        total = lane.stats.total()
        assert total.steps == lane.clock.steps == 4
        assert total.exhausted == total.failed == total.forced == 0
        assert total.fills == total.misses + total.lookahead_reads
        assert total.fills == len(lane.pool.reader.disk.reads) / 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(("lookahead", "ahead"), [("auto", 2), ("off", 0)])
def test_a_long_prompt_reads_a_part_of_the_next_layer_before_its_router_ran(lookahead: str, ahead: int) -> None:
    world = make_world(layers=3)
    ids = np.argsort(np.random.default_rng(0).random((40, 8)), axis=1)[:, :2].astype(np.int32)
    with open_lane(world, 16, lookahead=lookahead) as lane:
        with lane.step(decode_rows=0, prefill_rows=40):
            world.run(lane, 0, ids)
            assert lane.stats.current.lookahead_reads + lane.pool.in_flight == ahead  # an eighth of the slots
            world.run(lane, 1, ids)
        total = lane.stats.total()
        assert (total.lookahead_used, total.misses) == (ahead, 16 - ahead)


def test_a_second_request_for_resident_experts_reads_nothing() -> None:
    world = make_world()
    with open_lane(world, 24) as lane:
        for _ in range(3):
            with lane.step(decode_rows=1, prefill_rows=0):
                world.run(lane, 1, row(3, 5))
        total = lane.stats.total()
        assert (total.misses, total.hits) == (2, 4)
        assert total.bytes == 2 * sum(world.towers[1].slice_bytes(i) for i in range(3))


def test_acquiring_outside_a_step_raises() -> None:
    world = make_world()
    with open_lane(world, 24) as lane:
        with pytest.raises(StepError):
            world.run(lane, 0, row(0, 1))
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
        with pytest.raises(StepError):  # also when nothing would stream
            world.run(lane, 0, row(0, 1))


def test_a_step_inside_a_step_raises_and_leaves_the_outer_one_whole() -> None:
    world = make_world()
    with open_lane(world, 24) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            with pytest.raises(StepError), lane.step(decode_rows=1, prefill_rows=0):
                pass
            world.run(lane, 0, row(0, 1))
        assert lane.clock.steps == 1
        with lane.step(decode_rows=1, prefill_rows=0, draft=True):
            pass
        assert (lane.clock.steps, lane.clock.target_steps) == (2, 1)


def test_a_step_left_by_an_exception_unpins_and_counts_once() -> None:
    world = make_world()

    def broken(batch: SlotBatch) -> None:
        raise RuntimeError("kernel")

    with open_lane(world, 24) as lane:
        for warm in (False, True):
            with pytest.raises(RuntimeError, match="kernel"), lane.step(decode_rows=1, prefill_rows=0):
                if warm:
                    world.run(lane, 0, row(0, 1))
                lane.run_layer(0, row(0, 1), broken)
        assert lane.clock.steps == lane.stats.total().steps == 2
        assert not any(streamer.cache.pins.any() for streamer in lane.streamers)


def test_resident_experts_are_computed_while_the_disk_works() -> None:
    world = make_world()
    disk = FakeDisk(world.files)
    with open_lane(world, 24, disk=disk) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
        disk.gate.clear()
        calls = []
        begun = len(disk.reads)

        def compute(batch: SlotBatch) -> None:
            deadline = time.monotonic() + 10
            while len(disk.reads) == begun:  # the miss is being read before the hit is computed
                assert time.monotonic() < deadline
                time.sleep(0.001)
            calls.append(batch.pairs.tolist())
            disk.gate.set()  # and only the call with the hit lets the disk go on

        with lane.step(decode_rows=1, prefill_rows=0):
            lane.run_layer(0, row(5, 1), compute)
        assert calls == [[1], [0]]


def test_a_pinned_expert_survives_the_pressure_of_its_own_layer() -> None:
    world = make_world(layers=1)
    with open_lane(world, 3) as lane, lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 0, row(0, 1, 2))
        streamer = lane.streamers[0]
        seen = []

        def compute(batch: SlotBatch) -> None:
            seen.append(streamer.cache.pins.sum())
            assert streamer.cache.pins[0] == 1 or len(seen) > 1
            assert all(addresses.all() for addresses in batch.slices)

        lane.run_layer(0, row(0, 6, 7), compute)
        assert seen[0] == 1


class HeldFence:
    """A kernel that finishes when told to, or when waited for."""

    def __init__(self) -> None:
        self.finished = False
        self.waited = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.waited = self.finished = True


def test_pins_last_until_the_kernel_has_finished_not_until_it_was_launched() -> None:
    world = make_world(layers=1)
    with open_lane(world, 3) as lane:
        cache = lane.streamers[0].cache
        for _ in range(2):  # launched over misses, then by the short way of a resident row
            with lane.step(decode_rows=1, prefill_rows=0):
                fence = HeldFence()
                lane.run_layer(0, row(0, 1), lambda batch, fence=fence: fence)  # type: ignore[misc]
                assert cache.pins[0] == cache.pins[1] == 1
                world.run(lane, 0, row(5, 6))  # through the one slot that is free, one after the other
                assert cache.resident(0) and cache.resident(1) and not fence.waited
            assert fence.waited and not cache.pins.any()


def test_a_layer_waits_for_a_running_kernel_when_only_that_can_free_a_slot() -> None:
    world = make_world(layers=1)
    with open_lane(world, 2) as lane, lane.step(decode_rows=1, prefill_rows=0):
        fence = HeldFence()
        lane.run_layer(0, row(0, 1), lambda batch: fence)
        world.run(lane, 0, row(5, 6))
        assert fence.waited and lane.stats.total().exhausted == 0


def test_a_layer_runs_in_waves_when_it_needs_more_experts_than_slots() -> None:
    world = make_world(layers=1, experts=16)
    ids = np.arange(16, dtype=np.int32).reshape(8, 2)
    calls = []
    with open_lane(world, 4) as lane, lane.step(decode_rows=0, prefill_rows=8):

        def compute(batch: SlotBatch) -> None:
            calls.append(len(batch.group_start) - 1)
            world.compute(ids)(batch)

        lane.run_layer(0, ids, compute)
        assert sum(calls) == 16 and max(calls) <= 4
        assert sorted(pair for _, pair, _ in world.computed) == list(range(16))
        assert lane.stats.total().exhausted == 0


def test_an_expert_chosen_twice_by_one_token_is_two_pairs() -> None:
    world = make_world()
    with open_lane(world, 24) as lane, lane.step(decode_rows=1, prefill_rows=0):
        world.run(lane, 0, row(3, 3))
        world.run(lane, 0, row(3, 3))
        assert lane.stats.total().misses == 1
        assert not lane.streamers[0].cache.pins.any()


def test_experts_that_arrive_together_are_computed_together() -> None:
    world = make_world(layers=1, experts=16)
    disk = FakeDisk(world.files)
    ids = np.arange(12, dtype=np.int32).reshape(6, 2)
    calls = []
    with open_lane(world, 16, disk=disk) as lane, lane.step(decode_rows=0, prefill_rows=6):

        def compute(batch: SlotBatch) -> None:
            calls.append(len(batch.group_start) - 1)
            while lane.pool.pending_reads:  # as a long computation would
                threading.Event().wait(0.001)

        lane.run_layer(0, ids, compute)
        assert sum(calls) == 12 and len(calls) <= 3


def test_layers_of_different_sizes_have_stores_of_their_own() -> None:
    world = make_world(layers=4, odd_layers={1: (1536, 1024, 4096), 3: (1536, 1024, 4096)})
    with open_lane(world, 16) as lane:
        assert len(lane.streamers) == 2
        assert sum(streamer.store.slot_count for streamer in lane.streamers) == 16
        for _ in range(2):
            with lane.step(decode_rows=1, prefill_rows=0):
                for layer in world.towers:
                    world.run(lane, layer, row(layer, 7))


def test_slots_that_never_come_free_are_counted_as_exhausted() -> None:
    world = make_world(layers=1)
    with open_lane(world, 2) as lane:
        with pytest.raises(CapacityError, match="--expert-cache"), lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1))
            lane.streamers[0].cache.pin(np.array([0, 1]))
            world.run(lane, 0, row(4, 5))
        assert lane.stats.total().exhausted == 2
        lane.streamers[0].cache.unpin(np.array([0, 1]))


def test_a_drafts_step_does_not_age_the_targets_hotness() -> None:
    world = make_world()
    with open_lane(world, 24) as lane:
        cache = lane.streamers[0].cache
        for draft in (False, True, True, True):
            with lane.step(decode_rows=1, prefill_rows=0, draft=draft):
                world.run(lane, 2 if draft else 0, row(0, 1))
        assert cache.hotness[[0, 1, 2]].tolist() == [1.0, 1.0, 0.0]
        assert cache.hotness[[16, 17]] == pytest.approx([3.0, 3.0], rel=0.01)


def test_two_models_in_one_process_share_no_expert() -> None:
    stats = ExpertStats(every=0, emit=lambda line: None)
    one, other = make_world(seed=1), make_world(seed=2)
    with open_lane(one, 24, stats=stats) as first, open_lane(other, 24, stats=stats) as second:
        for _ in range(2):
            with first.step(decode_rows=1, prefill_rows=0):
                one.run(first, 0, row(1, 2))
            with second.step(decode_rows=1, prefill_rows=0):
                other.run(second, 0, row(1, 2))
        assert stats.total().misses == 4 and stats.total().steps == 4


def test_a_towers_identity_is_a_count_that_never_goes_back(tiny_moe: Path) -> None:
    """An address would come back once what was there is gone; a layer's number is shared by every model."""
    with GGUFFile.open(tiny_moe) as file:
        seen = [tower.uid for _ in range(200) for tower in find_towers(file).values()]
    assert all(later > earlier for earlier, later in itertools.pairwise(seen))


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_a_real_model_streams_the_bytes_its_spans_name(tiny_moe: Path, mode: str) -> None:
    with GGUFFile.open(tiny_moe) as file:
        towers = find_towers(file)
        world = World(towers, [path.read_bytes() for path in file.paths])
        settings = LaneSettings(budget=ExpertBudget("slots", 6), reader=mode)
        stats = ExpertStats(every=0, emit=lambda line: None)
        lane = ExpertLane.open(file, towers, 2, settings, stats, available_bytes=1 << 30)
        rng = np.random.default_rng(0)
        for tokens in (1, 1, 20, 1):
            with lane.step(decode_rows=tokens, prefill_rows=0):
                for layer in towers:
                    world.run(lane, layer, np.argsort(rng.random((tokens, 8)), axis=1)[:, :2].astype(np.int32))
        assert stats.total().exhausted == 0 and stats.read_mode == mode
        lane.close()


def test_prefill_does_not_flush_what_decode_uses() -> None:
    world = make_world(layers=1, experts=32)
    with open_lane(world, 12) as lane:
        for _ in range(5):
            with lane.step(decode_rows=1, prefill_rows=0):
                world.run(lane, 0, row(0, 1, 2, 3))
        with lane.step(decode_rows=0, prefill_rows=64):
            world.run(lane, 0, np.arange(64, dtype=np.int32).reshape(32, 2) % 32)
        before = lane.stats.total().misses
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 1, 2, 3))
        assert lane.stats.total().misses == before


def test_a_cold_prefill_leaves_what_most_of_its_tokens_chose_in_every_layer() -> None:
    world = make_world(layers=3, experts=16)
    popular = [row(0, 1)] * 28
    with open_lane(world, 24) as lane:
        with lane.step(decode_rows=0, prefill_rows=35):
            for layer in range(3):
                world.run(lane, layer, np.concatenate([*popular, *(row(2 * i, 2 * i + 1) for i in range(1, 8))]))
        with lane.step(decode_rows=1, prefill_rows=0):
            for layer in range(3):
                world.run(lane, layer, row(0, 1))
        assert lane.stats.phases["decode"].hits == 6
