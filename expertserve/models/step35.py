"""Step-3.5-Flash (StepFun): windows in most layers, with heads of their own number, a gate a head, limited SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.errors import GGUFError
from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import QKNorm
from expertserve.models.hparams import read_count, read_float
from expertserve.models.registry import register
from expertserve.models.windowed import WindowedModel
from expertserve.ops.base import ExpertShape, Graph, Rope, Tensor


@register("step35")
class Step35(WindowedModel):
    """Layers that see all rotate half of a head, those with a window the whole, by frequencies of their own."""

    qk_norm = QKNorm.HEAD
    normalise_router = False

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        if not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)
        self.window_rope = replace(
            self.rope,
            dims=read_count(file, "rope.dimension_count_swa", self.rope.dims),
            freq_base=read_float(file, "rope.freq_base_swa", self.rope.freq_base),
            freq_factors=None,
        )
        self.rope = replace(self.rope, dims=self.rope.dims // 2)
        self.expert_limits, self.dense_limits = (self._read_limits(f"swiglu_clamp_{kind}") for kind in ("exp", "shexp"))

    def _read_limits(self, key: str) -> list[float]:
        """The limit of each layer's products; 0 for none."""
        layers = self.hp.num_layers
        limits = self.file.get(key, [0.0] * layers)
        if not isinstance(limits, list) or len(limits) < layers:
            raise GGUFError(f"{self.file.paths[0].name}: {self.file.architecture}.{key} is not one number a layer")
        return limits

    def rope_of(self, layer: int) -> Rope:
        return self.window_rope if self.windowed[layer] else self.rope

    def attention_output(self, g: Graph, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        gate = self.optional(f"blk.{layer}.attn_gate.weight")
        if gate is not None:
            heads = g.reshape(mixed, (g.rows, self.hp.heads[layer], self.hp.v_dim))
            each = g.reshape(g.sigmoid(g.linear(x, gate)), (*heads.shape[:2], 1))
            mixed = g.reshape(g.mul(heads, each), mixed.shape)
        return super().attention_output(g, layer, x, mixed)

    def expert_shape(self, tower: ExpertTower) -> ExpertShape:
        return replace(super().expert_shape(tower), limit=self.expert_limits[tower.layer])

    def _feed_forward(self, g: Graph, p: str, suffix: str, x: Tensor) -> Tensor:
        limit = self.dense_limits[int(p.split(".")[1])]
        if not limit:
            return super()._feed_forward(g, p, suffix, x)
        gate, up = (g.linear(x, f"{p}{role}{suffix}.weight") for role in ("gate", "up"))
        limited = g.mul(g.clamp(g.silu(gate), limit), g.clamp(up, limit))  # silu is nowhere under -0.3
        return g.linear(limited, f"{p}down{suffix}.weight")
