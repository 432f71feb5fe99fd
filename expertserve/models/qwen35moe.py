"""Qwen3.5-MoE: gated DeltaNet and gated attention, three to one, with many small experts."""

from __future__ import annotations

from expertserve.models.hybrid import HybridModel
from expertserve.models.registry import register
from expertserve.ops.base import Graph, Tensor


@register("qwen35moe")
class Qwen35Moe(HybridModel):
    """Value heads lie in the file so that head h reads key head h modulo their number."""

    grouped_heads = False

    def beta_alpha(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        p = f"blk.{layer}.ssm_"
        return g.linear(x, p + "beta.weight"), g.linear(x, p + "alpha.weight", p + "dt.bias")
