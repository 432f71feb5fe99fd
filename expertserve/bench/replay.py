"""Replays a routing trace against eviction policies: ours, LRU, LFU and Belady's optimum.

Owns the trace as one array of keys, and the entry to `replay.c`, which plays it; ours is played with the slot cache's
own forecast, and the tests hold the rest against the real one. Nothing is read or computed: a hit rate is a count. A
layer's choice is taken as the lane takes it, each distinct expert once. Invariant: every policy sees the same requests.
The optimum is one where each group is one key; of several, next uses in the same group tie, and it takes either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, KernelUnavailableError
from expertserve.experts.forecast import prefill_runs
from expertserve.experts.trace import read_numbers

_LAYERS = 1 << 16


class Policy(Enum):
    """What is evicted: the least often used, the least recently used, what is used last from now on, or by forecast."""

    LFU = 0
    LRU = 1
    BELADY = 2
    OURS = 3


POLICIES: Mapping[str, Policy] = {
    "LRU": Policy.LRU,
    "LFU": Policy.LFU,
    "ours": Policy.OURS,
    "Belady": Policy.BELADY,
}


@dataclass(frozen=True, slots=True)
class Requests:
    """A trace as keys. A group is what one step of one layer chose.

    Attributes:
        experts: experts of each layer; its keys come after those of the layers before it.
        keys: int32 [n], distinct within a group.
        pairs: int32 [n], how many of the group's tokens chose the key.
        ends: int64 [groups], where each group ends in `keys`.
        rows: int32 [groups], tokens.
        layers: int32 [groups].
        step_of: int64 [groups].
        step_rows: int32 [steps, 2], decode and prefill rows.
        warm_up: steps that are played and not counted.
    """

    experts: Mapping[int, int]
    keys: NDArray[np.int32]
    pairs: NDArray[np.int32]
    ends: NDArray[np.int64]
    rows: NDArray[np.int32]
    layers: NDArray[np.int32]
    step_of: NDArray[np.int64]
    step_rows: NDArray[np.int32]
    warm_up: int = 0

    @property
    def num_keys(self) -> int:
        return sum(self.experts.values())

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Keys of each group."""
        return np.diff(self.ends, prepend=0)

    @property
    def prefill(self) -> NDArray[np.bool_]:
        """Of each group, whether its step has prefill rows."""
        with_prefill: NDArray[np.bool_] = self.step_rows[:, 1] > 0
        return with_prefill[self.step_of]

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Of each group, whether it counts in a hit rate: decode does, after the warm-up."""
        return ~self.prefill & (self.step_of >= self.warm_up)

    @property
    def runs(self) -> NDArray[np.float64]:
        """Decode runs that each group of a prefill counts as; 0 for one of decode."""
        return np.where(self.prefill, prefill_runs(self.rows), 0.0)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Of each selection, how much of its group's tokens made it."""
        shares: NDArray[np.float64] = self.pairs / np.repeat(self.rows, self.sizes)
        return shares

    def shuffled(self, seed: int = 0) -> Requests:
        """The same groups in an order without memory: each layer's are dealt to its places at random.

        A policy that gains from when experts are used loses that here; one that gains from how often, keeps it.
        """
        draws = np.random.default_rng(seed)
        source = np.arange(len(self.ends))
        for layer in np.unique(self.layers):
            mine = np.flatnonzero((self.layers == layer) & ~self.prefill)
            source[mine] = draws.permutation(mine)
        sizes = self.sizes[source]
        ends = np.cumsum(sizes)
        picked = np.repeat(self.ends[source] - ends, sizes) + np.arange(len(self.keys))
        return replace(self, keys=self.keys[picked], pairs=self.pairs[picked], rows=self.rows[source], ends=ends)


def read_requests(path: Path, *, warm_up: int = 0, most_steps: int | None = None) -> Requests:
    """Reads a trace; the first `warm_up` steps and every prefill are played but not counted.

    Raises:
        ConfigError: the file is no trace.
    """
    experts, numbers = read_numbers(path)
    numbers = np.ascontiguousarray(numbers)
    first, most = np.full(_LAYERS, -1, np.int64), np.zeros(_LAYERS, np.int64)
    total = 0
    for layer, count in experts.items():
        first[layer], most[layer] = total, count
        total += count
    n, records = len(numbers), len(numbers) // 4 + 1
    keys, pairs = np.empty(n, np.int32), np.empty(n, np.int32)
    ends, step_of = np.empty(records, np.int64), np.empty(records, np.int64)
    rows, layers, step_rows = (np.empty(records * width, np.int32) for width in (1, 1, 2))
    found = np.zeros(2, np.int64)
    scratch = np.zeros(_LAYERS, np.int32)
    arrays = (first, most, scratch, keys, pairs, ends, rows, layers, step_of, step_rows, found)
    _library.replay_groups(numbers.ctypes.data, n, *(array.ctypes.data for array in arrays))
    groups, steps = found.tolist()
    if most_steps is not None and most_steps < steps:
        groups, steps = int(np.searchsorted(step_of[:groups], most_steps)), most_steps
    n = int(ends[groups - 1]) if groups else 0
    return Requests(
        experts, keys[:n].copy(), pairs[:n].copy(), ends[:groups].copy(), rows[:groups].copy(),
        layers[:groups].copy(), step_of[:groups].copy(), step_rows[: 2 * steps].reshape(-1, 2).copy(), warm_up,
    )  # fmt: skip


