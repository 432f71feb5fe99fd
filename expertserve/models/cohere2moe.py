"""Cohere 2 MoE: attention and experts side by side behind one layer norm, windows in most layers, sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import read_float
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel
from expertserve.ops.base import Graph, Rope, RopeStyle, Tensor


@register("cohere2moe")
class Cohere2Moe(WindowedModel):
    """Order of operations of llama.cpp; the leading dense layers rotate although they see all."""

    rope_style = RopeStyle.NORMAL
    normalise_router = False
    ffn_norm = "attn_norm"

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.leading = file.get("leading_dense_block_count", 0, kind=int)
        self.logit_scale = 1 / (read_float(file, "logit_scale", 1.0) or 1.0)
        self.layer_norm_eps = read_float(file, "attention.layer_norm_epsilon", 0.0)
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if layer < self.leading else super().rope_of(layer)

    def norm(self, g: Graph, x: Tensor, name: str) -> Tensor:
        if self.layer_norm_eps:
            return g.layer_norm(x, f"{name}.weight", self.layer_norm_eps)
        return super().norm(g, x, name)

    def _attend(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The feed-forward gets what attention got."""
        normed = self.norm(g, x, f"blk.{layer}.attn_norm")
        return g.add(self.attention(g, layer, normed), x), normed

    def feed_forward_output(self, g: Graph, layer: int, out: Tensor) -> Tensor:
        """Shared experts and routed ones are averaged."""
        return g.scale(out, 0.5) if layer in self.towers and self.has_shared_expert else out
