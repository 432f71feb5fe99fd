"""Drafts of real models, right ones and wrong ones: no token changes, on any budget, and every forward is a step."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.engine.draft import DraftMode, scratch_cells
from expertserve.engine.engine import Engine
from expertserve.engine.request import SamplingParams
from expertserve.engine.states import slots_for
from expertserve.experts.stats import ExpertStats
from expertserve.kv.cache import KVCells
from tests.draft_model import make_agreeable
from tests.engine.fakes import Client, PieceTokenizer, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE

NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
LENGTH = 200
FIXTURES = ["qwen35moe/model-f16.gguf", "qwen35moe-fused/model-q4_k.gguf", "qwen3next-mtp/model-q4_k.gguf"]
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (ORACLE / FIXTURES[0]).exists(), reason="needs the oracle fixtures beside the checkout"),
]


@pytest.fixture(scope="module")
def agreeable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    return make_agreeable(ORACLE / "qwen35moe" / "model-f16.gguf", folder / "agreeable.gguf", scale=0.12)


def answers(
    path: Path,
    drafts: int,
    *,
    budget: str = "100%",
    params: SamplingParams | None = None,
    prompts: int = 1,
    mode: DraftMode = "mtp-always",
) -> tuple[list[Client], dict[str, float], ExpertStats]:
    """What `prompts` requests at once get, the engine's counters, and the lane's."""
    params = params or SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_forward(
        path,
        kv_type="f32",
        flash=False,
        budget=budget,
        lookahead="off",
        stats=stats,
        draft=drafts > 0,
        max_rows=96,
        cells=1024 + scratch_cells(prompts, drafts),
        state_slots=slots_for(prompts, drafts),
    ) as forward:
        engine = Engine(
            forward,
            PieceTokenizer(forward.vocab_size),
            parallel=prompts,
            context=512,
            chunk=24,
            draft=mode if drafts else "off",
            draft_tokens=drafts,
            on_drafts=stats.count_drafts,
        )
        clients = [Client(str(i), prompt(i, 30 + 5 * i), params) for i in range(prompts)]
        for client in clients:
            engine.submit(client.request)
        run_to_end(engine)
        assert_nothing_leaks(engine)
        return clients, engine.snapshot(), stats


def assert_same(got: Client, expected: Client) -> None:
    for at, (a, b) in enumerate(zip(got.tokens, expected.tokens, strict=True)):
        if a != b:
            best = expected.logprobs[at]
            assert best is not None and best.top[0][1] - best.top[1][1] < NEAR_TIE, f"token {at} is {a}, not {b}"
            return


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_right_drafts_change_no_token_and_are_mostly_taken(agreeable: Path, drafts: int) -> None:
    (expected,), _, plain = answers(agreeable, 0)
    (got,), counts, stats = answers(agreeable, drafts)
    assert_same(got, expected)
    total = stats.total()
    assert counts["drafts_accepted"] == total.accepted and counts["drafts_judged"] == total.drafted
    assert 0.5 < total.accepted / total.drafted < 1.0, "the drafts are always right, or hardly ever"
    judged = counts["steps"] - 2  # without the prompt's chunks
    assert judged == LENGTH - 1 - total.accepted
    # One step to catch up and draft, one for each further draft, one to judge; drafts end where the answer does.
    assert stats.steps == counts["steps"] + stats.draft_steps
    assert judged * (drafts - 1) < stats.draft_steps <= judged * drafts + 2
    assert counts["steps"] < plain.steps


@pytest.mark.parametrize("fixture", FIXTURES)
def test_wrong_drafts_change_no_token(fixture: str) -> None:
    (expected,), _, _ = answers(ORACLE / fixture, 0)
    (got,), counts, _ = answers(ORACLE / fixture, 3)
    assert_same(got, expected)
    assert counts["drafts_judged"] > 500


@pytest.mark.parametrize("budget", ["3", "50%"])  # one token's experts of a layer are three
def test_streamed_with_drafts_is_resident_with_drafts(agreeable: Path, budget: str) -> None:
    (resident,), resident_counts, _ = answers(agreeable, 3)
    (streamed,), counts, stats = answers(agreeable, 3, budget=budget)
    assert streamed.tokens == resident.tokens and streamed.logprobs == resident.logprobs
    assert counts["drafts_accepted"] == resident_counts["drafts_accepted"]
    assert stats.total().misses > 0 and stats.total().exhausted == 0


def test_several_streams_with_drafts_get_what_each_gets_alone_without(agreeable: Path) -> None:
    expected, _, _ = answers(agreeable, 0, prompts=4)
    got, counts, _ = answers(agreeable, 3, prompts=4)
    for mine, other in zip(got, expected, strict=True):
        assert_same(mine, other)
    assert counts["drafts_accepted"] > 200


def test_sampling_with_drafts_keeps_the_targets_distribution(agreeable: Path) -> None:
    """Of 600 answers the second token, and the third where the second was drafted, against the target's softmax."""
    start, temperature, found = prompt(1, 20), 1.2, []
    with open_forward(agreeable, kv_type="f32", flash=False, draft=True, cells=512 + scratch_cells(1, 2)) as forward:
        first = int(forward(make_batch(start))[-1].argmax())
        second = forward(make_batch([first], 20))[0].copy()
        engine = Engine(
            forward, PieceTokenizer(512), parallel=1, context=256, chunk=64, draft="mtp-always", draft_tokens=2
        )
        for seed in range(600):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=4, ignore_eos=True, forced=(first,), top_k=6
            )
            client = Client(str(seed), start, params)
            engine.submit(client.request)
            run_to_end(engine, check=False)
            found.append(client.tokens[1:3])
        assert engine.snapshot()["drafts_accepted"] > 100
        drafted = int(second.argmax())
        forward(make_batch(start))
        forward(make_batch([first], 20))
        third = forward(make_batch([drafted], 21))[0].copy()
    assert_drawn_from(second, temperature, [token for token, _ in found])
    assert_drawn_from(third, temperature, [token for before, token in found if before == drafted])


