"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): biases on Q, K and V, and a shared expert behind its own gate."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import Graph, Tensor


@register("qwen2moe")
class Qwen2Moe(GqaModel):
    """Order of operations of Qwen2-57B-A14B."""

    normalise_router = False
    has_shared_expert = True

    def shared_expert(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        return self.gated_shared_expert(g, layer, x)
