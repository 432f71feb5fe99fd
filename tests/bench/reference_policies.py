"""The policies of the replay, written for clarity: ours is the real slot cache, the others are a few lines each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from expertserve.bench.replay import Requests
from expertserve.experts.cache import ExpertSlotCache


def groups(requests: Requests) -> Iterator[tuple[int, slice]]:
    """Step and place in `keys` of each group."""
    starts = requests.ends - requests.sizes
    for step, start, end in zip(requests.step_of, starts, requests.ends, strict=True):
        yield int(step), slice(int(start), int(end))


def slot_cache(requests: Requests, slots: int) -> list[int]:
    """Hits of each group with the cache that serves."""
    cache = ExpertSlotCache(requests.experts.items(), slots)
    found = []
    prefill = requests.prefill
    for group, (_, place) in enumerate(groups(requests)):
        keys = requests.keys[place].astype(np.int64)
        layer = cache.place(int(requests.layers[group]))
        if prefill[group]:
            cache.note_prefill(layer, keys, requests.pairs[place], int(requests.rows[group]))
        else:
            cache.note(layer, keys)
        resident = cache.slot_of[keys] >= 0
        found.append(int(resident.sum()))
        held, holding = keys[resident], True
        cache.pin(held)
        for key in keys[~resident].tolist():
            if cache.begin_fill(key, spare_sooner=bool(prefill[group])) is None:
                cache.unpin(held)
                held, holding = held[:0], False
                cache.begin_fill(key)
            cache.finish_fill(key)
            if holding:
                cache.pin(np.array([key]))
                held = np.append(held, key)
        cache.unpin(held)
        cache.check_integrity()
    return found


def lru(requests: Requests, slots: int, *, frequency: bool = False) -> list[int]:
    """Hits of each group; of keys used in the same group the lowest is evicted first. With `frequency` LFU's: the least
    often used goes first, where a prefill of n tokens counts as at most 64 uses, shared out by who chose it."""
    used: dict[int, int] = {}  # resident keys
    uses = dict.fromkeys(range(requests.num_keys), 0.0)
    found = []
    for group, (_, place) in enumerate(groups(requests)):
        keys = requests.keys[place].tolist()
        rows = int(requests.rows[group])
        for key, pairs in zip(keys, requests.pairs[place].tolist(), strict=True):
            uses[key] += pairs / rows * min(rows, 64) if requests.prefill[group] else 1.0
        hits = [key for key in keys if key in used]
        used.update(dict.fromkeys(hits, group))
        for key in keys:
            if key not in hits:
                if len(used) == slots:
                    del used[min(used, key=lambda key: (uses[key] if frequency else 0.0, used[key], key))]
                used[key] = group
        found.append(len(hits))
    return found


def best_possible(requests: Requests, slots: int) -> int:
    """The most hits that any choice of victims gives, by trying all; for very short traces of one key a group."""
    best = {frozenset[int](): 0}  # by what has slots
    for key in requests.keys.tolist():
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            if key in held:
                choices = [held]
            else:
                choices = [held - {victim} | {key} for victim in (held if len(held) == slots else [key])]
            for state in choices:
                after[state] = max(after.get(state, 0), hits + (key in held))
        best = after
    return max(best.values())
