"""DBRX: layer norms, fused Q, K and V whose values are clamped, sixteen experts of which four are taken."""

from __future__ import annotations

from collections.abc import Mapping

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel
from expertserve.models.hparams import read_float
from expertserve.models.registry import register
from expertserve.ops.base import Graph, Tensor


@register("dbrx")
class Dbrx(GqaModel):
    """Order of operations of DBRX 132B."""

    ffn_norm = "attn_output_norm"

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.eps = read_float(file, "attention.layer_norm_epsilon", 1e-5)

    def norm(self, g: Graph, x: Tensor, name: str) -> Tensor:
        return g.layer_norm(x, f"{name}.weight", self.eps)
