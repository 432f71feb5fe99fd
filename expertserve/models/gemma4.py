"""Gemma 4 MoE: experts beside a dense feed-forward, each behind norms of its own; windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.hparams import read_count, read_float
from expertserve.models.registry import register
from expertserve.ops.base import Activation, Graph, KVLayout, Rope, Tensor


@register("gemma4")
class Gemma4(GqaModel):
    """Order of operations of Gemma 4 26B-A4B: layers that see all have heads of another size, and keys for values."""

    activation = Activation.GELU
    qk_norm = QKNorm.HEAD

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        layers, pattern = self.hp.num_layers, file.get("attention.sliding_window_pattern")
        whole = isinstance(pattern, list) and len(pattern) == layers == len(self.towers)
        others = ("attention.shared_kv_layers", "embedding_length_per_layer_input")
        if not whole or any(file.get(key, 0) for key in others):
            raise UnsupportedModelError(
                f"{file.paths[0].name}: a {file.architecture} model with layers without experts, shared KV caches or "
                "embeddings of each layer; only those like Gemma 4 26B-A4B are served"
            )
        self.windowed = [bool(flag) for flag in pattern]
        self.embedding_scale = self.hp.hidden**0.5
        self.attention_scale = 1.0
        self.window_dims = tuple(read_count(file, f"attention.{role}_length_swa") for role in ("key", "value"))
        self.window_rope = replace(
            self.rope,
            dims=read_count(file, "rope.dimension_count_swa", self.window_dims[0]),
            freq_base=read_float(file, "rope.freq_base_swa", 10000.0),
            freq_factors=None,
        )

    @property
    def has_shared_expert(self) -> bool:
        """The dense feed-forward stands in its place."""
        return True

    def kv_layout(self, layer: int) -> KVLayout:
        kv = super().kv_layout(layer)
        return replace(kv, k_dim=self.window_dims[0], v_dim=self.window_dims[1]) if self.windowed[layer] else kv

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.window": Reach(read_count(self.file, "attention.sliding_window"))}

    def mask(self, layer: int) -> str:
        return "mask.window" if self.windowed[layer] else "mask"

    def rope_of(self, layer: int) -> Rope:
        return self.window_rope if self.windowed[layer] else self.rope

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """Its values are normalised too, and are the keys before their norm where a layer has no values of its own."""
        kv, p = self.kv_layout(layer), f"blk.{layer}."
        q, k = (g.linear(x, f"{p}attn_{role}.weight") for role in "qk")
        v = g.linear(x, p + "attn_v.weight") if self.has(p + "attn_v.weight") else k
        v = g.rms_norm(g.reshape(v, (g.rows, kv.num_heads, kv.v_dim)), None, self.hp.eps)
        q = self.into_heads(g, layer, "q", q, self.hp.num_heads, kv.k_dim)
        k = self.into_heads(g, layer, "k", k, kv.num_heads, kv.k_dim)
        out = g.attention(q, k, v, kv, self.attention_scale, mask=self.mask(layer))
        return self.norm(g, g.linear(out, p + "attn_output.weight"), p + "post_attention_norm")

    def front(self, g: Graph, layer: int, x: Tensor, *, guess: int | None = None) -> None:
        p = f"blk.{layer}."
        residual, dense_input = self._attend(g, layer, x)
        g.store("residual", residual)
        g.store("ffn_input", self.norm(g, residual, p + "pre_ffw_norm_2"))
        g.store("router", self.router_logits(g, layer, residual))
        g.store("shared", self.norm(g, self._feed_forward(g, p + "ffn_", "", dense_input), p + "post_ffw_norm_1"))
        if guess is not None:
            g.store("guess", self.router_logits(g, guess, residual))

    def router_logits(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        p = f"blk.{layer}.ffn_gate_inp."
        normed = g.rms_norm(x, p + "scale", self.hp.eps)
        return g.linear(g.scale(normed, self.hp.hidden**-0.5), p + "weight")

    def join(self, g: Graph, layer: int) -> Tensor:
        p = f"blk.{layer}."
        routed = self.norm(g, self.routed(g, layer), p + "post_ffw_norm_2")
        both = self.norm(g, g.add(routed, g.load("shared")), p + "post_ffw_norm")
        return g.mul_weight(g.add(both, g.load("residual")), p + "layer_output_scale.weight")
