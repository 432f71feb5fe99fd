"""Granite 4 hybrids (IBM): Mamba-2 beside attention without rotation, a shared expert, Granite's scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.granitemoe import GraniteMoe
from expertserve.models.mamba2 import mamba2_block, read_scans
from expertserve.models.registry import register
from expertserve.ops.base import Graph, RecurrentLayout, Tensor


@register("granitehybrid")
class GraniteHybrid(GraniteMoe):
    """Layers without KV heads are Mamba-2's."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.scans = read_scans(file, [layer for layer, heads in enumerate(self.hp.kv_heads) if not heads])

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        return list(self.scans.values())

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        if layer in self.scans:
            return mamba2_block(self, g, x, self.scans[layer])
        return super().attention(g, layer, x)
