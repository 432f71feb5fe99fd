"""Ling 2 and Ring 2 (Bailing MoE v2): fused Q, K and V, leading dense layers, experts chosen by groups."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("bailingmoe2")
class BailingMoe2(GqaModel):
    """Order of operations of the published Ling 2 models."""

    qk_norm = QKNorm.HEAD
