"""Random weights of a given deviation, in the blocks of a tensor type.

Large tensors are drawn as blocks, scales and all, so that nothing is quantised and any size streams through small
memory; their mean is zero and their bytes do not compress. Values that matter one by one are quantised by ggml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.tensor import TensorType, block_elements, row_bytes

Bytes = NDArray[np.uint8]
Draws = np.random.Generator

_HEADS = 4096  # different scales a tensor has; a block takes one of them
# Root mean square of what a block's codes stand for, each code being as likely as another.
_NIBBLE_RMS = ((16**2 - 1) / 12) ** 0.5
_SIX_BIT_RMS = ((64**2 - 1) / 12 + 0.25) ** 0.5
_BYTE_RMS = ((255**2 - 1) / 12) ** 0.5
_FP4_RMS = (68.5 / 8) ** 0.5  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives


def random_bytes(draws: Draws, count: int) -> Bytes:
    words: NDArray[np.uint64] = draws.bit_generator.random_raw(-(-count // 8))
    return words.view(np.uint8)[:count]


def random_blocks(draws: Draws, type: TensorType, std: float) -> Callable[[int], Bytes]:
    """A source of blocks, uint8 [count, bytes of a block], whose values have mean 0 and deviation `std`.

    Raises:
        ValueError: blocks of this type are not drawn.
    """
    if type not in _SOURCES:
        raise ValueError(f"no random blocks of {type.name}")
    size = row_bytes(block_elements(type), type)
    start, make_heads = _SOURCES[type]
    heads = make_heads(draws, std)
    stop = start + heads.shape[1]

    def draw(count: int) -> Bytes:
        blocks = random_bytes(draws, count * size).reshape(count, size)
        which = random_bytes(draws, 2 * count).view(np.uint16) % _HEADS
        if type is TensorType.Q8_0:
            blocks[blocks == 128] = 0  # -128, which no quantiser writes
        blocks[:, start:stop] = heads[which]
        return blocks

    return draw


def _halves(draws: Draws, rms: float) -> NDArray[np.float64]:
    """Scales between 0.7 and 1.3 of their root mean square `rms`."""
    spread = draws.uniform(0.7, 1.3, _HEADS)
    scales: NDArray[np.float64] = spread * (rms / np.sqrt(np.mean(spread**2)))
    return scales


def _q8_0(draws: Draws, std: float) -> Bytes:
    return _half_bytes(_halves(draws, std / _BYTE_RMS))


def _q4_k(draws: Draws, std: float) -> Bytes:
    """Scale, minimum, then eight six-bit scales and minima packed in twelve bytes; minima centre the codes."""
    scales = draws.integers(20, 52, (_HEADS, 8)).astype(np.uint8)
    scale = _halves(draws, std / (_NIBBLE_RMS * float(np.sqrt(np.mean(scales.astype(float) ** 2)))))
    low, high = scales[:, :4], scales[:, 4:]
    first = low | ((high >> 4) << 6)
    packed = np.concatenate([first, first, (high & 15) | ((high & 15) << 4)], axis=1)
    return np.concatenate([_half_bytes(scale), _half_bytes(7.5 * scale), packed], axis=1)


def _q6_k(draws: Draws, std: float) -> Bytes:
    """Sixteen scales of either sign, then the scale of them all."""
    scales = draws.integers(16, 80, (_HEADS, 16)) * draws.choice([-1, 1], (_HEADS, 16))
    scale = _halves(draws, std / (_SIX_BIT_RMS * float(np.sqrt(np.mean(scales.astype(float) ** 2)))))
    return np.concatenate([scales.astype(np.int8).view(np.uint8), _half_bytes(scale)], axis=1)


def _mxfp4(draws: Draws, std: float) -> Bytes:
    """A power of two with a bias of 127; two neighbours are mixed so that the deviation is met."""
    wanted = np.log2(std / _FP4_RMS)
    low = np.floor(wanted)
    share = (4.0 ** (wanted - low) - 1) / 3
    exponents = low + (draws.random(_HEADS) < share)
    biased: Bytes = (exponents + 127).astype(np.uint8)[:, None]
    return biased


def _half_bytes(values: NDArray[np.float64]) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(len(values), 2)


_SOURCES: dict[TensorType, tuple[int, Callable[[Draws, float], Bytes]]] = {
    TensorType.Q8_0: (0, _q8_0),
    TensorType.Q4_K: (0, _q4_k),
    TensorType.Q6_K: (192, _q6_k),
    TensorType.MXFP4: (0, _mxfp4),
}


def quantised(values: NDArray[np.float32], type: TensorType) -> Bytes:
    """Rows of `values` [rows, columns] in the blocks of `type`, by ggml's own quantiser."""
    values = np.ascontiguousarray(values, np.float32)
    if type is TensorType.F32:
        return values.view(np.uint8)
    from expertserve.ops.ggml.library import ggml

    rows, columns = values.shape
    out = np.empty((rows, row_bytes(columns, type)), np.uint8)
    source = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.ggml_quantize_chunk(type.value, source, ctypes.c_void_p(out.ctypes.data), 0, rows, columns, None)
    return out
