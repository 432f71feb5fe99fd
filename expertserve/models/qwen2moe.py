"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): biases on Q, K and V, and a shared expert behind its own gate."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register


@register("qwen2moe")
class Qwen2Moe(GqaModel):
    """Order of operations of Qwen2-57B-A14B."""

    normalise_router = False
