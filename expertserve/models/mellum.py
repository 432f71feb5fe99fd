"""Mellum 2 (JetBrains): Qwen3-MoE's layers, three of four within a window, where YaRN does not stretch positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import QKNorm
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel
from expertserve.ops.base import Rope


@register("mellum")
class Mellum(WindowedModel):
    """Order of operations of Mellum2-12B-A2.5B; every layer rotates."""

    qk_norm = QKNorm.HEAD

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.window_rope = replace(self.rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)

    def rope_of(self, layer: int) -> Rope:
        return self.window_rope if self.windowed[layer] else self.rope
