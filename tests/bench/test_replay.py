"""Trace replay: the policies on small traces whose hit rates are known, and the optimum as a bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.bench.replay import Requests, as_requests, belady, compare, lfu, lru, slot_cache
from expertserve.experts.step import StepRows
from expertserve.experts.trace import TraceStep


def requests(*steps: list[list[int]], num_keys: int = 16) -> Requests:
    played = [[np.array(keys, np.int64) for keys in layers] for layers in steps]
    return Requests(num_keys, played, [[None] * len(layers) for layers in steps], [True] * len(played))


def zipf(steps: int, seed: int = 0) -> Requests:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 17) ** 1.2
    order = [rng.permutation(16) for _ in range(2)]

    def choice(layer: int) -> list[int]:
        ranks = rng.choice(16, 3, replace=False, p=weights / weights.sum())
        return list(16 * layer + order[layer][ranks])

    chosen = [[choice(0), choice(1)] for _ in range(steps)]
    return requests(*chosen, num_keys=32)


def test_a_loop_one_larger_than_the_slots_defeats_lru_and_not_the_optimum() -> None:
    loop = requests(*[[[step % 4]] for step in range(40)])
    assert lru(loop, 3) == 0.0
    assert belady(loop, 3) == pytest.approx(24 / 40, abs=0.05)
    assert lru(loop, 4) == lfu(loop, 4) == belady(loop, 4) == 36 / 40


def test_hotness_beats_lru_where_choices_are_skewed_and_no_policy_beats_the_optimum() -> None:
    trace = zipf(300)
    for slots in (6, 12, 20):
        rates = {"lru": lru(trace, slots), "hot": slot_cache(0.995)(trace, slots), "lfu": lfu(trace, slots)}
        best = belady(trace, slots)
        assert rates["hot"] > rates["lru"]
        assert all(rate <= best + 1e-12 for rate in rates.values())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3), max_size=25),
    slots=st.integers(3, 8),
)
def test_no_policy_beats_the_optimum(steps: list[list[set[int]]], slots: int) -> None:
    trace = requests(*[[sorted(keys) for keys in layers] for layers in steps], num_keys=10)
    best = belady(trace, slots)
    for policy in (lru, lfu, slot_cache(0.9)):
        assert policy(trace, slots) <= best + 1e-12


def test_prefill_and_warm_up_are_played_and_not_counted() -> None:
    steps = [
        TraceStep(StepRows(0, 2), [(0, np.array([[0, 1], [2, 3]], np.int32))]),
        TraceStep(StepRows(1, 0), [(0, np.array([[0, 5]], np.int32))]),
        TraceStep(StepRows(1, 0), [(0, np.array([[0, 1]], np.int32))]),
    ]
    assert as_requests({0: 8}, steps).counted == [False, True, True]
    trace = as_requests({0: 8}, steps, warm_up=2)
    assert trace.counted == [False, False, True]
    assert lru(trace, 8) == 1.0


def test_a_replayed_prefill_keeps_what_most_of_its_tokens_chose() -> None:
    """Layer 0 runs first, so recency alone would keep layer 1."""
    often, rarely = [0, 1], [4, 5]
    ids = np.array([often] * 7 + [rarely], np.int32)
    decode = TraceStep(StepRows(1, 0), [(layer, np.array([often], np.int32)) for layer in (0, 1)])
    trace = as_requests({0: 8, 1: 8}, [TraceStep(StepRows(0, 8), [(0, ids), (1, ids)]), decode])
    assert slot_cache(0.995)(trace, 5) == 1.0
    assert lru(trace, 5) < 1.0


def test_the_comparison_names_every_policy() -> None:
    table = compare(zipf(40), [0.25, 0.5], [0.9])
    assert set(table) == {"lru", "lfu", "belady", "hotness 0.9"}
    assert all(len(rates) == 2 and rates[0] <= rates[1] for rates in table.values())
