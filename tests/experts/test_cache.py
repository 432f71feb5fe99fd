"""The slot cache: who is evicted, what pins and failures do, and that its tables always agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertserve.experts.cache import ExpertSlotCache, prefill_weights


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


def step(cache: ExpertSlotCache, *which: int, decay: bool = True) -> None:
    cache.touch(keys(*which))
    cache.advance(decay=decay)
    cache.check_integrity()


def test_the_least_hot_goes_first() -> None:
    cache = ExpertSlotCache([(1, 8)], 3)
    fill(cache, 0, 1, 2)
    for chosen in ((0, 1), (0, 1), (0, 2)):
        step(cache, *chosen)
    assert fill(cache, 5) == [2]


def test_ties_go_to_the_least_recently_used() -> None:
    cache = ExpertSlotCache([(1, 8)], 3, decay=1.0)
    fill(cache, 0, 1, 2)
    step(cache, 2)
    step(cache, 0)
    step(cache, 1)
    assert fill(cache, 5, 6) == [2, 5]


def test_hotness_counts_once_a_step_however_many_tokens_chose_an_expert() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    cache.touch(keys(3, 3, 3, 4))
    cache.touch(keys(3))
    cache.advance(decay=False)
    assert cache.current_hotness()[[3, 4]].tolist() == [1.0, 1.0]


def test_a_prefill_is_shared_out_by_how_many_tokens_chose_an_expert() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    for _ in range(2):  # the same layer again in a step counts once
        cache.touch(keys(3, 4), prefill_weights(np.array([512, 8], np.int32), 512))
    cache.advance(decay=False)
    assert cache.current_hotness()[[3, 4, 5]].tolist() == [64.0, 1.0, 0.0]
    cache.touch(keys(3, 4), prefill_weights(np.array([10, 1], np.int32), 10))
    cache.advance(decay=False)
    assert cache.current_hotness()[[3, 4, 5]].tolist() == [74.0, 2.0, 0.0]


def test_hotness_grows_for_experts_that_are_not_resident() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    for _ in range(4):
        step(cache, 0, 7)
    step(cache, 1)
    fill(cache, 7)
    assert fill(cache, 2) == [None] or cache.resident(7)
    assert not cache.resident(1)


def test_hotness_decays_with_the_targets_steps_and_not_with_the_drafts() -> None:
    cache = ExpertSlotCache([(1, 4)], 2, decay=0.5)
    step(cache, 0, decay=False)
    assert cache.current_hotness()[0] == 1.0
    step(cache)
    step(cache)
    step(cache, decay=False)
    assert cache.current_hotness()[0] == 0.25


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
    cache = ExpertSlotCache([(1, 8)], 2, decay=1.0)
    fill(cache, 0, 1)
    step(cache, 0)
    step(cache, 1)
    for _ in range(5):
        assert cache.resident(0)
    assert fill(cache, 2) == [0]


def test_a_newcomer_can_be_kept_from_evicting_hotter_experts() -> None:
    cache = ExpertSlotCache([(1, 8)], 2)
    fill(cache, 0, 1)
    step(cache, 0, 1)
    step(cache, 0, 1)
    cache.touch(keys(5))
    assert cache.begin_fill(5, spare_hotter=True) is None
    cache.check_integrity()
    assert fill(cache, 5) in ([0], [1])


def test_towers_do_not_share_keys_and_a_uid_is_taken_once() -> None:
    cache = ExpertSlotCache([(7, 4), (9, 4)], 4)
    assert {cache.key(7, e) for e in range(4)} & {cache.key(9, e) for e in range(4)} == set()
    with pytest.raises(KeyError):
        cache.key(8, 0)
    with pytest.raises(ValueError, match="twice"):
        ExpertSlotCache([(7, 4), (7, 4)], 4)


def test_scores_keep_their_order_when_the_inflated_domain_is_rescaled() -> None:
    cache = ExpertSlotCache([(1, 8)], 3, decay=0.01)
    fill(cache, 0, 1, 2)
    for _ in range(120):  # 0.01 ** 120 is far below the smallest double
        step(cache, 0)
        step(cache, 1)
    step(cache, 2)
    assert np.isfinite(cache.hotness).all() and cache.increment < 1e110
    assert fill(cache, 5) == [0]


class CacheMachine(RuleBasedStateMachine):
    """Random use against a plain model: a dictionary, floats and a scan over all slots."""

    filling = Bundle("filling")

    @initialize(slots=st.integers(1, 5), decay=st.sampled_from([0.5, 0.9, 1.0]))
    def start(self, slots: int, decay: float) -> None:
        self.cache = ExpertSlotCache([(3, 5), (4, 5)], slots, decay=decay)
        self.slots, self.decay = slots, decay
        self.hot = [0.0] * 10
        self.used = [-1] * 10
        self.clock = 0
        self.resident: set[int] = set()
        self.loading: set[int] = set()
        self.pins = [0] * 10

    @rule(chosen=st.sets(st.integers(0, 9), max_size=4))
    def select(self, chosen: set[int]) -> None:
        self.cache.touch(keys(*chosen, *chosen))
        for key in chosen:
            if self.used[key] != self.clock:
                self.hot[key] += 1.0
                self.used[key] = self.clock

    @rule(decay=st.booleans())
    def end_step(self, decay: bool) -> None:
        self.cache.advance(decay=decay)
        self.clock += 1
        if decay:
            self.hot = [value * self.decay for value in self.hot]

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
            worst = self._rank(place.evicted)
            assert all(worst <= self._rank(k) or np.isclose(self.hot[k], self.hot[place.evicted]) for k in candidates)
            self.resident.remove(place.evicted)
        self.loading.add(key)

    def _rank(self, key: int) -> tuple[float, int]:
        return self.hot[key], self.used[key]

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
