"""Qwen3-Next: gated DeltaNet and gated attention, three to one, beta and alpha from one projection."""

from __future__ import annotations

from expertserve.models.hybrid import HybridModel
from expertserve.models.registry import register
from expertserve.ops.base import Graph, Tensor


@register("qwen3next")
class Qwen3Next(HybridModel):
    """Value heads are grouped by the key head they read, and so are the outputs of the joint projection."""

    grouped_heads = True

    def beta_alpha(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        p, state = f"blk.{layer}.ssm_", self.delta[layer]
        each = state.value_heads // state.key_heads
        both = g.reshape(g.linear(x, p + "ba.weight"), (g.rows, state.key_heads, 2 * each))
        beta, alpha = (g.reshape(g.part(both, i * each, (i + 1) * each), (g.rows, state.value_heads)) for i in (0, 1))
        return beta, g.add_weight(alpha, p + "dt.bias")
