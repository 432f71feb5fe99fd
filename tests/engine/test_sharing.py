"""Prefix reuse and the shared KV budget: what is saved, what is given up first, and that no token changes by it."""

from __future__ import annotations

import numpy as np
import pytest

from expertserve.engine.prefix import PrefixCache, common_prefix
from expertserve.engine.request import SamplingParams
from expertserve.kv.cache import KVCells
from expertserve.kv.states import NO_STATE, StateSlots
from tests.engine.conftest import MakeRig, Rig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def run_one(rig: Rig, name: str, tokens: list[int], count: int = 4) -> Client:
    client = Client(name, tokens, greedy(count))
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(tokens, client.request.params))
    return client


def cached(client: Client) -> int:
    assert client.finish is not None
    return client.finish.usage.cached_tokens


def test_the_next_turn_of_a_chat_evaluates_only_what_is_new(make_rig: MakeRig) -> None:
    rig = make_rig(context=512)
    conversation = prompt(1, 100)
    first = run_one(rig, "turn1", conversation, 10)
    conversation += first.tokens + prompt(2, 20)
    rows_before = rig.engine.snapshot()["rows"]
    second = run_one(rig, "turn2", conversation, 10)
    assert (cached(first), cached(second)) == (0, 109)  # the last token sampled was never evaluated
    assert rig.engine.snapshot()["rows"] - rows_before == 21 + 9
    assert_nothing_leaks(rig.engine)


def test_an_equal_prompt_evaluates_one_token(make_rig: MakeRig) -> None:
    rig = make_rig()
    run_one(rig, "a", prompt(1, 60))
    assert cached(run_one(rig, "b", prompt(1, 60))) == 59


def test_a_recurrent_model_starts_from_the_states_it_kept(make_rig: MakeRig) -> None:
    rig = make_rig(context=512, state_slots=20)
    conversation = prompt(1, 100)
    first = run_one(rig, "turn", conversation, 10)
    assert cached(run_one(rig, "again", conversation, 10)) == 99
    assert cached(run_one(rig, "next turn", conversation + first.tokens + prompt(2, 20), 10)) == 109
    assert cached(run_one(rig, "another answer", conversation + prompt(3, 20), 10)) == 99
    assert cached(run_one(rig, "a shorter one", conversation[:60], 10)) == 0
    assert cached(run_one(rig, "of one token", [7], 3)) == 0
    assert_nothing_leaks(rig.engine)


