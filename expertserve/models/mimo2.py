"""MiMo-V2-Flash (Xiaomi): windows with sinks in most layers, keys wider than values, a bias for the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import read_float
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel
from expertserve.ops.base import Graph, Rope, Tensor


@register("mimo2")
class Mimo2(WindowedModel):
    """All layers rotate, those with a window by frequencies of their own; a layer's KV heads are its own too."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.router = replace(self.router, gating=Gating.SIGMOID, normalise=True)
        self.window_rope = replace(self.rope, freq_base=read_float(file, "rope.freq_base_swa", self.rope.freq_base))
        self.value_scale = read_float(file, "attention.value_scale", 0.0) or 1.0

    def rope_of(self, layer: int) -> Rope:
        return self.window_rope if self.windowed[layer] else self.rope

    def attention_output(self, g: Graph, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        return self._scaled(g, super().attention_output(g, layer, x, mixed), self.value_scale)
