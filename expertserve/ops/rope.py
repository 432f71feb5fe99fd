"""The frequencies of a rotary position embedding, in double precision, for every backend that rotates by itself."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from expertserve.ops.base import Rope


def rope_frequencies(rope: Rope, factors: NDArray[np.float32] | None) -> tuple[NDArray[np.float64], float]:
    """What a position is multiplied by for each rotated pair, [dims / 2], and the magnitude of the rotated vectors.

    Args:
        rope: its parameters.
        factors: divisors of the frequencies, [dims / 2], or None.
    """
    i = np.arange(rope.dims // 2)
    extrapolated = rope.freq_base ** (-2.0 * i / rope.dims)
    if factors is not None:
        extrapolated = extrapolated / factors
    interpolated = rope.freq_scale * extrapolated
    if not rope.ext_factor:
        return interpolated, rope.attn_factor

    def boundary(rotations: float) -> float:
        wavelengths = rope.original_context / (rotations * 2 * math.pi)
        return rope.dims * math.log(wavelengths) / (2 * math.log(rope.freq_base))

    low = max(0.0, math.floor(boundary(rope.beta_fast)))
    high = min(rope.dims - 1.0, math.ceil(boundary(rope.beta_slow)))
    mix = (1 - np.clip((i - low) / max(0.001, high - low), 0, 1)) * rope.ext_factor
    magnitude = rope.attn_factor * (1 + 0.1 * math.log(1 / rope.freq_scale))
    return interpolated * (1 - mix) + extrapolated * mix, magnitude
