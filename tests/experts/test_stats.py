"""The statistics: two line formats, phases, periodic lines, and numbers that agree with each other."""

from __future__ import annotations

import json
import re

import pytest

from expertserve.experts.stats import ExpertStats, write_line
from tests.experts.worlds import make_world, open_lane, row


def test_the_lines_have_the_fixed_fields_in_the_fixed_order(capfd: pytest.CaptureFixture[str]) -> None:
    stats = ExpertStats()
    stats.announce(slots=40, slot_bytes=4096, resident_bytes=5 << 29, mode="direct")
    stats.enter_phase(1, 0)
    for number, name in enumerate(("hits", "misses", "evictions", "fills", "bytes", "exhausted", "advised")):
        setattr(stats.current, name, number + 1)
    stats.leave_phase(draft=False)
    write_line(stats.line())
    on, line = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\[expert-stream\] ON slots=40 slot_bytes=4096 resident=2\.50 GiB( .*)?", on)
    assert line.startswith(
        "[expert-stream] steps=1 hits=1 misses=2 evictions=3 fills=4 bytes=5 exhausted=6 advised=7 forced=0 "
    )


@pytest.mark.parametrize(("every", "steps", "lines"), [(16, 40, 2), (1, 3, 3), (0, 40, 0)])
def test_the_line_is_printed_every_n_steps(every: int, steps: int, lines: int) -> None:
    printed: list[str] = []
    stats = ExpertStats(every=every, emit=printed.append)
    for _ in range(steps):
        stats.enter_phase(1, 0)
        stats.leave_phase(draft=False)
    assert len(printed) == lines


def test_counters_are_split_by_phase_and_add_up() -> None:
    world = make_world()
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_lane(world, 24, stats=stats) as lane:
        with lane.step(decode_rows=0, prefill_rows=1):
            world.run(lane, 0, row(0, 1))
        with lane.step(decode_rows=2, prefill_rows=3):  # a mixed batch counts as prefill
            world.run(lane, 0, row(0, 2))
        with lane.step(decode_rows=1, prefill_rows=0):
            world.run(lane, 0, row(0, 3))
    snapshot = stats.snapshot()
    prefill, decode = snapshot["phases"]["prefill"], snapshot["phases"]["decode"]
    assert (prefill["steps"], prefill["rows"], prefill["hits"], prefill["misses"]) == (2, 6, 1, 3)
    assert (decode["steps"], decode["rows"], decode["hits"], decode["misses"]) == (1, 1, 1, 1)
    for name in ("steps", "hits", "misses", "fills", "bytes"):
        assert snapshot[name] == sum(phase[name] for phase in snapshot["phases"].values())
    assert snapshot["fills"] == snapshot["misses"] == 4
    json.dumps(snapshot)


def test_time_stalled_on_reads_is_told_from_time_computing() -> None:
    import time

    from tests.experts.worlds import FakeDisk

    world = make_world(layers=1)
    disk = FakeDisk(world.files)
    disk.delay_s = 0.02
    with open_lane(world, 8, disk=disk) as lane:
        with lane.step(decode_rows=1, prefill_rows=0):
            lane.run_layer(0, row(0, 1), lambda batch: time.sleep(0.03))
        counters = lane.stats.phases["decode"]
        assert counters.wall_s >= counters.stalled_s + counters.expert_s
        assert counters.stalled_s >= 0.015 and counters.expert_s >= 0.03
        assert counters.reading_s >= 0.02
        assert counters.roofline_ratio >= 1.0


def test_a_draft_step_is_a_step_and_counted_apart() -> None:
    stats = ExpertStats(every=0, emit=lambda line: None)
    for draft in (False, True):
        stats.enter_phase(1, 0)
        stats.leave_phase(draft=draft)
    assert (stats.steps, stats.draft_steps) == (2, 1)
