"""ERNIE 4.5 MoE: leading dense layers, shared experts, a bias for the choice of experts."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import RopeStyle


@register("ernie4_5-moe")
class Ernie45Moe(GqaModel):
    """Order of operations of the published ERNIE-4.5 models."""

    rope_style = RopeStyle.NORMAL
