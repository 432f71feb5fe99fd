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
        p = f"blk.{layer}.ffn_"
        h = g.gated(g.linear(x, p + "gate_shexp.weight"), g.linear(x, p + "up_shexp.weight"), self.activation)
        gate = g.sigmoid(g.linear(x, p + "gate_inp_shexp.weight"))
        return g.mul(g.linear(h, p + "down_shexp.weight"), gate)
