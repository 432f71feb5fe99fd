"""K-EXAONE (EXAONE MoE): windows in three layers of four, Q and K normalised a head, V3's routing, a shared expert."""

from __future__ import annotations

from expertserve.models.gqa import QKNorm
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel


@register("exaone-moe")
class ExaoneMoe(WindowedModel):
    """Order of operations of K-EXAONE-236B-A23B."""

    qk_norm = QKNorm.HEAD
    window = 128
