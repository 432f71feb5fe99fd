"""Grok-1 and Grok-2 (xAI): scores limited by a softcap, norms before and after each block, GELU experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel
from expertserve.models.hparams import read_float
from expertserve.models.registry import register
from expertserve.ops.base import Activation, Graph, Tensor


@register("grok")
class Grok(GqaModel):
    """Order of operations of llama.cpp; the constants are those of Grok-1, whose older files do not say them.

    In Grok-2 a dense feed-forward stands beside the experts.
    """

    activation = Activation.GELU

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.embedding_scale = read_float(file, "embedding_scale", 78.38367176906169)
        self.logit_scale = 1 / read_float(file, "logit_scale", 0.5773502691896257)
        self.attention_scale = read_float(file, "attention.output_scale", 0.08838834764831845)
        self.attention_softcap = read_float(file, "attn_logit_softcapping", 30.0)
        self.rope = replace(self.rope, beta_fast=read_float(file, "rope.scaling.yarn_beta_fast", 8.0))
        self.dense = any(self.has(f"blk.{layer}.ffn_up.weight") for layer in self.towers)

    @property
    def has_shared_expert(self) -> bool:
        """The dense feed-forward stands in its place."""
        return self.dense

    def shared_expert(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        return self._feed_forward(g, f"blk.{layer}.ffn_", "", x)

    def attention_output(self, g: Graph, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        return self.norm(g, super().attention_output(g, layer, x, mixed), f"blk.{layer}.attn_output_norm")

    def feed_forward_output(self, g: Graph, layer: int, out: Tensor) -> Tensor:
        """Where two feed-forwards add up, their sum is scaled by sqrt(1/2), which is nothing to the norm."""
        older = f"blk.{layer}.layer_output_norm"
        return self.norm(g, out, older if self.has(f"{older}.weight") else f"blk.{layer}.post_ffw_norm")
