"""LFM2-MoE: short gated convolutions beside grouped-query attention, a bias for the choice of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.hparams import read_count
from expertserve.models.registry import register
from expertserve.ops.base import ConvLayout, Graph, RecurrentLayout, Tensor


@register("lfm2moe")
class Lfm2Moe(GqaModel):
    """Layers without KV heads convolve; order of operations of LFM2-8B-A1B."""

    qk_norm = QKNorm.HEAD
    output_norm = "token_embd_norm"

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        width = read_count(file, "shortconv.l_cache")
        self.convolutions = {
            layer: ConvLayout(layer, width, self.hp.hidden) for layer, heads in enumerate(self.hp.kv_heads) if not heads
        }

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        return list(self.convolutions.values())

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        if layer not in self.convolutions:
            return super().attention(g, layer, x)
        p, n = f"blk.{layer}.shortconv.", self.hp.hidden
        both_gates_and_input = g.linear(x, p + "in_proj.weight")
        before, after, value = (g.part(both_gates_and_input, i * n, (i + 1) * n) for i in range(3))
        convolved = g.causal_conv(g.mul(before, value), p + "conv.weight", self.convolutions[layer])
        return g.linear(g.mul(after, convolved), p + "out_proj.weight")
