"""Granite MoE (IBM Granite 3.x): scaled embeddings, residuals and logits."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import RopeStyle


@register("granitemoe")
class GraniteMoe(GqaModel):
    """Every scale is in the file's metadata."""

    rope_style = RopeStyle.NORMAL
