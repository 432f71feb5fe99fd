"""MiniMax-M2: Q and K normalised over the whole row, partial RoPE, sigmoid router with a bias for the choice."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("minimax-m2")
class MiniMaxM2(GqaModel):
    """Order of operations of the published MiniMax-M2."""

    qk_norm = QKNorm.ROW
