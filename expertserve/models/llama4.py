"""Llama 4 (Scout, Maverick): three layers that rotate and attend in chunks, then one that sees all and does not rotate.

The router's weight of an expert multiplies its input; a shared expert stands beside, and dense layers may lie between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel
from expertserve.models.model import PositionFactor
from expertserve.models.registry import register
from expertserve.ops.base import Graph, RopeStyle, Tensor

PERIOD = 4
CHUNK = 8192
TEMPERATURE_STEP, TEMPERATURE_GAIN = 8192, 0.1
EXPERTS_WITHOUT_NORM = 128


@register("llama4")
class Llama4(GqaModel):
    """The file does not say the constants above; as in llama.cpp, Q and K are normalised but with 128 experts."""

    rope_style = RopeStyle.NORMAL
    normalise_router = False
    weigh_inputs = True

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.router = replace(self.router, gating=Gating.SIGMOID)
        self.chunked = file.get("attention.sliding_window", CHUNK, kind=int) != 0

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.chunk": Reach(CHUNK, chunked=True)} if self.chunked else {}

    def mask(self, layer: int) -> str:
        return "mask.chunk" if self.chunked and self._rotates(layer) else "mask"

    def position_factors(self) -> Mapping[str, PositionFactor]:
        return {"temperature": temperature}

    def into_heads(self, g: Graph, layer: int, role: str, x: Tensor, heads: int, dim: int) -> Tensor:
        if not self._rotates(layer):
            tempered = g.mul(x, g.load("temperature")) if role == "q" else x
            return g.reshape(tempered, (g.rows, heads, dim))
        x = g.rope(g.reshape(x, (g.rows, heads, dim)), self.rope)
        return x if self.hp.num_experts == EXPERTS_WITHOUT_NORM else g.rms_norm(x, None, self.hp.eps)

    def _rotates(self, layer: int) -> bool:
        return not self.chunked or (layer + 1) % PERIOD != 0


def temperature(positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """The factor on Q that keeps attention sharp at far positions, where nothing rotates."""
    return (1 + TEMPERATURE_GAIN * np.log1p((positions + 1) // TEMPERATURE_STEP)).astype(np.float32)