def hits(requests: Requests, policy: Policy, slots: int) -> NDArray[np.int32]:
    """Keys of each group that had a slot when they were asked for, int32 [groups]."""
    if slots < 1:
        raise ValueError("a cache has at least one slot")
    found = np.zeros(len(requests.ends), np.int32)
    play = _play_forecast if policy is Policy.OURS else _play_order
    failed = play(requests, policy, slots, found)
    if failed:
        raise CapacityError("the replay needs more memory than there is; replay a shorter trace")
    return found


def _play_order(requests: Requests, policy: Policy, slots: int, found: NDArray[np.int32]) -> int:
    weights = np.where(np.repeat(requests.prefill, requests.sizes), requests.shares, 1.0)
    weights *= np.repeat(np.maximum(requests.runs, 1.0), requests.sizes)
    sizes = policy.value, requests.num_keys, slots, len(requests.ends)
    arrays = (requests.keys, weights, requests.ends, found)
    return int(_library.replay_hits(*sizes, *(array.ctypes.data for array in arrays)))


def _play_forecast(requests: Requests, policy: Policy, slots: int, found: NDArray[np.int32]) -> int:
    first = np.concatenate([[0], np.cumsum(list(requests.experts.values()))]).astype(np.int64)
    place = {layer: number for number, layer in enumerate(requests.experts)}
    places = np.array([place[layer] for layer in requests.layers.tolist()], np.int64)
    arrays = (requests.keys, requests.shares, requests.ends, places, requests.runs, found)
    sizes = len(requests.experts), first.ctypes.data, slots, len(requests.ends)
    return int(_library.replay_forecast(*sizes, *(array.ctypes.data for array in arrays)))


def hit_rate(requests: Requests, policy: Policy, slots: int) -> float:
    """Share of the counted selections that had a slot; 0 where nothing counts."""
    counted = requests.counted
    asked = int(requests.sizes[counted].sum())
    return int(hits(requests, policy, slots)[counted].sum()) / asked if asked else 0.0


def slots_of(requests: Requests, share: float) -> int:
    """Slots for a share of all experts, at least one."""
    return max(1, round(share * requests.num_keys))


def compare(requests: Requests, shares: Sequence[float], policies: Mapping[str, Policy]) -> dict[str, list[float]]:
    """Hit rate of every policy with each share of all experts in slots."""
    slots = [slots_of(requests, share) for share in shares]
    with ThreadPoolExecutor() as threads:
        runs = {
            name: [threads.submit(hit_rate, requests, policy, count) for count in slots]
            for name, policy in policies.items()
        }
        return {name: [run.result() for run in row] for name, row in runs.items()}


def reuse_distances(requests: Requests) -> NDArray[np.int32]:
    """Of each selection, the fewest slots with which LRU would have it; 0 for an expert's first.

    That is the number of distinct experts selected since the last time, itself included.
    """
    n = len(requests.keys)
    distances = np.empty(n, np.int32)
    marks, last = np.zeros(n + 1, np.int32), np.zeros(requests.num_keys, np.int64)
    arrays = (requests.keys, marks, last, distances)
    _library.replay_distances(n, *(array.ctypes.data for array in arrays))
    return distances


def _load() -> ctypes.CDLL:
    spec = find_spec("expertserve.bench._replay")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError("the replay is not compiled: build it (pip install -e .)")
    library = ctypes.CDLL(spec.origin)
    number, at = ctypes.c_int64, ctypes.c_void_p
    signatures: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("groups", None, (at, number, *[at] * 11)),
        ("hits", number, (*[number] * 4, *[at] * 4)),
        ("forecast", number, (number, at, number, number, *[at] * 6)),
        ("distances", None, (number, *[at] * 4)),
    )
    for name, result, arguments in signatures:
        function = getattr(library, f"replay_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
