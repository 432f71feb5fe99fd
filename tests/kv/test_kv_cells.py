"""KV cells against a plain dictionary of counts, and masks against the definition of causal attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.errors import CapacityError
from expertserve.kv.cache import KVCells, attention_mask


def test_the_lowest_free_cells_come_first() -> None:
    kv = KVCells(512)
    first = kv.allocate(10)
    assert first.tolist() == list(range(10))
    kv.release(first[2:5])
    assert kv.allocate(5).tolist() == [2, 3, 4, 10, 11]
    kv.check_integrity()


def test_a_shared_cell_is_free_only_after_its_last_holder() -> None:
    kv = KVCells(256)
    cells = kv.allocate(4)
    kv.retain(cells[:2])
    kv.release(cells)
    assert kv.free == 254
    assert kv.allocate(2).tolist() == [2, 3]
    kv.release(cells[:2])
    assert kv.free == 254
    kv.check_integrity()


def test_a_request_for_more_than_is_free_takes_nothing() -> None:
    kv = KVCells(256)
    kv.allocate(200)
    with pytest.raises(CapacityError, match="57 KV cells are needed and 56 of 256 are free"):
        kv.allocate(57)
    assert len(kv.allocate(56)) == 56
    assert kv.free == 0


@pytest.mark.parametrize("capacity", [0, -256, 100, 257])
def test_a_capacity_that_is_no_whole_number_of_buckets_is_refused(capacity: int) -> None:
    with pytest.raises(CapacityError, match="positive multiple of 256"):
        KVCells(capacity)


def test_misuse_of_free_cells_is_noticed() -> None:
    kv = KVCells(256)
    cells = kv.allocate(1)
    kv.release(cells)
    with pytest.raises(AssertionError):
        kv.release(cells)
    with pytest.raises(AssertionError):
        kv.retain(cells)


def test_the_bucket_grows_in_steps_and_shrinks_with_what_is_released() -> None:
    kv = KVCells(1024)
    assert kv.bucket() == 256
    low, high = kv.allocate(256), kv.allocate(1)
    assert (kv.high_water, kv.bucket()) == (257, 512)
    kv.release(high)
    assert (kv.high_water, kv.bucket()) == (256, 256)
    kv.release(low)
    assert kv.high_water == 0
    assert [kv.bucket(high) for high in (0, 1, 256, 257, 1024)] == [256, 256, 256, 512, 1024]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 400)), max_size=60))
def test_counts_follow_a_plain_model(operations: list[tuple[str, int]]) -> None:
    kv = KVCells(768)
    counts = dict.fromkeys(range(768), 0)
    held: list[np.ndarray] = []
    for name, number in operations:
        if name == "allocate":
            lowest = [cell for cell, count in counts.items() if not count][:number]
            if len(lowest) < number:
                with pytest.raises(CapacityError):
                    kv.allocate(number)
                continue
            cells = kv.allocate(number)
            assert cells.tolist() == lowest
        elif held:
            cells = held[number % len(held)]
            if name == "retain":
                cells = cells[: number + 1]
                kv.retain(cells)
            else:
                held = [c for i, c in enumerate(held) if i != number % len(held)]
                kv.release(cells)
        else:
            continue
        if name != "release":
            held.append(cells)
        for cell in cells.tolist():
            counts[cell] += -1 if name == "release" else 1
        kv.check_integrity()
        assert kv.refs.tolist() == list(counts.values())
        assert kv.free == sum(not count for count in counts.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_sees_its_own_sequence_up_to_itself_and_nothing_else(data: st.DataObject) -> None:
    order = np.random.default_rng(data.draw(st.integers(0, 2**32))).permutation(256).astype(np.int64)
    if data.draw(st.booleans()):
        order.sort()
    rows, taken = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 40))
        rows.append((order[taken : taken + length], data.draw(st.integers(0, length - 1))))
        taken += length
    mask = attention_mask(rows, 256)
    expected = []
    for cells, first_new in rows:
        for index in range(first_new, len(cells)):
            seen = set(cells[: index + 1].tolist())
            expected.append([0.0 if cell in seen else -np.inf for cell in range(256)])
    assert mask.dtype == np.float16
    assert mask.tolist() == expected
    stale = np.zeros_like(mask)
    assert attention_mask(rows, 256, stale) is stale
    assert stale.tolist() == expected
