"""Random weights in any block format, and what they mean by the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

PLAIN = ("F32", "F16", "BF16")


def make_weight(fmt: str, rows: int, n: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Raw rows of a format and what they mean: every code word as likely as any other, scales of about 0.01."""
    kind = GGMLQuantizationType[fmt]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    if fmt in PLAIN:
        w = rng.standard_normal((rows, n)).astype(np.float32)
        raw = {"F32": w, "F16": w.astype(np.float16)}.get(fmt, (w.view(np.uint32) >> 16).astype(np.uint16))
        exact = raw.astype(np.float32) if fmt != "BF16" else (raw.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1), exact
    blocks = rng.integers(0, 256, (rows * n // values, nbytes), dtype=np.uint8)
    scale = np.frombuffer(rng.uniform(0.005, 0.02, len(blocks)).astype(np.float16).tobytes(), np.uint8).reshape(-1, 2)
    if fmt == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    elif fmt == "IQ1_M":  # its scale is spread over the upper four bits of four words
        word = scale.copy().view(np.uint16)[:, 0]
        words = blocks[:, 48:56].copy().view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | ((word >> (4 * i)) & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    else:
        at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(fmt, 0)
        blocks[:, at : at + 2] = scale
        if fmt in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K"):
            blocks[:, at + 2 : at + 4] = scale[::-1]
    raw = blocks.reshape(rows, -1)
    return raw, np.asarray(gguf.quants.dequantize(raw, kind), np.float32)
