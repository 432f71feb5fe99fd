"""The unstreamed arm: experts served from a mapping of the file, as the page cache has them.

Owns the mappings and the addresses in them. It is the control that streaming is compared with, and the switch by
which tests force the lane off. Invariant: an address lies in a mapping that lives as long as this object.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.spans import ExpertTower


class UnstreamedTowers:
    """Addresses of every expert: `address[layer]` is [roles, experts]."""

    def __init__(self, paths: Sequence[Path], towers: Mapping[int, ExpertTower]) -> None:
        self._maps: list[mmap.mmap] = []
        bases = []
        for path in paths:
            with open(path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private, so that ctypes may look at it
            self._maps.append(mapping)
            bases.append(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
        self.address: dict[int, NDArray[np.uint64]] = {}
        for layer, tower in towers.items():
            table = np.zeros((len(tower.slices), tower.num_experts), np.uint64)
            for role, tensor in enumerate(tower.slices):
                first = bases[tensor.file_index] + tensor.offset
                table[role] = first + np.arange(tower.num_experts, dtype=np.uint64) * np.uint64(tower.slice_bytes(role))
            self.address[layer] = table

    def close(self) -> None:
        self.address.clear()
        for mapping in self._maps:
            mapping.close()
