"""Weights of any tensor type with made-up values: what kernels take as long for as for real ones.

Owns one pool of valid blocks a type, made by ggml's own quantisers. Values are normal and small, so that what is
computed with them stays finite; the bytes repeat only at the distance of the pool.
"""

from __future__ import annotations

import ctypes
from functools import cache

import gguf
import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.tensor import TensorType
from expertserve.ops.ggml.library import ggml

_DISTINCT = 1 << 16  # elements that are quantised; some formats take a second for a million
_POOL_BYTES = 8 << 20
_SCALE = 0.02


@cache
def _pool(type: TensorType) -> NDArray[np.uint8]:
    """Blocks of `type` in random order: uint8 [blocks, bytes of one]."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(0)
    if type == TensorType.F32:
        return rng.normal(0, _SCALE, _POOL_BYTES // 4).astype(np.float32).view(np.uint8).reshape(-1, 4)
    values = rng.normal(0, _SCALE, _DISTINCT).astype(np.float32)
    blocks = np.empty((_DISTINCT // per_block, block_bytes), np.uint8)
    floats = ctypes.POINTER(ctypes.c_float)
    importance = np.ones(per_block, np.float32)  # some formats demand one
    ggml.ggml_quantize_chunk(
        type.value, values.ctypes.data_as(floats), ctypes.c_void_p(blocks.ctypes.data), 0, len(blocks), per_block,
        importance.ctypes.data_as(floats),
    )  # fmt: skip
    return blocks[rng.integers(0, len(blocks), _POOL_BYTES // block_bytes)]


def fill_made_up(type: TensorType, out: memoryview, seed: int) -> None:
    """Fills `out` with whole blocks of `type`; another seed begins elsewhere in the pool."""
    pool = _pool(type)
    flat, target = pool.reshape(-1), np.frombuffer(out, np.uint8)
    at = seed * 7919 % len(pool) * pool.shape[1]
    done = 0
    while done < len(target):
        piece = flat[at : at + len(target) - done]
        target[done : done + len(piece)] = piece
        done, at = done + len(piece), 0
