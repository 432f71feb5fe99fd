"""Replays a routing trace against eviction policies: ours, LRU, LFU and Belady's optimum.

Owns the trace as one array of keys, and the entry to `replay.c`, which plays it; ours is played as the slot cache
does it, which the tests hold against the real one. Nothing is read or computed: a hit rate is a count. A layer's choice
is taken as the lane takes it, each distinct expert once. Invariant: every policy sees the same requests. The optimum is
one where each group is one key; where it is several, next uses in the same group tie, and it takes either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, KernelUnavailableError
from expertserve.experts.cache import DEFAULT_DECAY, prefill_weights
from expertserve.experts.trace import read_numbers

_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Policy:
    """What is evicted: `kind` is hotness (least, decaying per step), recency (least recent) or optimum."""

    kind: str
    decay: float = 1.0


KINDS = ("hotness", "recency", "optimum")
POLICIES: Mapping[str, Policy] = {
    "LRU": Policy("recency"),
    "LFU": Policy("hotness"),
    "ours": Policy("hotness", DEFAULT_DECAY),
    "Belady": Policy("optimum"),
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
    def weights(self) -> NDArray[np.float64]:
        """What each selection adds to the hotness of its key."""
        rows = np.repeat(self.rows, self.sizes)
        return np.where(np.repeat(self.prefill, self.sizes), prefill_weights(self.pairs, rows), 1.0)

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
    arrays = (requests.keys, requests.weights, requests.ends, requests.step_of, requests.prefill)
    failed = _library.replay_hits(
        KINDS.index(policy.kind), policy.decay, requests.num_keys, slots, len(requests.ends),
        *(array.ctypes.data for array in arrays), found.ctypes.data,
    )  # fmt: skip
    if failed:
        raise CapacityError("the replay needs more memory than there is; replay a shorter trace")
    return found


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
    number, real, at = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    signatures: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("groups", None, (at, number, *[at] * 11)),
        ("hits", number, (number, real, number, number, number, *[at] * 6)),
        ("distances", None, (number, *[at] * 4)),
    )
    for name, result, arguments in signatures:
        function = getattr(library, f"replay_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
