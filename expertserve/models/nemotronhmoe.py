"""Nemotron 3 (Nano, Super): a layer is Mamba-2, attention or experts alone, with squared ReLU and no gates.

The larger models' experts work on a short vector that is made from the hidden state, the shared expert on the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel
from expertserve.models.mamba2 import mamba2_block, read_scans
from expertserve.models.registry import register
from expertserve.ops.base import Activation, Graph, RecurrentLayout, Rope, Tensor


@register("nemotron_h_moe")
class NemotronHMoe(GqaModel):
    """Every layer has one norm, `attn_norm`; nothing rotates."""

    activation = Activation.RELU
    ffn_norm = "attn_norm"
    gated = False

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        layers = range(self.hp.num_layers)
        self.scans = read_scans(file, [layer for layer in layers if self.has(f"blk.{layer}.ssm_in.weight")])
        self.router = replace(self.router, gating=Gating.SIGMOID)

    def is_dense(self, layer: int) -> bool:
        return bool(self.hp.kv_heads[layer]) or self.has(f"blk.{layer}.ssm_in.weight")

    @property
    def expert_hidden(self) -> int:
        latent = self.optional(f"blk.{min(self.towers)}.ffn_latent_down.weight")
        return self.hp.hidden if latent is None else self.file.tensors[latent].shape[0]

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        return list(self.scans.values())

    def rope_of(self, layer: int) -> Rope | None:
        return None

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        if layer in self.scans:
            return mamba2_block(self, g, x, self.scans[layer])
        return super().attention(g, layer, x)

    def dense_layer(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        return g.add(self.attention(g, layer, self.norm(g, x, f"blk.{layer}.attn_norm")), x)

    def _attend(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(g, x, f"blk.{layer}.attn_norm")

    def expert_input(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        latent = self.optional(f"blk.{layer}.ffn_latent_down.weight")
        return x if latent is None else g.linear(x, latent)

    def routed(self, g: Graph, layer: int) -> Tensor:
        out, latent = super().routed(g, layer), self.optional(f"blk.{layer}.ffn_latent_up.weight")
        return out if latent is None else g.linear(out, latent)
