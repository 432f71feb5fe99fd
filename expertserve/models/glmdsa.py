"""GLM-5 (GLM-5, 5.1): DeepSeek's attention and experts, for contexts too short to choose tokens from (DSA).

An indexer chooses the `attention.indexer.top_k` (2048) tokens that one attends to; the context ends where there would
be more, so that a token attends to all before it and nothing is left to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile, TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.models.deepseek2 import DeepSeek2
from expertserve.models.hparams import read_count
from expertserve.models.registry import register

CHOSEN = 2048


@register("glm-dsa")
class GlmDsa(DeepSeek2):
    """The weights that choose tokens stay in the file."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        most = read_count(file, "attention.indexer.top_k", CHOSEN)
        self.hp = replace(self.hp, context_length=min(self.hp.context_length, most))
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)

    def dense_weights(self) -> Sequence[TensorInfo]:
        return [info for info in super().dense_weights() if ".indexer." not in info.name]
