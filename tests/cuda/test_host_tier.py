"""The host tier behind a device's slots: experts move down and up, are read once, and answers stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.errors import CapacityError
from expertserve.experts.budget import plan_slots, size_classes, tier_places
from expertserve.experts.device_store import DeviceExpertSlotStore
from expertserve.experts.host_tier import HostTier
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.values import ExpertBudget, parse_budget
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice, installed
from tests.cuda.test_device_store import SLOT, content
from tests.models.build import open_forward
from tests.parity.oracle import FIXTURES, ORACLE
from tests.parity.test_keystone import cells_of, logits_of

MODEL = "qwen3moe/model-q4_k.gguf"
needs_fixtures = pytest.mark.skipif(not FIXTURES, reason="needs the oracle fixtures beside the checkout")


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1)), max_size=40), st.integers(1, 4), st.randoms())
def test_what_comes_back_is_what_went_down(moves: list[tuple[int, int]], places: int, random) -> None:  # type: ignore[no-untyped-def]
    """Slots 0 and 1 exchange experts with the tier; bytes of expert k are all k, whatever the copies' delays."""
    device = FakeDevice()
    store = DeviceExpertSlotStore(device, 2, SLOT)
    hotness = np.array([random.random() for _ in range(8)], np.float32)
    tier = HostTier(store, places, hotness)
    held: dict[int, int] = {}
    for key, slot in moves:
        if key in held.values():
            continue
        before = len(tier), key in tier
        if key in tier:
            kept = tier.lift(key, slot, held.get(slot))
        else:
            kept = slot in held and tier.keep(held[slot], slot)
            store.write_slot(slot, bytes([key]) * SLOT)
        if slot in held and before[0] - before[1] < places:
            assert kept, "there was room"
        held[slot] = key
        assert key not in tier and len(tier) <= places
        if random.random() < 0.5:
            assert content(device, store.slot_for_read(slot).pointer) == bytes([key]) * SLOT
    for slot, key in held.items():
        assert content(device, store.slot_for_read(slot).pointer) == bytes([key]) * SLOT


def test_the_coldest_gives_way_and_the_colder_newcomer_is_not_kept() -> None:
    store = DeviceExpertSlotStore(FakeDevice(), 1, SLOT)
    tier = HostTier(store, 2, np.array([5.0, 1.0, 3.0, 0.5]))
    assert tier.keep(0, 0) and tier.keep(1, 0)
    assert not tier.keep(3, 0) and 1 in tier
    assert tier.keep(2, 0)
    assert 0 in tier and 2 in tier and 1 not in tier


def test_places_are_divided_by_what_has_no_slot_and_refused_beyond_memory() -> None:
    model = load_model(GGUFFile.open(ORACLE / MODEL)) if FIXTURES else pytest.skip("needs the oracle fixtures")
    plan = plan_slots(size_classes(model.towers, 1), parse_budget("50%"), model.hp.top_k)
    absent = sum(c.num_experts for c in plan.classes) - plan.total_slots
    assert sum(tier_places(plan, ExpertBudget("auto"), 1 << 40)) == absent
    assert sum(tier_places(plan, ExpertBudget("bytes"), 1 << 40)) == 0
    assert 0 < sum(tier_places(plan, ExpertBudget("percent", 50), 1 << 40)) <= absent / 2
    assert sum(tier_places(plan, ExpertBudget("auto"), 0)) == 0
    with pytest.raises(CapacityError, match="--host-cache"):
        tier_places(plan, ExpertBudget("percent", 100), 1 << 16)


@pytest.mark.shared
@needs_fixtures
@pytest.mark.skipif(not available, reason="needs g++")
@pytest.mark.parametrize("host_cache", ["auto", "2", "off"])
def test_answers_are_the_same_and_what_fits_is_read_once(host_cache: str) -> None:
    path = ORACLE / MODEL
    model = load_model(GGUFFile.open(path))
    fewest = model.hp.top_k * len(size_classes(model.towers, 1))
    experts = sum(tower.num_experts for tower in model.towers.values())
    found, totals = [], []
    for budget in (str(fewest), "100%"):
        stats = ExpertStats(every=0, emit=lambda line: None)
        how = {"budget": budget, "host_cache": host_cache, "max_rows": 12, "cells": cells_of(2), "stats": stats}
        with installed(FakeDevice()), open_forward(path, device="cuda", **how) as forward:  # type: ignore[arg-type]
            found.append(logits_of(forward, 12, 2))
        totals.append(stats.total())
    assert np.array_equal(*found)
    streamed, resident = totals
    assert resident.lifted == resident.kept == 0
    assert streamed.fills == streamed.misses + streamed.lookahead_reads + streamed.preloads
    assert streamed.exhausted == 0
    if host_cache == "off":
        assert streamed.lifted == streamed.kept == 0
    else:
        assert 0 < streamed.lifted <= streamed.kept <= streamed.evictions
    if host_cache == "auto":
        assert streamed.fills <= experts, "an expert was read again though the host had room for it"
        assert streamed.kept == streamed.evictions
