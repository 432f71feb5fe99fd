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
    """

    top_k: int
    gating: Gating = Gating.SOFTMAX
    normalise: bool = True
    scale: float = 1.0


def route(logits: NDArray[np.float32], rule: RouterRule) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The experts and weights of each row.

    Args:
        logits: router output, float32 [rows, experts].
        rule: the family's rule.

    Returns:
        ids int32 [rows, top_k] by falling score (equal scores by rising id), weights float32 [rows, top_k].
    """
    # Both gatings rise with the logit, so the logits order the experts.
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : rule.top_k]
    rows, num_experts = logits.shape
    chosen = logits.take(ids if rows == 1 else ids + num_experts * np.arange(rows)[:, None])
    if rule.gating is Gating.SIGMOID:
        weights = 1 / (1 + np.exp(-chosen))
    else:
        weights = np.exp(chosen - chosen[:, :1])
        if not rule.normalise:
            weights /= np.exp(logits - chosen[:, :1]).sum(axis=1, keepdims=True)
    if rule.normalise:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    if rule.scale != 1.0:
        weights *= np.float32(rule.scale)
    return ids.astype(np.int32), weights.astype(np.float32, copy=False)
