"""GLM-4.5 and GLM-4.6: biases on Q, K and V, leading dense layers, a shared expert, a draft layer."""

from __future__ import annotations

from collections.abc import Mapping

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("glm4moe")
class Glm4Moe(GqaModel):
    """Q and K are normalised a head in the files that have the norms (GLM-4.5, not GLM-4.5-Air)."""

    ffn_norm = "post_attention_norm"
    predicts_ahead = True

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.qk_norm = QKNorm.HEAD if self.has("blk.0.attn_q_norm.weight") else QKNorm.NONE
