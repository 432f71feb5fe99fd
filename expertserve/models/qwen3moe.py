"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): Q and K normalised a head, weights renormalised."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("qwen3moe")
class Qwen3Moe(GqaModel):
    """Order of operations as in the Qwen3 report (arXiv:2505.09388)."""

    qk_norm = QKNorm.HEAD
