"""Granite MoE (IBM Granite 3.x): scaled embeddings, residuals and logits."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import Graph, RopeStyle, Tensor


@register("granitemoe")
class GraniteMoe(GqaModel):
    """Every scale is in the file's metadata, and so is whether anything rotates."""

    rope_style = RopeStyle.NORMAL

    def into_heads(self, g: Graph, layer: int, role: str, x: Tensor, heads: int, dim: int) -> Tensor:
        if self.file.get("rope.scaling.finetuned", True):
            return super().into_heads(g, layer, role, x, heads, dim)
        return g.reshape(x, (g.rows, heads, dim))
