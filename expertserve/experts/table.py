"""A layer's window on the tables of its size class.

Owns nothing: arrays are views. Invariant: `address` and `pins` are indexed by expert and share memory with the
streamer's and the cache's tables over all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.cache import ExpertSlotCache
from expertserve.experts.streamer import ExpertStreamer
from expertserve.gguf.spans import ExpertTower


@dataclass(frozen=True, slots=True)
class LayerTable:
    """One layer.

    Attributes:
        tower: where its experts lie in the file.
        place: among the layers of the cache.
        first_key: key of expert 0.
        address: [roles, experts] uint64, 0 where not resident.
        pins: [experts] int32.
    """

    tower: ExpertTower
    streamer: ExpertStreamer
    cache: ExpertSlotCache
    place: int
    first_key: int
    address: NDArray[np.uint64]
    pins: NDArray[np.int32]

    @property
    def layer(self) -> int:
        return self.tower.layer

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.first_key + self.tower.num_experts)

    @classmethod
    def of(cls, tower: ExpertTower, streamer: ExpertStreamer) -> LayerTable:
        cache = streamer.cache
        first = cache.key(tower.uid, 0)
        keys = slice(first, first + tower.num_experts)
        return cls(tower, streamer, cache, cache.place(tower.uid), first, streamer.address[:, keys], cache.pins[keys])
