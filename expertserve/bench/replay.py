"""Replays a routing trace against eviction policies: ours, LRU, LFU and Belady's optimum.

Owns the policies it compares with; ours is the real slot cache. Nothing is read or computed: a hit rate is a count. A
layer's choice is taken as the lane takes it, each distinct expert once. Invariant: every policy sees the same requests,
and none beats the optimum.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.cache import ExpertSlotCache, prefill_weights
from expertserve.experts.grouping import group_pairs
from expertserve.experts.trace import TraceStep


@dataclass(frozen=True, slots=True)
class Requests:
    """A trace as keys.

    Attributes:
        num_keys: distinct experts there are.
        steps: by step, by layer: distinct keys asked for.
        weights: likewise, what each choice adds to hotness; None for one each.
        counted: whether a step counts in the hit rate (decode steps do, after the warm-up).
    """

    num_keys: int
    steps: list[list[NDArray[np.int64]]]
    weights: list[list[NDArray[np.float64] | None]]
    counted: list[bool]


Policy = Callable[[Requests, int], float]


def as_requests(layers: dict[int, int], steps: Iterable[TraceStep], *, warm_up: int = 0) -> Requests:
    """Keys of a trace; the first `warm_up` steps and every prefill are played but not counted."""
    first, total = {}, 0
    for layer, experts in layers.items():
        first[layer] = total
        total += experts
    played, weights, counted = [], [], []
    for number, step in enumerate(steps):
        prefill = step.rows.prefill_rows > 0
        grouped = [(first[layer], group_pairs(ids), len(ids)) for layer, ids in step.layers]
        played.append([groups.experts + start for start, groups, _ in grouped])
        weights.append([prefill_weights(groups.counts, rows) if prefill else None for _, groups, rows in grouped])
        counted.append(number >= warm_up and not prefill)
    return Requests(total, played, weights, counted)


class _Tally:
    """Hits of the steps that count."""

    def __init__(self) -> None:
        self.hits = 0
        self.asked = 0

    def add(self, hits: int, asked: int, counted: bool) -> None:
        if counted:
            self.hits += hits
            self.asked += asked

    @property
    def rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def slot_cache(decay: float) -> Policy:
    """The policy in use, at a decay."""

    def replay(requests: Requests, slots: int) -> float:
        cache = ExpertSlotCache([(0, requests.num_keys)], slots, decay=decay)
        tally = _Tally()
        for layers, weights, counted in zip(requests.steps, requests.weights, requests.counted, strict=True):
            for keys, weight in zip(layers, weights, strict=True):
                cache.touch(keys, weight)
                resident = cache.slot_of[keys] >= 0
                tally.add(int(resident.sum()), len(keys), counted)
                hits = keys[resident]
                cache.pin(hits)
                for key in keys[~resident].tolist():
                    if cache.begin_fill(key, spare_hotter=weight is not None) is None:
                        cache.unpin(hits)
                        hits = hits[:0]
                        cache.begin_fill(key)
                    cache.finish_fill(key)
                cache.unpin(hits)
            cache.advance()
        return tally.rate

    return replay


def lru(requests: Requests, slots: int) -> float:
    """Evicts the least recently used."""
    order: OrderedDict[int, None] = OrderedDict()
    tally = _Tally()
    for layers, counted in zip(requests.steps, requests.counted, strict=True):
        for keys in layers:
            hits = 0
            for key in sorted(keys.tolist(), key=lambda key: key not in order):  # what is there is computed first
                if key in order:
                    order.move_to_end(key)
                    hits += 1
                    continue
                if len(order) == slots:
                    order.popitem(last=False)
                order[key] = None
            tally.add(hits, len(keys), counted)
    return tally.rate


def lfu(requests: Requests, slots: int) -> float:
    """Evicts the least often used, without decay."""
    return slot_cache(1.0)(requests, slots)


def belady(requests: Requests, slots: int) -> float:
    """Evicts what is asked for furthest in the future: the bound."""
    flat = [keys for layers in requests.steps for keys in layers]
    uses: list[list[int]] = [[] for _ in range(requests.num_keys)]
    for time, keys in enumerate(flat):
        for key in keys.tolist():
            uses[key].append(time)
    resident: dict[int, int] = {}  # key: time of its next use
    furthest: list[tuple[int, int]] = []  # (-next use, key), stale entries among them
    tally = _Tally()
    time = 0
    for layers, counted in zip(requests.steps, requests.counted, strict=True):
        for keys in layers:
            hits = 0
            for key in keys.tolist():
                hits += key in resident
                if key not in resident and len(resident) == slots:
                    _evict_furthest(resident, furthest)
                resident[key] = _next_use(uses[key], time, len(flat))
                heapq.heappush(furthest, (-resident[key], key))
            tally.add(hits, len(keys), counted)
            time += 1
    return tally.rate


def _next_use(uses: Sequence[int], time: int, never: int) -> int:
    at = bisect.bisect_right(uses, time)
    return uses[at] if at < len(uses) else never


def _evict_furthest(resident: dict[int, int], furthest: list[tuple[int, int]]) -> None:
    while True:
        negative, key = heapq.heappop(furthest)
        if resident.get(key) == -negative:
            del resident[key]
            return


def compare(requests: Requests, shares: Sequence[float], decays: Sequence[float]) -> dict[str, list[float]]:
    """Hit rate of every policy at each share of all experts in slots."""
    policies: dict[str, Policy] = {"lru": lru, "lfu": lfu, "belady": belady}
    policies |= {f"hotness {decay:g}": slot_cache(decay) for decay in decays}
    slots = [max(1, round(share * requests.num_keys)) for share in shares]
    return {name: [policy(requests, count) for count in slots] for name, policy in policies.items()}
