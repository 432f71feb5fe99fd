"""dots.llm1 (arXiv:2506.05767): Q and K normalised a head, a leading dense layer, shared experts, V3's routing."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("dots1")
class Dots1(GqaModel):
    """Order of operations of dots.llm1."""

    qk_norm = QKNorm.HEAD
