"""`expertserve trace simulate` and the recall of look-ahead, against figures that can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertserve.bench.costs import ComputeCosts, DiskCosts, LookAheadShares
from expertserve.bench.recall import recall_of
from expertserve.bench.replay import Policy, hit_rate, read_requests
from expertserve.bench.simulate import OtherDisk, simulate
from expertserve.cli import main
from expertserve.errors import ConfigError
from expertserve.experts.step import StepRows
from expertserve.experts.trace import TraceRecorder
from tests.bench.test_replay import requests
from tests.experts.worlds import make_world, row

TRACE = Path(__file__).parents[1] / "data" / "demo_routing.trace.xz"
COMPUTE = ComputeCosts(step_s=0.5, layer_s=0.2, expert_s=0.1)
DISK = DiskCosts(bandwidth=100.0, latency_s=0.0, depth=4, reads=1, expert_bytes=50.0)


def test_recall_counts_guesses_that_came_true_and_those_of_new_experts(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", make_world().towers)
    steps = [  # chosen, guessed
        ((0, 1), None),
        ((0, 2), (0, 2)),  # 2 is new and foreseen
        ((3, 4), (0, 3)),  # 3 and 4 are new; 0 is guessed in vain, but has its slot
        ((3, 4), (5, 3)),  # 5 is guessed in vain and would be read
    ]
    for chosen, guessed in steps:
        recorder.step(StepRows(1, 0))
        if guessed is not None:
            recorder.guess(1, row(*guessed))
        recorder.layer(1, row(*chosen))
    recorder.step(StepRows(0, 1))
    recorder.guess(1, row(6, 7))
    recorder.layer(1, row(0, 1))
    recorder.close()
    recall = recall_of(tmp_path / "trace")
    assert recall is not None and recall.layer_runs == 3
    assert (recall.recall, recall.precision) == (4 / 6, 4 / 6)
    assert (recall.recall_of_new, recall.precision_of_new) == (2 / 3, 2 / 3)
    assert recall.shares == LookAheadShares(used=2 / 3, wasted=pytest.approx(0.5))
    assert recall_of(TRACE) is None


def test_the_second_half_is_timed_with_the_misses_of_the_replay() -> None:
    trace = requests([[0, 1]], [[0, 1]], [[0, 1]], [[0, 2]], num_keys=4)
    found = simulate(trace, Policy.LRU, 2, COMPUTE, DISK)
    assert (found.slots, found.hit_rate, found.step.reads) == (2, 3 / 4, 0.5)
    without_miss = 0.5 + 0.2 + 2 * 0.1
    with_miss = 0.5 + 0.2 + 0.5 + 0.1  # the resident one is computed while the other is read
    assert found.step.seconds == pytest.approx((without_miss + with_miss) / 2)
    assert found.tok_s == pytest.approx(1 / found.step.seconds) and not found.ahead


def test_looking_ahead_counts_where_it_pays() -> None:
    trace = read_requests(TRACE)
    plain = simulate(trace, Policy.OURS, 60, COMPUTE, DISK)
    wrong, certain = LookAheadShares(0.0, 3.0), LookAheadShares(1.0, 0.0)
    assert simulate(trace, Policy.OURS, 60, COMPUTE, DISK, "auto", wrong) == plain
    assert simulate(trace, Policy.OURS, 60, COMPUTE, DISK, "on", wrong).ahead
    gained = simulate(trace, Policy.OURS, 60, COMPUTE, DISK, "auto", certain)
    assert gained.ahead and gained.tok_s > 1.01 * plain.tok_s


def test_what_is_said_of_a_disk_takes_the_place_of_what_was_measured() -> None:
    assert OtherDisk().applied(DISK) == DISK
    assert OtherDisk(bandwidth=7, latency_s=0.5, depth=32).applied(DISK) == DiskCosts(7, 0.5, 32, 1, 50.0)


def test_a_trace_without_single_decode_steps_is_refused() -> None:
    pairs = np.array([[2, 0], [2, 0]], np.int32)
    trace = replace(requests([[0, 1]], [[0, 1]], num_keys=4), step_rows=pairs)
    with pytest.raises(ConfigError, match="no step of one decode row"):
        simulate(trace, Policy.LRU, 2, COMPUTE, DISK)


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["trace", "simulate", str(TRACE), "--model", "demo", "--slots", "25,75", *more, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_slower_disk_waits_longer_and_more_slots_wait_less(capsys: pytest.CaptureFixture[str]) -> None:
    here = simulated(capsys)
    slow = simulated(capsys, "--disk-bandwidth", "2MB", "--disk-latency", "20000", "--disk-depth", "1")
    assert (slow["disk"]["bandwidth"], slow["disk"]["latency_s"], slow["disk"]["depth"]) == (2e6, 0.02, 1)
    trace = read_requests(TRACE)
    for report in (here, slow):
        few, many = report["rows"]
        assert (few["slots"], many["slots"]) == (60, 180)
        assert few["step"]["waiting"] > many["step"]["waiting"]
        rates = few["tok_s_of"]
        assert rates["LRU"] < rates["ours"] == few["tok_s"] < rates["Belady"]
    for before, after in zip(here["rows"], slow["rows"], strict=True):
        assert before["hit_rate"] == after["hit_rate"] and before["step"]["waiting"] < after["step"]["waiting"]
    assert here["rows"][0]["hit_rate"] == pytest.approx(hit_rate(trace, Policy.OURS, 60), abs=0.03)


def test_kernels_scale_with_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    compute = simulated(capsys, "--memory-bandwidth", "1000TB")["compute"]
    assert max(compute["layer_s"], compute["expert_s"], compute["step_s"]) < 1e-5


def test_odd_values_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "trace"
    TraceRecorder(other, make_world().towers).close()
    for arguments, said in (
        ((str(TRACE), "--disk-bandwidth", "fast"), "--disk-bandwidth fast"),
        ((str(TRACE), "--disk-bandwidth", "0"), "--disk-bandwidth 0"),
        ((str(TRACE), "--disk-depth", "0"), "--disk-depth"),
        ((str(TRACE), "--slots", "0"), "--slots 0"),
        ((str(other),), "not a trace of this model"),
    ):
        assert main(["trace", "simulate", *arguments, "--model", "demo"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line
