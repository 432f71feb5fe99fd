"""Arcee Trinity (AFMoE): windows in three layers of four, gated attention, norms before and after each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import QKNorm
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel
from expertserve.ops.base import Graph, Tensor


@register("afmoe")
class Afmoe(WindowedModel):
    """Order of operations of Trinity Nano, Mini and Large; the embeddings' scale is not in the file."""

    qk_norm = QKNorm.HEAD
    normalise_router = False

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.embedding_scale = self.hp.hidden**0.5
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)

    def attention_output(self, g: Graph, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        p = f"blk.{layer}."
        gated = g.mul(mixed, g.sigmoid(g.linear(x, p + "attn_gate.weight")))
        return self.norm(g, super().attention_output(g, layer, x, gated), p + "post_attention_norm")

    def feed_forward_output(self, g: Graph, layer: int, out: Tensor) -> Tensor:
        return self.norm(g, out, f"blk.{layer}.post_ffw_norm")