def test_states_are_given_up_before_a_running_sequence_goes_without(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=4, state_slots=9)
    for i in range(12):
        run_one(rig, str(i), prompt(i, 30))
    assert cached(run_one(rig, "recent", prompt(11, 30))) == 29
    assert cached(run_one(rig, "old", prompt(0, 30))) == 0
    clients = [Client(f"c{i}", prompt(20 + i, 40), greedy(30)) for i in range(4)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    assert_nothing_leaks(rig.engine)


def test_a_prefix_is_cut_to_a_state_and_goes_with_its_last_one() -> None:
    kv, states = KVCells(256), StateSlots(4)
    cache = PrefixCache(kv, states)
    tokens = np.arange(100, dtype=np.int32)
    slots = {at: states.allocate() for at in (40, 100)}
    cache.add(tokens, kv.allocate(100), dict(slots))
    cells, state = cache.take(tokens, 99, ())
    assert (len(cells), state) == (40, slots[40]) and states.refs[state] == 2
    cache.give_back(cells)
    states.release(state)
    cache.reclaim(157)
    assert kv.free == 157 and states.free == 3
    cells, state = cache.take(tokens[:30], 30, ())
    assert (len(cells), state) == (0, NO_STATE)
    assert cache.drop_state() and not cache.drop_state()
    cache.check_integrity()
    assert kv.free == 256 and states.free == 4


def test_children_of_one_prompt_share_it_from_the_first_step(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=8, chunk=32)
    clients = [Client(str(i), prompt(1, 50), SamplingParams(seed=i, max_tokens=20, ignore_eos=True)) for i in range(4)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert [cached(client) for client in clients] == [0, 49, 49, 49]
    assert rig.forward.batches[:2] == [(32, 0, 0), (18 + 3, 0, 4)]
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    assert len({tuple(client.tokens) for client in clients}) == 4
    assert_nothing_leaks(rig.engine)


def test_a_running_sequence_lends_its_prefix_and_may_end_first(make_rig: MakeRig) -> None:
    rig = make_rig()
    lender = Client("lender", prompt(1, 40), greedy(30))
    rig.engine.submit(lender.request)
    for _ in range(6):
        rig.engine.tick()
    borrower = Client("borrower", prompt(1, 40) + lender.tokens[:2] + prompt(5, 8), greedy(40))
    rig.engine.submit(borrower.request)
    rig.engine.tick()
    rig.engine.cancel("lender")
    run_to_end(rig.engine)
    assert cached(borrower) == 42
    assert_got(borrower, rig.oracle.expect(borrower.request.prompt, borrower.request.params))
    assert_nothing_leaks(rig.engine)


def test_cached_prefixes_go_before_anything_running_does(make_rig: MakeRig) -> None:
    rig = make_rig(cells=256, context=256)
    run_one(rig, "old", prompt(1, 150))
    run_one(rig, "big", prompt(2, 200), 40)
    assert rig.engine.snapshot()["preemptions"] == 0
    # the end of the old prefix went, its beginning did not
    assert 0 < cached(run_one(rig, "again", prompt(1, 150))) < 149


def test_the_least_recently_used_prefix_goes_first(make_rig: MakeRig) -> None:
    rig = make_rig(cells=256, context=256)
    for name, seed in (("a", 1), ("b", 2), ("a again", 1)):
        run_one(rig, name, prompt(seed, 80))
    run_one(rig, "c", prompt(3, 120))
    assert cached(run_one(rig, "a kept", prompt(1, 80))) == 79
    assert cached(run_one(rig, "b gone", prompt(2, 80))) < 79


def test_the_newest_sequence_is_preempted_and_loses_no_token(make_rig: MakeRig) -> None:
    rig = make_rig(cells=256, context=256, parallel=3)
    clients = [Client(str(i), prompt(i, 60), greedy(100)) for i in range(3)]
    for client in clients:
        rig.engine.submit(client.request)
    order: list[int] = []
    for i, client in enumerate(clients):
        client.on_token = lambda i=i: order.append(i)  # type: ignore[misc]
    run_to_end(rig.engine)
    snapshot = rig.engine.snapshot()
    assert snapshot["preemptions"] > 0
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    assert [max(k for k, x in enumerate(order) if x == i) for i in range(3)] == sorted(
        max(k for k, x in enumerate(order) if x == i) for i in range(3)
    ), "an older sequence ended after a newer one of equal length"
    # evaluated again only as far as cells were short: much less than one whole sequence for each preemption
    assert snapshot["rows"] < 3 * 160 + 160 + 8 * snapshot["preemptions"]
    assert_nothing_leaks(rig.engine)


@pytest.mark.parametrize("echo", [None, 3])
def test_preemption_in_the_middle_of_a_prompt_changes_nothing(make_rig: MakeRig, echo: int | None) -> None:
    rig = make_rig(cells=256, context=256, parallel=2, chunk=5)
    old = Client("old", prompt(1, 10), greedy(200))
    rig.engine.submit(old.request)
    for _ in range(40):
        rig.engine.tick()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=echo)
    new = Client("new", prompt(2, 180), params)
    rig.engine.submit(new.request)
    run_to_end(rig.engine)
    assert rig.engine.snapshot()["preemptions"] > 0
    for client in (old, new):
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    if echo:
        logits = rig.oracle.logits(new.request.prompt).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert new.prompt_logprobs is not None and len(new.prompt_logprobs) == 180
        for index, got in enumerate(new.prompt_logprobs[1:]):
            assert got is not None
            assert got.logprob == pytest.approx(expected[index, new.request.prompt[index + 1]], abs=1e-5)
    assert_nothing_leaks(rig.engine)


def test_a_preempted_sequence_loses_the_row_it_already_had_in_the_step(make_rig: MakeRig) -> None:
    # the memory for logits holds an old prompt back, so a newer request decodes beside it and takes its room
    rig = make_rig(cells=256, context=256, parallel=2, max_outputs=4)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    old, new = Client("old", prompt(1, 200), params), Client("new", prompt(2, 5), greedy(100))
    for client in (old, new):
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert rig.engine.snapshot()["preemptions"] > 0 and old.finish is not None
    for client in (old, new):
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    assert_nothing_leaks(rig.engine)


def test_cancelling_frees_all_cells_before_the_next_step(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=2)
    clients = [Client(str(i), prompt(i, 40), greedy(100)) for i in range(3)]
    for client in clients:
        rig.engine.submit(client.request)
    for _ in range(5):
        rig.engine.tick()
    for client in clients:  # running ones and a queued one
        rig.engine.cancel(client.request.id)
    steps = rig.engine.snapshot()["steps"]
    assert not rig.engine.tick()
    snapshot = rig.engine.snapshot()
    assert snapshot["kv_cells_free"] == snapshot["kv_cells"] and snapshot["steps"] == steps
    for client in clients:
        assert client.finish is not None and client.finish.reason == "cancelled"
        expected = rig.oracle.expect(client.request.prompt, client.request.params)
        assert client.tokens == expected.tokens[: len(client.tokens)]
    assert clients[0].tokens and not clients[2].tokens
    rig.engine.cancel("0")
    rig.engine.cancel("never heard of")
    assert not rig.engine.tick()


def test_the_attention_length_follows_the_batch_and_not_the_cache(make_rig: MakeRig) -> None:
    rig = make_rig(context=1024)
    first = Client("first", prompt(1, 100), greedy(300))
    rig.engine.submit(first.request)
    rig.engine.submit(Client("long", prompt(2, 600), greedy(1)).request)
    while rig.engine.snapshot()["finished"] == 0:
        rig.engine.tick()
    rig.engine.cancel("first")
    lengths: list[int] = []
    rig.forward.fault = lambda batch: lengths.append(batch.mask.shape[1])
    run_one(rig, "short", prompt(3, 20))
    assert rig.engine.snapshot()["kv_cells_cached"] > 600
    assert set(lengths) == {256}, "cells that only the cache uses made attention longer"


def test_a_prefix_that_another_covers_is_not_kept_twice() -> None:
    kv = KVCells(256)
    cache = PrefixCache(kv, StateSlots(0))
    tokens = np.arange(30, dtype=np.int32)
    for length in (10, 30, 20, 30):
        cache.add(tokens[:length], kv.allocate(length), {})
        cache.check_integrity()
    assert (cache.tokens, 256 - kv.free, cache.evictable) == (30, 30, 30)
    cache.clear()
    assert kv.free == 256


def test_a_prefix_in_use_outlives_one_that_is_not() -> None:
    kv = KVCells(256)
    cache = PrefixCache(kv, StateSlots(0))
    used, unused = np.arange(100, dtype=np.int32), np.arange(100, 200, dtype=np.int32)
    for tokens in (used, unused):
        cache.add(tokens, kv.allocate(100), {})
    cache.give_back(cache.take(used, 50, ())[0])
    cache.reclaim(156)
    assert len(cache.take(used, 100, ())[0]) == 100
    assert len(cache.take(unused, 100, ())[0]) == 0


def test_a_running_prompt_lends_no_more_than_it_has_cells_for() -> None:
    kv = KVCells(256)
    cache = PrefixCache(kv, StateSlots(0))
    tokens = np.arange(100, dtype=np.int32)
    kept = kv.allocate(50)
    cache.add(tokens[:50], kept, {})
    begun = kv.allocate(10)
    assert cache.take(tokens, 99, [(tokens, begun)])[0].tolist() == kept.tolist()


def test_reclaiming_frees_shared_ends_only_when_every_holder_is_gone() -> None:
    kv = KVCells(256)
    cache = PrefixCache(kv, StateSlots(0))
    base = kv.allocate(100)
    cache.add(np.arange(100, dtype=np.int32), base, {})
    other = np.concatenate((np.arange(80), [1, 2])).astype(np.int32)
    taken, _ = cache.take(other, 81, ())
    assert taken.tolist() == base[:80].tolist()
    cache.add(other, np.concatenate((taken, kv.allocate(2))), {})
    assert cache.evictable == 102
    running, _ = cache.take(other, 50, ())
    assert cache.evictable == 52
    cache.reclaim(256)
    cache.check_integrity()
    assert kv.free == 206 and cache.evictable == 0
    cache.give_back(running)
    assert kv.free == 256


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([2], [1], 0), ([7], [7], 1)],
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == length
