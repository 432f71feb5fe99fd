"""Tencent Hy3 (Hunyuan v3): Q and K normalised a head, a leading dense layer, a shared expert, V3's routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("hy_v3")
class HyV3(GqaModel):
    """Order of operations of Hy3; its files name the bias for the choice of experts without a suffix."""

    qk_norm = QKNorm.HEAD
    normalise_router = False

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)

    def router_bias(self, layer: int) -> str | None:
        return super().router_bias(layer) or self.optional(f"blk.{layer}.exp_probs_b")
