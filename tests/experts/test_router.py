"""The router's rule against a plain one-row, one-expert-at-a-time statement of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.experts.router import Gating, RouterRule, route

EXPERTS = 16


def by_hand(logits: list[float], rule: RouterRule, bias: list[float]) -> dict[int, float]:
    """The experts of one row and their weights, in float64."""
    if rule.gating is Gating.SIGMOID:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // rule.groups
    worth = {g: sum(sorted(choice[g * size : (g + 1) * size])[-rule.group_judges :]) for g in range(rule.groups)}
    groups = sorted(worth, key=lambda g: -worth[g])[: rule.groups_used]
    allowed = [expert for expert in range(len(logits)) if expert // size in groups]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: rule.top_k]
    divisor = sum(scores[expert] for expert in chosen) if rule.normalise else 1
    return {expert: scores[expert] / divisor * rule.scale for expert in chosen}


def random_logits(rows: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (rows, EXPERTS)).astype(np.float32)


def rules() -> list[RouterRule]:
    return [
        RouterRule(4, gating, normalise, scale, groups, used, judges)
        for gating in Gating
        for normalise, scale in ((True, 2.5), (False, 1.0))
        for groups, used, judges in ((1, 1, 2), (4, 2, 2), (4, 2, 1), (8, 3, 2))
    ]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", rules(), ids=str)
def test_choice_and_weights_are_those_of_the_rule(rule: RouterRule, biased: bool) -> None:
    logits = random_logits(40, 1)
    bias = random_logits(1, 2)[0] / 4 if biased else None
    ids, weights = route(logits, rule, bias)
    for row in range(len(logits)):
        added = [0.0] * EXPERTS if bias is None else [float(b) for b in bias]
        expected = by_hand([float(x) for x in logits[row]], rule, added)
        assert ids[row].tolist() == list(expected)
        assert np.allclose(weights[row], list(expected.values()), rtol=1e-5, atol=1e-7)


def test_groups_and_bias_change_the_choice_and_a_bias_changes_no_weight() -> None:
    logits, bias = random_logits(40, 1), random_logits(1, 2)[0]
    plain = RouterRule(2, Gating.SIGMOID, normalise=False)
    free, free_weights = route(logits, plain)
    grouped, _ = route(logits, RouterRule(2, Gating.SIGMOID, normalise=False, groups=4, groups_used=1))
    biased, biased_weights = route(logits, plain, bias)
    assert not np.array_equal(free, grouped) and not np.array_equal(free, biased)
    both = {(row, e): w for row in range(40) for e, w in zip(free[row].tolist(), free_weights[row], strict=True)}
    again = [((row, e), w) for row in range(40) for e, w in zip(biased[row].tolist(), biased_weights[row], strict=True)]
    seen = [(both[pair], w) for pair, w in again if pair in both]
    assert seen and all(one == other for one, other in seen)


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_a_row_is_routed_alike_alone_and_in_a_batch(rule: RouterRule) -> None:
    logits, bias = random_logits(9, 3), random_logits(1, 4)[0]
    for given in (None, bias):
        ids, weights = route(logits, rule, given)
        for row in range(9):
            one_ids, one_weights = route(logits[row : row + 1], rule, given)
            assert np.array_equal(one_ids[0], ids[row]) and np.array_equal(one_weights[0], weights[row])


@pytest.mark.filterwarnings("error")
def test_extreme_logits_overflow_nothing() -> None:
    logits = np.array([[-1e4, 1e4, 0, 3]], np.float32)
    for gating in Gating:
        for given in (None, np.zeros(4, np.float32)):
            ids, weights = route(logits, RouterRule(2, gating), given)
            assert ids[0, 0] == 1 and np.isfinite(weights).all() and weights[0, 0] >= weights[0, 1]
