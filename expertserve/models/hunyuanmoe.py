"""Hunyuan-A13B: Q and K normalised a head after rotation, a shared expert."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("hunyuan-moe")
class HunyuanMoe(GqaModel):
    """Order of operations of the published Hunyuan-A13B."""

    qk_norm = QKNorm.ROTATED_HEAD
