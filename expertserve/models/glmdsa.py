"""GLM-5 (GLM-5, 5.1): DeepSeek's attention and experts, of whose sparse choice of tokens (DSA) no use is made.

A token attends to all before it; the choice would take the best `attention.indexer.top_k` (2048) of them, so that up to
as many the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile, TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.models.deepseek2 import DeepSeek2
from expertserve.models.registry import register


@register("glm-dsa")
class GlmDsa(DeepSeek2):
    """The weights that choose tokens stay in the file."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)

    def dense_weights(self) -> Sequence[TensorInfo]:
        return [info for info in super().dense_weights() if ".indexer." not in info.name]
