"""The unstreamed arm: experts served from a mapping of the file, as the page cache has them.

Owns the mappings and the addresses in them. It serves models that fit in memory; forced, it is the control that
streaming is compared with. Invariant: an address lies in a mapping that lives as long as this object.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.spans import ExpertTower

_ADVISE_BYTES = 64 << 20


class UnstreamedTowers:
    """Addresses of every expert: `address[layer]` is [roles, experts]."""

    def __init__(self, paths: Sequence[Path], towers: Mapping[int, ExpertTower]) -> None:
        self._paths = tuple(paths)
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

    def read_ahead(self) -> None:
        """Asks the kernel for the whole files, in the background: asking blocks while the disk's queue is full."""
        if hasattr(os, "posix_fadvise"):
            threading.Thread(target=self._advise, name="read-ahead", daemon=True).start()

    def _advise(self) -> None:
        for path in self._paths:
            try:
                with open(path, "rb", buffering=0) as file:
                    for start in range(0, os.fstat(file.fileno()).st_size, _ADVISE_BYTES):
                        if not self.address:
                            return  # closed
                        os.posix_fadvise(file.fileno(), start, _ADVISE_BYTES, os.POSIX_FADV_WILLNEED)
            except OSError:
                return  # a file system that takes no hints

    def close(self) -> None:
        self.address.clear()
        for mapping in self._maps:
            mapping.close()
