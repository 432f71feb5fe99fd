"""Ling v1 (Bailing MoE: Ling-lite, Ling-plus and their successors): plain attention, shared experts."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import RopeStyle


@register("bailingmoe")
class BailingMoe(GqaModel):
    """Order of operations of the published Ling models; the file says whether weights are renormalised."""

    rope_style = RopeStyle.NORMAL
    normalise_router = False