def assert_drawn_from(logits: NDArray[np.float32], temperature: float, tokens: list[int]) -> None:
    """Pearson's chi-squared of the tokens against the softmax of the six best logits."""
    best = np.argsort(-logits, kind="stable")[:6]
    odds = np.exp((logits[best] - logits[best[0]]).astype(np.float64) / temperature)
    expected = odds / odds.sum() * len(tokens)
    counts = np.array([tokens.count(int(token)) for token in best])
    assert counts.sum() == len(tokens) > 60 and expected[1] > 5, "too few to judge by"
    statistic = float(((counts - expected) ** 2 / expected)[expected > 5].sum())
    assert statistic < 20.5, (statistic, counts, expected)  # 5 degrees of freedom: one in a thousand


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_the_same_tokens_with_drafts_and_without(agreeable: Path, seed: int) -> None:
    params = SamplingParams(temperature=0.7, top_k=20, seed=seed, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    (expected,), _, _ = answers(agreeable, 0, params=params)
    (got,), counts, _ = answers(agreeable, 3, params=params)
    assert got.tokens == expected.tokens
    assert counts["drafts_accepted"] > 20


@pytest.mark.parametrize("drafts", [0, 3])
def test_200_requests_at_random_get_what_each_gets_alone(agreeable: Path, drafts: int) -> None:
    """Arrivals, cancellations, shared beginnings and too few cells: no sequence sees another's state."""
    rng = random.Random(drafts)
    roots = [prompt(seed, 60) for seed in range(3)]
    alone: dict[tuple[int, ...], Client] = {}
    with open_forward(
        agreeable,
        kv_type="f32",
        flash=False,
        draft=drafts > 0,
        max_rows=64,
        cells=256 + scratch_cells(6, drafts),
        state_slots=slots_for(6, drafts),
    ) as forward:
        tokenizer = PieceTokenizer(forward.vocab_size)

        def engine_of(parallel: int, tokens: int) -> Engine:
            mode: DraftMode = "mtp-always" if tokens else "off"
            sizes = {"parallel": parallel, "context": 160, "chunk": 24, "draft_tokens": tokens}
            return Engine(forward, tokenizer, kv_cells=KVCells(256), draft=mode, **sizes)

        engine, clients, cancelled = engine_of(6, drafts), [], set()
        while len(clients) < 200 or not all(client.ended for client in clients):
            for _ in range(rng.choice([0, 0, 1, 3]) if len(clients) < 200 else 0):
                start = rng.choice(roots)[: rng.choice([5, 20, 60])]
                tokens = start + [rng.randrange(96) for _ in range(rng.choice([0, 0, 2]))]
                clients.append(Client(str(len(clients)), tokens, GREEDY))
                engine.submit(clients[-1].request)
            if clients and rng.random() < 0.05:
                victim = rng.choice(clients)
                if not victim.ended:
                    cancelled.add(victim.request.id)
                    engine.cancel(victim.request.id)
            engine.tick()
            engine.check_integrity()
        assert_nothing_leaks(engine)
        counts = engine.snapshot()
        assert counts["cancelled"] == len(cancelled) > 0 and counts["cached_tokens"] > 500 and counts["preemptions"] > 0
        different = 0
        for client in clients:
            key = tuple(client.request.prompt)
            if key not in alone:
                alone[key] = Client("alone", [*key], GREEDY)
                single = engine_of(1, 0)
                single.submit(alone[key].request)
                run_to_end(single, check=False)
            expected = alone[key]
            for at, (a, b) in enumerate(zip(client.tokens, expected.tokens, strict=False)):
                if a != b:
                    best = expected.logprobs[at]
                    assert best is not None and best.top[0][1] - best.top[1][1] < 2 * NEAR_TIE, (at, a, b)
                    different += 1
                    break
            assert client.request.id in cancelled or len(client.tokens) == len(expected.tokens)
        assert different <= 4
