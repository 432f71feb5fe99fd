"""DeepSeekMoE 16B (arXiv:2401.06066): a leading dense layer, shared experts, router weights as softmax gave them."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import RopeStyle


@register("deepseek")
class DeepSeekMoe(GqaModel):
    """Order of operations of deepseek-moe-16b: plain attention, before latent attention came."""

    rope_style = RopeStyle.NORMAL
    normalise_router = False
