"""The routing trace, and the unstreamed control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertserve.bench.replay import read_requests
from expertserve.errors import ConfigError
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.experts.step import StepError, StepRows
from expertserve.experts.trace import TraceRecorder, read_trace
from expertserve.values import ExpertBudget
from tests.experts.test_failures import OpenedWorld
from tests.experts.worlds import World, make_world, row, write_files


def open_lane_on_files(world: World, folder: Path, slots: int = 6, **more: object) -> ExpertLane:
    settings = LaneSettings(budget=ExpertBudget("slots", slots), reader="buffered", **more)  # type: ignore[arg-type]
    file = OpenedWorld(write_files(world, folder))
    return ExpertLane.open(file, world.towers, 2, settings, ExpertStats(every=0, emit=lambda line: None))


def test_a_trace_says_what_each_step_of_each_layer_chose(tmp_path: Path) -> None:
    world = make_world()
    lane = open_lane_on_files(world, tmp_path, trace=tmp_path / "trace")
    prompt = np.array([[0, 1], [6, 7], [2, 7]], np.int32)
    with lane.step(decode_rows=0, prefill_rows=3):
        world.run(lane, 0, prompt)
        world.run(lane, 2, prompt[::-1].copy())
    with lane.step(decode_rows=1, prefill_rows=0, draft=True):
        world.run(lane, 1, row(4, 3))
    lane.close()
    layers, steps = read_trace(tmp_path / "trace")
    assert layers == {0: 8, 1: 8, 2: 8}
    first, second = steps
    assert (first.rows, second.rows) == (StepRows(0, 3, False), StepRows(1, 0, True))
    assert [layer for layer, _ in first.layers] == [0, 2]
    np.testing.assert_array_equal(first.layers[0][1], prompt)
    np.testing.assert_array_equal(second.layers[0][1], row(4, 3))


@pytest.mark.parametrize("slots", [6, 24])
def test_with_look_ahead_on_guesses_are_recorded_beside_what_was_chosen(tmp_path: Path, slots: int) -> None:
    world = make_world()
    lane = open_lane_on_files(world, tmp_path, trace=tmp_path / "trace", lookahead="on", slots=slots)
    with lane.step(decode_rows=1, prefill_rows=0):
        assert lane.wants_guesses
        lane.look_ahead(1, row(5, 6))
        world.run(lane, 0, row(0, 1))
        world.run(lane, 1, row(6, 7))
    with lane.step(decode_rows=0, prefill_rows=1):
        lane.look_ahead(1, row(1, 2))
        world.run(lane, 0, row(2, 3))
    lane.close()
    first, second = read_trace(tmp_path / "trace")[1]
    assert [layer for layer, _ in first.layers] == [0, 1] and not second.guesses
    np.testing.assert_array_equal(first.layers[1][1], row(6, 7))
    assert list(first.guesses) == [1]
    np.testing.assert_array_equal(first.guesses[1], row(5, 6))
    replayed = read_requests(tmp_path / "trace")
    assert replayed.keys.tolist() == [0, 1, 8 + 6, 8 + 7, 2, 3] and replayed.layers.tolist() == [0, 1, 0]


def test_a_selection_costs_a_few_bytes(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", make_world().towers)
    for _ in range(100):
        recorder.step(StepRows(1, 0))
        for layer in range(27):
            recorder.layer(layer, np.arange(8, dtype=np.int32)[None])
    recorder.close()
    assert (tmp_path / "trace").stat().st_size / (100 * 27 * 8) < 4


def test_a_trace_cut_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", make_world().towers)
    for step in range(3):
        recorder.step(StepRows(1, 0))
        recorder.layer(0, row(step, step + 1))
        recorder.layer(1, row(7, 6))
    recorder.close()
    whole = (tmp_path / "trace").read_bytes()
    start = whole.index(b"\n", len(b"EXPERTTRACE1\n")) + 1
    before = -1
    for end in range(start, len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:end])
        _, steps = read_trace(tmp_path / "cut")
        records = sum(1 + len(step.layers) for step in steps)
        assert records >= before
        before = records
    assert before == 9


@pytest.mark.parametrize("content", [b"", b"rubbish", b"EXPERTTRACE1\n", b"EXPERTTRACE1\n[]\n", b"EXPERTTRACE1\n{\n"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(ConfigError, match="not a routing trace"):
        read_trace(tmp_path / "trace")


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_forward(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    recorder = TraceRecorder(Path("/dev/full"), make_world().towers)
    for _ in range(20_000):
        recorder.step(StepRows(1, 0))
    recorder.close()
    assert recorder.warning is not None and "No space left" in recorder.warning


def test_the_forced_arm_computes_the_same_from_the_mapping_and_counts_apart(tmp_path: Path) -> None:
    world = make_world()
    lane = open_lane_on_files(world, tmp_path, forced=True, lookahead="on")
    assert any("unstreamed" in warning for warning in lane.warnings)
    with pytest.raises(StepError):
        world.run(lane, 0, row(0, 1))
    with lane.step(decode_rows=0, prefill_rows=2):
        world.run(lane, 1, np.array([[0, 1], [1, 7]], np.int32))
        world.run(lane, 2, row(3, 3))
    total = lane.stats.total()
    assert total.forced == 4 and lane.stats.read_mode == "forced" and total.steps == 1
    assert total.hits == total.misses == total.fills == total.exhausted == total.bytes == 0
    assert lane.warm_up() == 0
    lane.close()


def test_settings_without_effect_are_named(tmp_path: Path) -> None:
    world = make_world()
    file = OpenedWorld(write_files(world, tmp_path))
    settings = LaneSettings(lookahead="on", profile=tmp_path / "hot")
    lane = ExpertLane.open(file, world.towers, 2, settings, ExpertStats(every=0, emit=lambda line: None))
    assert [line.split()[0] for line in lane.warnings] == ["--lookahead", "--profile"]
    lane.close()
