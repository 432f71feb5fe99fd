"""The model of time against closed forms."""

from __future__ import annotations

import dataclasses

import pytest

from expertserve.bench.costs import ComputeCosts, DiskCosts, LookAheadShares, StepTime, mean_step, step_time

COMPUTE = ComputeCosts(step_s=0.5, layer_s=0.2, expert_s=0.1)
NOTHING = ComputeCosts(step_s=0.0, layer_s=0.0, expert_s=0.0)
DISK = DiskCosts(bandwidth=100.0, latency_s=0.0, depth=4, reads=1, expert_bytes=50.0)
MISSES = [3, 0, 4, 1]


def test_a_disk_without_limit_leaves_what_is_computed() -> None:
    time = step_time(MISSES, 4, COMPUTE, dataclasses.replace(DISK, bandwidth=1e15))
    assert time.seconds == pytest.approx(0.5 + 4 * (0.2 + 4 * 0.1)) and time.waiting == pytest.approx(0.0)


def test_without_computing_bytes_over_bandwidth_are_left() -> None:
    time = step_time(MISSES, 4, NOTHING, DISK)
    assert time.seconds == time.waiting == pytest.approx(8 * 50 / 100) and time.reads == 8


def test_reads_one_at_a_time_each_take_the_latency() -> None:
    slow = dataclasses.replace(DISK, bandwidth=1e15, latency_s=0.3, depth=1)
    assert step_time(MISSES, 4, NOTHING, slow).seconds == pytest.approx(8 * 0.3)
    assert step_time(MISSES, 4, NOTHING, dataclasses.replace(slow, depth=2)).seconds == pytest.approx((2 + 2 + 1) * 0.3)


def test_resident_experts_are_computed_while_the_missing_are_read() -> None:
    time = step_time([1], 4, COMPUTE, DISK)
    assert time.waiting == pytest.approx(0.5 - 3 * 0.1)
    assert time.seconds == pytest.approx(0.5 + 0.2 + 0.5 + 0.1)


def test_a_read_costs_the_processor_what_it_costs() -> None:
    fast = dataclasses.replace(DISK, bandwidth=1e15)
    more = step_time(MISSES, 4, dataclasses.replace(COMPUTE, miss_s=0.01), fast)
    assert more.seconds - step_time(MISSES, 4, COMPUTE, fast).seconds == pytest.approx(8 * 0.01)


def test_looking_ahead_saves_waiting_and_wastes_reads() -> None:
    misses = [1] * 8
    without, certain = (
        step_time(misses, 4, COMPUTE, DISK),
        step_time(misses, 4, COMPUTE, DISK, LookAheadShares(1.0, 0.0)),
    )
    assert certain.waiting < without.waiting and certain.reads == without.reads
    assert step_time(misses, 4, COMPUTE, DISK, LookAheadShares(0.0, 0.0)) == without
    fast = dataclasses.replace(DISK, bandwidth=1e6)
    assert step_time(misses, 4, COMPUTE, fast, LookAheadShares(1.0, 1.0)).reads == pytest.approx(8 + 7)


def test_a_mean_step_is_of_each_part() -> None:
    assert mean_step([StepTime(1.0, 0.5, 4), StepTime(3.0, 0.0, 1)]) == StepTime(2.0, 0.25, 2.5)
