"""The slot cache: who is evicted, what pins and failures do, and that its tables always agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertserve.experts.cache import ExpertSlotCache
from tests.experts.reference_forecast import ReferenceForecast


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def fill(cache: ExpertSlotCache, *which: int) -> list[int | None]:
    """Makes keys resident; returns whom each evicted."""
    evicted = []
    for key in which:
        place = cache.begin_fill(key)
        assert place is not None
        cache.finish_fill(key)
        evicted.append(place.evicted)
    cache.check_integrity()
    return evicted


def step(cache: ExpertSlotCache, *which: int) -> None:
    cache.note(0, keys(*which))
    cache.check_integrity()


def test_the_least_hot_goes_first() -> None:
    cache = ExpertSlotCache([(1, 8)], 3)
    fill(cache, 0, 1, 2)
    for chosen in ((0, 1), (0, 1), (0, 2)):
        step(cache, *chosen)
    assert fill(cache, 5) == [2]


def test_of_equal_experts_the_one_whose_layer_runs_last_goes_first() -> None:
    cache = ExpertSlotCache([(1, 4), (2, 4), (3, 4)], 6)
    fill(cache, 0, 4, 8)
    for _ in range(3):
        for place in range(3):
            cache.note(place, keys(4 * place))
    cache.note(0, keys(0))
    cache.note(1, keys(4))  # next run the layers of keys 8, 0 and 4
    fill(cache, 1, 5, 9)  # never chosen, so they go before the others
    assert fill(cache, 2, 3) == [5, 1]


def test_a_prefill_counts_as_its_rows_up_to_64_shared_out_by_how_many_tokens_chose_an_expert() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    cache.note_prefill(0, keys(3, 4), np.array([512, 8], np.int32), 512)
    assert cache.hotness[[3, 4, 5]] == pytest.approx([64.0, 1.0, 0.0], rel=0.01)
    cache.note_prefill(0, keys(3, 4), np.array([10, 1], np.int32), 10)
    assert cache.hotness[[3, 4, 5]] == pytest.approx([74.0, 2.0, 0.0], rel=0.01)
    cache.note(0, keys(5))
    assert cache.hotness[[3, 4, 5]] == pytest.approx([74.0, 2.0, 1.0], rel=0.01)


def test_hotness_grows_for_experts_that_are_not_resident() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    for _ in range(4):
        step(cache, 0, 7)
    step(cache, 1)
    assert fill(cache, 7) == [1]


def test_what_is_kept_follows_the_text_when_it_turns_to_other_experts() -> None:
    cache = ExpertSlotCache([(1, 8)], 4)
    fill(cache, 0, 1, 2, 3)
    for _ in range(500):
        step(cache, 0, 1)
    for _ in range(100):
        step(cache, 2, 3)
    assert set(fill(cache, 4)) <= {0, 1}


def test_known_hotness_decides_until_more_is_known() -> None:
    cache = ExpertSlotCache([(1, 4), (2, 4)], 4)
    cache.seed(0, np.array([9.0, 3.0, 1.0, 0.0]), 10.0)
    cache.seed(1, np.array([0.0, 8.0, 4.0, 0.0]), 10.0)
    fill(cache, 0, 1, 5, 6)
    with pytest.raises(ValueError, match="before the first"):
        cache.seed(0, np.zeros(4), 1.0)
    assert fill(cache, 2) == [1]


def test_keys_of_another_layer_are_refused() -> None:
    cache = ExpertSlotCache([(1, 4), (2, 4)], 4)
    for place, key in ((0, 4), (1, 3), (1, 8), (0, -1)):
        with pytest.raises(ValueError, match="not all of layer"):
            cache.note(place, keys(key))
    assert not cache.hotness.any()


def test_a_pinned_expert_is_never_a_victim() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    cache.pin(keys(0))
    step(cache, 1)
    assert fill(cache, 2) == [1]
    cache.pin(keys(2))
    assert cache.begin_fill(3) is None
    cache.unpin(keys(0))
    assert fill(cache, 3) == [0]
    cache.unpin(keys(2))
    assert fill(cache, 4) == [2] or not cache.resident(3)


def test_a_loading_expert_is_no_hit_and_no_victim() -> None:
    cache = ExpertSlotCache([(1, 8)], 1)
    assert cache.begin_fill(0) is not None
    assert not cache.resident(0)
    assert cache.begin_fill(1) is None
    cache.finish_fill(0)
    assert cache.resident(0)
    assert fill(cache, 1) == [0]


def test_a_key_is_read_once_while_it_is_loading() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    cache.begin_fill(0)
    with pytest.raises(ValueError, match="again"):
        cache.begin_fill(0)


def test_an_invalidated_fill_gives_its_slot_back_and_is_no_hit() -> None:
    cache = ExpertSlotCache([(1, 8)], 1)
    cache.begin_fill(0)
    cache.invalidate(0)
    cache.check_integrity()
    assert not cache.resident(0) and cache.free_count == 1
    assert fill(cache, 0) == [None]
    cache.invalidate(0)  # a resident one too
    cache.check_integrity()
    assert fill(cache, 1) == [None]


def test_a_pinned_expert_cannot_be_invalidated() -> None:
    cache = ExpertSlotCache([(1, 8)], 1)
    fill(cache, 0)
    cache.pin(keys(0))
    with pytest.raises(ValueError, match="pinned"):
        cache.invalidate(0)
    cache.unpin(keys(0))


def test_asking_whether_a_key_is_resident_does_not_touch_the_order() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    step(cache, 0)
    step(cache, 1)
    for _ in range(5):
        assert cache.resident(0)
    assert fill(cache, 2) == [0]


def test_a_newcomer_can_be_kept_from_evicting_experts_that_are_needed_sooner() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    step(cache, 0, 1)
    step(cache, 0, 1)
    assert cache.begin_fill(5, spare_sooner=True) is None
    cache.check_integrity()
    assert fill(cache, 5) in ([0], [1])


def test_towers_do_not_share_keys_and_a_uid_is_taken_once() -> None:
    cache = ExpertSlotCache([(7, 4), (9, 4)], 4)
    assert {cache.key(7, e) for e in range(4)} & {cache.key(9, e) for e in range(4)} == set()
    with pytest.raises(KeyError):
        cache.key(8, 0)
    with pytest.raises(ValueError, match="twice"):
        ExpertSlotCache([(7, 4), (7, 4)], 4)


class CacheMachine(RuleBasedStateMachine):
    """Random use against a plain model: a dictionary, floats and a scan over all slots."""

    filling = Bundle("filling")

    @initialize(slots=st.integers(1, 5))
    def start(self, slots: int) -> None:
        self.cache = ExpertSlotCache([(3, 5), (4, 5)], slots)
        self.forecast = ReferenceForecast([5, 5])
        self.slots = slots
        self.resident: set[int] = set()
        self.loading: set[int] = set()
        self.pins = [0] * 10

    @rule(place=st.integers(0, 1), chosen=st.sets(st.integers(0, 4), min_size=1, max_size=4))
    def select(self, place: int, chosen: set[int]) -> None:
        self.cache.note(place, keys(*(5 * place + expert for expert in chosen)))
        self.forecast.note(place, {expert: 1.0 for expert in chosen})

    @rule(place=st.integers(0, 1), counts=st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1))
    def select_in_a_prefill(self, place: int, counts: dict[int, int]) -> None:
        chosen = keys(*(5 * place + expert for expert in counts))
        self.cache.note_prefill(place, chosen, np.array(list(counts.values()), np.int32), 9)
        self.forecast.note(place, {expert: count / 9 for expert, count in counts.items()}, runs=9)

    @rule(key=st.integers(0, 9))
    def begin(self, key: int) -> None:
        if key in self.resident or key in self.loading:
            with pytest.raises(ValueError):
                self.cache.begin_fill(key)
            return
        place = self.cache.begin_fill(key)
        candidates = [k for k in self.resident if not self.pins[k]]
        if len(self.resident) + len(self.loading) < self.slots:
            assert place is not None and place.evicted is None
        elif not candidates:
            assert place is None
            return
        else:
            assert place is not None and place.evicted in candidates
            until = self.forecast.until()
            assert until[place.evicted] >= (1 - 1e-3) * max(until[key] for key in candidates)
            self.resident.remove(place.evicted)
        self.loading.add(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), good=st.booleans())
    def end_fill(self, data: st.DataObject, good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(key)
        if good:
            self.cache.finish_fill(key)
            self.resident.add(key)
        else:
            self.cache.invalidate(key)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.resident)), min_size=1))
        self.cache.pin(keys(*chosen))
        for key in chosen:
            self.pins[key] += 1

    @precondition(lambda self: any(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [key for key in range(10) if self.pins[key]]
        chosen = data.draw(st.sets(st.sampled_from(pinned), min_size=1))
        self.cache.unpin(keys(*chosen))
        for key in chosen:
            self.pins[key] -= 1

    @precondition(lambda self: any(not self.pins[key] for key in self.resident))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in sorted(self.resident) if not self.pins[key]]))
        self.cache.invalidate(key)
        self.resident.remove(key)

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert {key for key in range(10) if self.cache.resident(key)} == self.resident
        assert self.cache.resident_count == len(self.resident)
        assert self.cache.pins.tolist() == self.pins


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
