"""The knee: how few slots do as well as many, by known hotness.

Owns one curve: the share of selections that the hottest n experts answer. Slots beyond the knee answer so few more
that the memory is better left to everything else. Invariant: the plan that comes back is no larger and still holds
one layer's top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.budget import SlotPlan, least_slots

TOLERATED_LOSS = 0.005  # of all selections; below what a change of subject in the text costs


def knee_slots(plan: SlotPlan, hotness: Mapping[int, NDArray[np.float64]], top_k: int) -> SlotPlan:
    """Cuts each class to the fewest slots that answer within TOLERATED_LOSS of what its slots could."""
    slots = []
    for group, most, least in zip(plan.classes, plan.slots, least_slots(plan.classes, top_k), strict=True):
        scores = np.concatenate([hotness.get(t.layer, np.zeros(t.num_experts)) for t in group.towers])
        slots.append(max(least, min(most, fewest_within(scores, most))))
    if sum(slots) == plan.total_slots:
        return plan
    reason = f"{plan.reason}; {sum(slots)} of them answer as much by the profile's hotness"
    return replace(plan, slots=tuple(slots), reason=reason)


def fewest_within(scores: NDArray[np.float64], most: int) -> int:
    """Fewest experts whose share of all hotness is within TOLERATED_LOSS of that of the `most` hottest."""
    total = float(scores.sum())
    if total <= 0:
        return most
    answered = np.cumsum(np.sort(scores)[::-1][:most]) / total
    return int(np.searchsorted(answered, answered[-1] - TOLERATED_LOSS)) + 1
