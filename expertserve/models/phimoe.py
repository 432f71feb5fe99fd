"""Phi-3.5-MoE: norms and products with biases, RoPE by one of two lists of frequency factors (LongRoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register


@register("phimoe")
class PhiMoe(GqaModel):
    """The arithmetic of llama.cpp: RMS norms, and a router that takes the best by softmax."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.fit_context(self.rope.original_context)

    def fit_context(self, tokens: int) -> None:
        """The long factors (arXiv:2402.13753) serve every sequence where one may outgrow the original context."""
        length = "long" if tokens > self.rope.original_context else "short"
        self.rope = replace(self.rope, freq_factors=self.optional(f"rope_factors_{length}.weight"))
