"""The router's rule on the host: which experts a token takes, and with what weights.

One rule serves every family; what differs is data (`RouterRule`). The choice for a row depends on that row alone, so
that batching cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

MIN_WEIGHT_SUM = np.float32(2.0**-14)
"""Smallest divisor of a renormalisation: the smallest normal float16, as llama.cpp clamps it."""


class Gating(Enum):
    """How router logits become scores; the values are GGUF's `expert_gating_func`."""

    SOFTMAX = 1
    SIGMOID = 2


@dataclass(frozen=True, slots=True)
class RouterRule:
    """A family's routing.

    Attributes:
        top_k: experts a token takes.
        gating: scores from logits, over all experts.
        normalise: divide the chosen weights by their sum.
        scale: factor on the weights, after normalising.
        groups, groups_used: experts in equal groups, of which a token takes its experts from the best few only.
        group_judges: best scores of a group whose sum judges it: two in DeepSeek-V3 (arXiv:2412.19437), one in
            DeepSeek-V2 (arXiv:2405.04434).
    """

    top_k: int
    gating: Gating = Gating.SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_judges: int = 2


def route(
    logits: NDArray[np.float32], rule: RouterRule, bias: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The experts and weights of each row.

    Args:
        logits: router output, float32 [rows, experts].
        rule: the family's rule.
        bias: added to the scores for the choice, not to the weights, [experts].

    Returns:
        ids int32 [rows, top_k] by falling score (equal scores by rising id), weights float32 [rows, top_k].
    """
    if bias is not None or rule.groups_used < rule.groups:
        return _route_by_scores(logits, rule, bias)
    # Both gatings rise with the logit, so the logits order the experts.
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : rule.top_k]
    rows, num_experts = logits.shape
    chosen = logits.take(ids if rows == 1 else ids + num_experts * np.arange(rows)[:, None])
    if rule.gating is Gating.SIGMOID:
        weights = _sigmoid(chosen)
    else:
        weights = np.exp(chosen - chosen[:, :1])
        if not rule.normalise:
            weights /= np.exp(logits - chosen[:, :1]).sum(axis=1, keepdims=True)
    return ids.astype(np.int32), _finish(weights, rule)


def _route_by_scores(
    logits: NDArray[np.float32], rule: RouterRule, bias: NDArray[np.float32] | None
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The rule where the choice is not by the logits alone."""
    if rule.gating is Gating.SIGMOID:
        scores = _sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    choice = scores if bias is None else scores + bias
    if rule.groups_used < rule.groups:
        choice = _best_groups_only(choice, rule)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : rule.top_k]
    return ids.astype(np.int32), _finish(np.take_along_axis(scores, ids, axis=1), rule)


def _best_groups_only(choice: NDArray[np.float32], rule: RouterRule) -> NDArray[np.float32]:
    """`choice` with -inf for the experts of all groups but the best."""
    grouped = choice.reshape(len(choice), rule.groups, -1).copy()
    worth = np.sort(grouped, axis=2)[:, :, -rule.group_judges :].sum(axis=2)
    dropped = np.argsort(-worth, axis=1, kind="stable")[:, rule.groups_used :]
    grouped[np.arange(len(choice))[:, None], dropped] = -np.inf
    return grouped.reshape(choice.shape)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logistic function without overflow."""
    e = np.exp(-np.abs(x))
    out: NDArray[np.float32] = np.where(x >= 0, np.float32(1), e) / (1 + e)
    return out


def _finish(weights: NDArray[np.float32], rule: RouterRule) -> NDArray[np.float32]:
    """Normalised and scaled, as the rule says."""
    if rule.normalise:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    if rule.scale != 1.0:
        weights *= np.float32(rule.scale)
    return weights.astype(np.float32, copy=False)
