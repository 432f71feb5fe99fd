"""The sampler against plain definitions of its filters, and its draws against the distribution they claim."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertserve.engine.logprobs import token_logprobs
from expertserve.engine.request import SamplingParams
from expertserve.engine.sampler import Sampler, largest
from expertserve.errors import ExpertServeError

EMPTY = np.empty(0, np.int32)


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def distribution(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after top-k, top-p, min-p and temperature, by their definitions over a full sort."""
    values = logits.astype(np.float64)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        reached, kept = 0.0, []
        for token, probability in zip(order, softmax(values[order]), strict=True):
            kept.append(token)
            reached += probability
            if reached >= params.top_p:
                break
        order = kept
    order = [i for i in order if params.min_p == 0 or values[i] >= values.max() + math.log(params.min_p)]
    result = np.zeros(len(values))
    result[order] = softmax(values[order] / params.temperature)
    return result


def chi_square_is_plausible(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Whether the statistic lies under its 1 - 1e-6 quantile (Wilson-Hilferty); rare tokens are pooled."""
    assert not counts[probabilities == 0].any(), "a token outside the candidates was drawn"
    expected = probabilities * counts.sum()
    common = expected >= 5
    pooled_counts = np.append(counts[common], counts[~common].sum())
    pooled = np.append(expected[common], expected[~common].sum())
    pooled_counts, pooled = pooled_counts[pooled > 0], pooled[pooled > 0]
    freedom = len(pooled) - 1
    if not freedom:
        return True
    statistic = ((pooled_counts - pooled) ** 2 / pooled).sum()
    return bool(statistic < freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3)


FILTERS = {
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(seed=2, temperature=1.7),
    "cold": SamplingParams(seed=3, temperature=0.4),
    "top_k": SamplingParams(seed=4, top_k=7),
    "top_p": SamplingParams(seed=5, top_p=0.8),
    "min_p": SamplingParams(seed=6, min_p=0.1),
    "all": SamplingParams(seed=7, top_k=50, top_p=0.9, min_p=0.02, temperature=0.8),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [40, 1500])
def test_draws_follow_the_filtered_distribution(name: str, vocab_size: int) -> None:
    params = FILTERS[name]
    logits = (np.random.default_rng(0).standard_normal(vocab_size) * 2).astype(np.float32)
    sampler = Sampler(params)
    draws = [sampler.sample(logits, EMPTY) for _ in range(3000)]
    counts = np.bincount(draws, minlength=vocab_size)
    assert chi_square_is_plausible(counts, distribution(logits, params))


def test_the_chi_square_check_can_fail() -> None:
    logits = (np.random.default_rng(0).standard_normal(40) * 2).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=1, temperature=1.25))
    counts = np.bincount([sampler.sample(logits, EMPTY) for _ in range(3000)], minlength=40)
    assert not chi_square_is_plausible(counts, distribution(logits, SamplingParams()))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 30, 200, 5000, 20000]),
    st.sampled_from([0.01, 0.5, 3.0, 20.0]),
    st.sampled_from([0, 1, 5, 300]),
    st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_candidates_are_those_of_the_definition(
    seed: int, size: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    ids, values = Sampler(params)._candidates(logits, float(logits.max()))
    ids = np.arange(size) if ids is None else ids
    got = np.zeros(size, bool)
    got[ids] = np.isfinite(values)
    expected = distribution(logits, params) > 0
    if (got != expected).any():  # float32 against float64: only tokens at the very edge of top-p may differ
        assert 0 < top_p < 1
        probabilities = softmax(logits.astype(np.float64))
        assert probabilities[got != expected].sum() < 1e-5
    assert np.array_equal(np.asarray(values)[np.isfinite(values)], logits[ids][np.isfinite(values)])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3000), st.booleans(), st.data())
def test_largest_agrees_with_a_stable_sort(seed: int, size: int, ties: bool, data: st.DataObject) -> None:
    row = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    if ties:
        row = np.round(row)
    k = data.draw(st.integers(1, min(size, 60)))
    assert largest(row, k).tolist() == sorted(range(size), key=lambda i: (-row[i], i))[:k]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert Sampler(SamplingParams(temperature=0)).sample(logits, EMPTY) == 1
    assert Sampler(SamplingParams(temperature=1, top_k=1, seed=0)).sample(logits, EMPTY) == 1


def test_equal_seeds_draw_equally_and_other_seeds_do_not() -> None:
    logits = np.zeros(1000, np.float32)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.sample(logits, EMPTY) for _ in range(5)]

    assert draws(5) == draws(5) and draws(-5) == draws(-5)
    assert len({tuple(draws(seed)) for seed in (5, 6, -5, None, None)}) == 5


def test_penalties_look_at_the_last_tokens_only() -> None:
    logits = np.array([2.0, -2.0, 1.9, 0.0], np.float32)
    history = np.array([0, 0, 1, 0, 2, 2], np.int32)

    def adjusted(**settings: float) -> list[float]:
        sampler = Sampler(SamplingParams(**settings))  # type: ignore[arg-type]
        return [round(float(x), 4) for x in sampler._adjusted(logits, history)]

    assert adjusted(repeat_penalty=2.0) == [1.0, -4.0, 0.95, 0.0]
    assert adjusted(repeat_penalty=2.0, repeat_last_n=2) == [2.0, -2.0, 0.95, 0.0]
    assert adjusted(repeat_penalty=2.0, repeat_last_n=-1) == [1.0, -4.0, 0.95, 0.0]
    assert adjusted(repeat_penalty=2.0, repeat_last_n=0) == [2.0, -2.0, 1.9, 0.0]
    assert adjusted(frequency_penalty=0.5) == [0.5, -2.5, 0.9, 0.0]
    assert adjusted(presence_penalty=0.5) == [1.5, -2.5, 1.4, 0.0]
    assert adjusted(presence_penalty=0.5, frequency_penalty=1.0, repeat_last_n=3) == [0.5, -2.0, -0.6, 0.0]
    assert logits.tolist() == [2.0, -2.0, np.float32(1.9), 0.0], "the model's logits were changed"


def test_logit_bias_comes_before_the_penalties() -> None:
    logits = np.array([1.0, 0.5], np.float32)
    sampler = Sampler(SamplingParams(logit_bias={0: 3.0}, repeat_penalty=2.0))
    assert sampler._adjusted(logits, np.array([0], np.int32)).tolist() == [2.0, 0.5]


def test_a_bias_of_minus_infinity_bans_a_token() -> None:
    logits = np.array([9.0, 0.0, 0.0], np.float32)
    for params in (
        SamplingParams(seed=0, logit_bias={0: -math.inf}),
        SamplingParams(seed=0, logit_bias={0: -math.inf}, top_p=0.9),
        SamplingParams(temperature=0, logit_bias={0: -math.inf}),
    ):
        sampler = Sampler(params)
        assert all(sampler.sample(logits, EMPTY) for _ in range(20))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=0, top_k=2, top_p=0.5)])
def test_logits_that_are_no_numbers_are_an_error_and_not_a_token(value: float, params: SamplingParams) -> None:
    logits = np.array([1.0, value, 0.0, 0.5], np.float32)
    with pytest.raises(ExpertServeError, match="no token can be sampled"):
        Sampler(params).sample(logits, EMPTY)


def test_top_p_is_decided_before_the_temperature() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    sampler = Sampler(SamplingParams(seed=0, top_p=0.6, temperature=100.0))
    assert {sampler.sample(logits, EMPTY) for _ in range(50)} == {0}


def test_logprobs_are_of_the_raw_distribution_with_the_best_first() -> None:
    logits = (np.random.default_rng(3).standard_normal((19, 500)) * 4).astype(np.float32)
    chosen = list(range(19))
    expected = np.log(np.array([softmax(row.astype(np.float64)) for row in logits]))
    for index, got in enumerate(token_logprobs(logits, chosen, 3)):
        best = sorted(range(500), key=lambda i: (-logits[index, i], i))[:3]
        assert got.token_id == chosen[index]
        assert got.logprob == pytest.approx(expected[index, chosen[index]], abs=1e-5)
        assert [token for token, _ in got.top] == best
        assert [value for _, value in got.top] == pytest.approx(expected[index, best], abs=1e-5)
    assert [row.top for row in token_logprobs(logits[:2], [4, 5], 0)] == [[], []]
    assert len(token_logprobs(logits[:1], [4], 500)[0].top) == 500


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"temperature": 1e300}, set(range(8))),
        ({"logit_bias": {7: -1e300}}, set(range(7))),
        ({"repeat_penalty": 1e-6}, set(range(8))),
        ({"repeat_penalty": 1e6}, set(range(8))),
    ],
)
def test_numbers_beyond_any_use_still_give_a_token(params: dict[str, Any], possible: set[int]) -> None:
    logits, history = np.linspace(-2, 2, 8).astype(np.float32), np.arange(4, dtype=np.int32)
    drawn = {Sampler(SamplingParams(seed=seed, **params)).sample(logits, history) for seed in range(40)}
    assert drawn <= possible and drawn
