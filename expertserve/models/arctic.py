"""Snowflake Arctic: a dense feed-forward in every layer, and experts beside it that get what its attention got."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import Graph, RopeStyle, Tensor


@register("arctic")
class Arctic(GqaModel):
    """Order of operations of Snowflake Arctic: the experts' input is known before attention."""

    rope_style = RopeStyle.NORMAL

    def front(self, g: Graph, layer: int, x: Tensor, *, guess: int | None = None) -> None:
        residual = self.dense_layer(g, layer, x)
        expert_input = self.norm(g, x, f"blk.{layer}.ffn_norm_exps")
        g.store("residual", residual)
        g.store("ffn_input", expert_input)
        g.store("router", self.router_logits(g, layer, expert_input))
        if guess is not None:
            g.store("guess", self.router_logits(g, guess, self.norm(g, residual, f"blk.{guess}.ffn_norm_exps")))
