"""Trace replay: each policy against one written for clarity, ours against the real slot cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.bench.replay import (
    POLICIES,
    Requests,
    compare,
    hit_rate,
    hits,
    read_requests,
    reuse_distances,
    slots_of,
)  # fmt: skip
from expertserve.experts.step import StepRows
from expertserve.experts.trace import TraceRecorder
from tests.bench.reference_policies import best_possible, lru, slot_cache
from tests.experts.worlds import make_world

LRU, OPTIMUM = POLICIES["LRU"], POLICIES["Belady"]
TRACE = Path(__file__).parents[1] / "data" / "demo_routing.trace.xz"


def requests(
    *steps: list[list[int]],
    num_keys: int = 16,
    experts: dict[int, int] | None = None,
    prefill: frozenset[int] = frozenset(),
) -> Requests:
    """A trace of keys by step and layer, of `experts` a layer; a prefill's tokens chose its keys 1, 2, 3, 1, ... times.

    Without `experts` the first layer has all keys, which suits the policies that do not look at layers.
    """
    layers = [(number, layer, keys) for number, step in enumerate(steps) for layer, keys in enumerate(step)]
    keys = [key for _, _, keys in layers for key in keys]
    return Requests(
        experts=experts or {0: num_keys, **dict.fromkeys(range(1, max(map(len, steps))), 0)},
        keys=np.array(keys, np.int32),
        pairs=np.array([1 + i % 3 for i in range(len(keys))], np.int32),
        ends=np.cumsum([len(keys) for _, _, keys in layers], dtype=np.int64),
        rows=np.array([100 if number in prefill else 1 for number, _, _ in layers], np.int32),
        layers=np.array([layer for _, layer, _ in layers], np.int32),
        step_of=np.array([number for number, _, _ in layers], np.int64),
        step_rows=np.array([(0, 100) if number in prefill else (1, 0) for number in range(len(steps))], np.int32),
    )


def zipf(steps: int, seed: int = 0) -> Requests:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 17) ** 1.2
    order = [rng.permutation(16) for _ in range(2)]

    def choice(layer: int) -> list[int]:
        ranks = rng.choice(16, 3, replace=False, p=weights / weights.sum())
        return list(16 * layer + order[layer][ranks])

    return requests(*[[choice(0), choice(1)] for _ in range(steps)], experts={0: 16, 1: 16})


STEPS = st.lists(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=3),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, slots=st.integers(1, 30), prefill=st.frozensets(st.integers(0, 24)))
def test_ours_is_what_the_slot_cache_does(steps: list[list[list[int]]], slots: int, prefill: frozenset[int]) -> None:
    spread = [[[10 * layer + key for key in keys] for layer, keys in enumerate(step)] for step in steps]
    trace = requests(*spread, experts={0: 10, 1: 10, 2: 10}, prefill=prefill)
    assert hits(trace, POLICIES["ours"], slots).tolist() == slot_cache(trace, slots)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, slots=st.integers(1, 8), prefill=st.frozensets(st.integers(0, 24)))
def test_lfu_evicts_the_least_often_used(steps: list[list[list[int]]], slots: int, prefill: frozenset[int]) -> None:
    trace = requests(*steps, num_keys=10, prefill=prefill)
    assert hits(trace, POLICIES["LFU"], slots).tolist() == lru(trace, slots, frequency=True)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, slots=st.integers(1, 8))
def test_lru_evicts_the_least_recently_used(steps: list[list[list[int]]], slots: int) -> None:
    trace = requests(*steps, num_keys=10)
    assert hits(trace, LRU, slots).tolist() == lru(trace, slots)


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=14), slots=st.integers(1, 3))
def test_the_optimum_is_the_best_of_all_choices_and_no_policy_beats_it(keys: list[int], slots: int) -> None:
    trace = requests(*[[[key]] for key in keys], num_keys=6)
    best = hits(trace, OPTIMUM, slots).sum()
    assert best == best_possible(trace, slots)
    assert all(hits(trace, policy, slots).sum() <= best for policy in POLICIES.values())


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_the_reuse_distance_is_the_fewest_slots_with_which_lru_hits(steps: list[list[list[int]]]) -> None:
    single = [[[key]] for step in steps for layer in step for key in layer]
    trace = requests(*single, num_keys=10)
    distances = reuse_distances(trace)
    for slots in range(1, 11):
        expected = (distances > 0) & (distances <= slots)
        assert hits(trace, LRU, slots).tolist() == expected.astype(int).tolist()


def test_a_loop_one_larger_than_the_slots_defeats_lru_and_not_the_optimum() -> None:
    loop = requests(*[[[step % 4]] for step in range(40)])
    assert hit_rate(loop, LRU, 3) == 0.0
    assert hit_rate(loop, OPTIMUM, 3) == pytest.approx(24 / 40, abs=0.05)
    assert {hit_rate(loop, policy, 4) for policy in POLICIES.values()} == {36 / 40}


def test_hotness_beats_lru_where_choices_are_skewed_and_not_the_optimum() -> None:
    trace = zipf(300)
    for slots in (6, 12, 20):
        assert hit_rate(trace, LRU, slots) < hit_rate(trace, POLICIES["ours"], slots) < hit_rate(trace, OPTIMUM, slots)


def test_ours_comes_near_the_optimum_on_a_loop_that_leaves_recency_nothing() -> None:
    loop = replace(requests(*[[[2 * (step % 8), 2 * (step % 8) + 1]] for step in range(1200)]), warm_up=600)
    assert hit_rate(loop, LRU, 8) == 0.0
    assert hit_rate(loop, POLICIES["ours"], 8) > 0.8 * hit_rate(loop, OPTIMUM, 8)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_ours_closes_half_of_the_gap_between_lru_and_the_optimum_on_text(share: float) -> None:
    trace = read_requests(TRACE)
    trace = replace(trace, warm_up=len(trace.step_rows) // 2)
    lru_rate, ours, best = (
        hit_rate(trace, POLICIES[name], slots_of(trace, share)) for name in ("LRU", "ours", "Belady")
    )
    assert ours - lru_rate > 0.5 * (best - lru_rate)


def test_shuffling_keeps_what_each_layer_selects_and_loses_the_order() -> None:
    trace = requests(*[[[step // 50], [8 + step // 50]] for step in range(200)])
    shuffled = trace.shuffled()
    for layer in (0, 1):
        mine, theirs = trace.keys[layer::2], shuffled.keys[layer::2]
        assert sorted(mine) == sorted(theirs) and mine.tolist() != theirs.tolist()
    assert hit_rate(trace, LRU, 2) == 1 - 8 / 400
    assert hit_rate(shuffled, LRU, 2) < 0.5
    assert shuffled.shuffled().keys.tolist() != shuffled.keys.tolist() and trace.shuffled().ends.tolist() == (
        trace.ends.tolist()
    )


def record(path: Path, *steps: tuple[StepRows, list[tuple[int, list[list[int]]]]]) -> Path:
    recorder = TraceRecorder(path, make_world().towers)
    for rows, layers in steps:
        recorder.step(rows)
        for layer, ids in layers:
            recorder.layer(layer, np.array(ids, np.int32))
    recorder.close()
    return path


def test_a_recorded_trace_becomes_keys(tmp_path: Path) -> None:
    path = record(
        tmp_path / "t.trace",
        (StepRows(0, 3), [(0, [[5, 1], [1, 7], [5, 1]]), (2, [[0, 2], [0, 3], [0, 1]])]),
        (StepRows(1, 0), [(1, [[7, 2]])]),
    )
    read = read_requests(path, warm_up=1)
    assert read.experts == {0: 8, 1: 8, 2: 8}
    assert read.keys.tolist() == [1, 5, 7, 16, 17, 18, 19, 15, 10]
    assert read.pairs.tolist() == [3, 2, 1, 3, 1, 1, 1, 1, 1]
    assert read.sizes.tolist() == [3, 4, 2] and read.layers.tolist() == [0, 2, 1] and read.rows.tolist() == [3, 3, 1]
    assert read.step_of.tolist() == [0, 0, 1] and read.step_rows.tolist() == [[0, 3], [1, 0]]
    assert read.counted.tolist() == [False, False, True]
    assert not read_requests(path, warm_up=2).counted.any()


def test_a_trace_cut_short_or_with_an_unknown_expert_ends_there(tmp_path: Path) -> None:
    step = (StepRows(1, 0), [(0, [[1, 2]])])
    whole = record(tmp_path / "t.trace", step, step).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-2])
    assert len(read_requests(tmp_path / "cut").ends) == 1
    (tmp_path / "wrong").write_bytes(whole[:-2] + b"\x08\x00")
    assert len(read_requests(tmp_path / "wrong").ends) == 1


def test_prefill_is_played_and_not_counted(tmp_path: Path) -> None:
    """Layer 0 runs first, so recency alone would keep layer 1."""
    often, rarely = [0, 1], [4, 5]
    ids = [often] * 7 + [rarely]
    decode = (StepRows(1, 0), [(layer, [often]) for layer in (0, 1)])
    trace = read_requests(record(tmp_path / "t.trace", (StepRows(0, 8), [(0, ids), (1, ids)]), decode))
    assert hit_rate(trace, POLICIES["ours"], 5) == 1.0
    assert hit_rate(trace, LRU, 5) < 1.0


def test_the_comparison_names_every_policy() -> None:
    table = compare(zipf(40), [0.25, 0.5], POLICIES)
    assert set(table) == {"LRU", "LFU", "ours", "Belady"}
    assert all(len(rates) == 2 and rates[0] <= rates[1] for rates in table.values())
