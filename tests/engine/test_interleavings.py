"""Whatever happens beside it, a request gets its tokens: random arrivals, cancellations, faults and tight memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from expertserve.engine.request import SamplingParams
from expertserve.errors import ExpertReadError
from expertserve.models.batch import Batch
from tests.engine.conftest import MakeRig, Rig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end

POISON = 95
ROOTS = [np.random.default_rng(seed).integers(0, POISON, 90).tolist() for seed in range(3)]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repeat_penalty=rng.choice([1.0, 1.2]),
        repeat_last_n=rng.choice([64, 8, -1]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias={POISON: -100.0} if rng.random() < 0.9 else {},
        seed=rng.randrange(2**40),
        stop=tuple(rng.sample(["aab", "bcab", "ccaa", "ä", "abca", "bb"], rng.choice([0, 0, 1, 3]))),
        max_tokens=rng.choice([0, 1, 5, 20, 60, None]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def random_prompt(rng: random.Random, known: list[Client]) -> list[int]:
    """A fresh prompt, one with a common beginning, or the next turn of an earlier request."""
    tail = [rng.randrange(POISON) for _ in range(rng.choice([0, 1, 3, 20]))]
    if known and rng.random() < 0.4:
        earlier = rng.choice(known)
        start = [token for token in earlier.request.prompt + earlier.tokens if token != POISON]
    else:
        root = rng.choice(ROOTS)
        start = root[: rng.randrange(1, len(root))]
    return (start + tail)[:180]


def random_traffic(rig: Rig, rng: random.Random, count: int) -> tuple[list[Client], set[str]]:
    """Submits and cancels at random moments of a run; returns the clients, and the ids that were cancelled."""
    clients: list[Client] = []
    cancelled: set[str] = set()
    while len(clients) < count or not all(client.ended for client in clients):
        for _ in range(rng.choice([0, 0, 0, 1, 2, 6]) if len(clients) < count else 0):
            client = Client(f"r{len(clients)}", random_prompt(rng, clients), random_params(rng))
            clients.append(client)
            rig.engine.submit(client.request)
        if clients and rng.random() < 0.04:
            victim = rng.choice(clients)
            if not victim.ended:
                cancelled.add(victim.request.id)
            rig.engine.cancel(victim.request.id)
        if rng.random() < 0.01:
            rig.engine.clear_prefix_cache()
        rig.engine.tick()
        rig.engine.check_integrity()
    return clients, cancelled


def assert_all_got_theirs(rig: Rig, clients: list[Client], cancelled: set[str]) -> None:
    for client in clients:
        expected = rig.oracle.expect(client.request.prompt, client.request.params)
        if client.error is not None:
            evaluated = client.request.prompt + client.tokens
            assert isinstance(client.error.error, ExpertReadError) and POISON in evaluated
            assert client.tokens == expected.tokens[: len(client.tokens)]
        elif client.request.id in cancelled and client.finish is not None and client.finish.reason == "cancelled":
            assert client.tokens == expected.tokens[: len(client.tokens)]
            assert expected.text.startswith(client.text)
        else:
            assert_got(client, expected)


def assert_200_get_theirs(rig: Rig, seed: int) -> tuple[dict[str, float], list[Client]]:
    """Serves 200 requests at random, some of which meet a read error; the engine's counters and the clients."""

    def fault(batch: Batch) -> None:
        if POISON in batch.tokens:
            raise ExpertReadError("an expert could not be read")

    rig.forward.fault = fault
    clients, cancelled = random_traffic(rig, random.Random(seed), 200)
    assert_all_got_theirs(rig, clients, cancelled)
    counts = rig.engine.snapshot()
    assert counts["cancelled"] > 0 and counts["errors"] > 0 and counts["cached_tokens"] > 0, "the traffic was too tame"
    assert all(client.ended for client in clients)
    assert_nothing_leaks(rig.engine)
    return counts, clients


# cells: 1792 never short; 512 often; 256 hardly room for two
@pytest.mark.parametrize(("seed", "cells", "parallel", "chunk"), [(1, 1792, 8, 48), (2, 512, 8, 7), (3, 256, 4, 64)])
def test_200_requests_at_random_each_get_what_the_plain_loop_gives(
    make_rig: MakeRig, seed: int, cells: int, parallel: int, chunk: int
) -> None:
    rig = make_rig(cells=cells, context=224, parallel=parallel, chunk=chunk, max_outputs=parallel + 6)
    counts, clients = assert_200_get_theirs(rig, seed)
    assert (counts["preemptions"] > 0) == (cells < 1000)
    assert len(clients) >= 200


# states: two a sequence and four more, or hardly any more
@pytest.mark.parametrize(
    ("seed", "cells", "parallel", "chunk", "states"), [(4, 1792, 8, 48, 20), (5, 512, 8, 7, 17), (6, 256, 4, 64, 12)]
)
def test_200_requests_at_random_of_a_recurrent_model_never_see_a_state_that_is_not_theirs(
    make_rig: MakeRig, seed: int, cells: int, parallel: int, chunk: int, states: int
) -> None:
    rig = make_rig(
        cells=cells, context=224, parallel=parallel, chunk=chunk, max_outputs=parallel + 6, state_slots=states
    )
    assert_200_get_theirs(rig, seed)


# drafts of 1 to 4 tokens, on a model with state and on one without, cells and slots hardly enough
@pytest.mark.parametrize(
    ("seed", "cells", "parallel", "chunk", "states", "drafts"),
    [(7, 1792, 8, 32, 0, 3), (8, 512, 8, 7, 50, 4), (9, 256, 4, 32, 13, 1), (10, 512, 4, 20, 18, 2)],
)
def test_200_requests_at_random_get_the_same_tokens_with_drafts(
    make_rig: MakeRig, seed: int, cells: int, parallel: int, chunk: int, states: int, drafts: int
) -> None:
    rig = make_rig(
        cells=cells,
        context=224,
        parallel=parallel,
        chunk=chunk,
        state_slots=states,
        draft="mtp-always",
        draft_tokens=drafts,
    )
    counts, _ = assert_200_get_theirs(rig, seed)
    assert counts["drafts_accepted"] > 0.1 * counts["drafts_judged"] > 100  # most are sampled from nearly flat logits


def test_eight_streams_equal_themselves_alone(make_rig: MakeRig) -> None:
    alone: list[list[int]] = []
    prompts = [ROOTS[i % 3][: 20 + 5 * i] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for tokens in prompts:
        rig = make_rig(parallel=1)
        client = Client("alone", tokens, params)
        rig.engine.submit(client.request)
        run_to_end(rig.engine)
        alone.append(client.tokens)
    rig = make_rig(parallel=8, cells=512)
    together = [Client(str(i), tokens, params) for i, tokens in enumerate(prompts)]
    for client in together:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert [client.tokens for client in together] == alone
    assert max(decodes for _, decodes, _ in rig.forward.batches) > 1
