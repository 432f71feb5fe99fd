"""Grouped-query attention as plain decoder families have it (arXiv:2305.13245).

A family states its RoPE pairing and how Q and K are normalised; biases are used where the file has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import read_float, read_rope
from expertserve.models.model import Model
from expertserve.ops.base import Graph, Rope, RopeStyle, Tensor


class QKNorm(Enum):
    """Over what Q and K are RMS-normalised, before rotation or after it."""

    NONE = "none"
    HEAD = "head"
    ROW = "row"
    ROTATED_HEAD = "rotated head"


class GqaModel(Model):
    """Decoder with grouped-query attention and routed experts in every layer."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NEOX
    qk_norm: QKNorm = QKNorm.NONE
    attention_softcap: float = 0.0

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.rope = read_rope(file, self.rope_style, self.hp.k_dim)
        self.clamp = read_float(file, "attention.clamp_kqv", 0.0)
        self.attention_scale = read_float(file, "attention.scale", 0.0) or self.hp.k_dim**-0.5

    def mask(self, layer: int) -> str:
        """The mask that a layer attends through."""
        return "mask"

    def rope_of(self, layer: int) -> Rope | None:
        """How a layer rotates, where it does."""
        return self.rope

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        hp, p = self.hp, f"blk.{layer}."
        kv = self.kv_layout(layer)
        heads = ((hp.heads[layer], kv.k_dim), (kv.num_heads, kv.k_dim), (kv.num_heads, kv.v_dim))
        if self.has(p + "attn_qkv.weight"):
            fused = g.linear(x, p + "attn_qkv.weight", self.optional(p + "attn_qkv.bias"))
            ends = list(itertools.accumulate((n * dim for n, dim in heads), initial=0))
            projected = [g.part(fused, ends[i], ends[i + 1]) for i in range(3)]
        else:
            names = [f"{p}attn_{role}" for role in "qkv"]
            projected = [g.linear(x, f"{name}.weight", self.optional(f"{name}.bias")) for name in names]
        if self.clamp > 0:
            projected = [g.clamp(part, self.clamp) for part in projected]
        q, k = (self.into_heads(g, layer, role, projected[i], *heads[i]) for i, role in enumerate("qk"))
        v = g.reshape(projected[2], (g.rows, *heads[2]))
        sinks = self.optional(p + "attn_sinks.weight")
        scale, cap = self.attention_scale, self.attention_softcap
        mixed = g.attention(q, k, v, kv, scale, mask=self.mask(layer), sinks=sinks, softcap=cap)
        return self.attention_output(g, layer, x, mixed)

    def attention_output(self, g: Graph, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        """The attention block's output for what its heads give [rows, heads * v_dim]; x is the block's input."""
        p = f"blk.{layer}.attn_output."
        return g.linear(mixed, p + "weight", self.optional(p + "bias"))

    def into_heads(self, g: Graph, layer: int, role: str, x: Tensor, heads: int, dim: int) -> Tensor:
        """Q or K, as `role` says ("q", "k"), in heads, normalised as the family has it, and rotated."""
        norm = f"blk.{layer}.attn_{role}_norm.weight"
        if self.qk_norm is QKNorm.ROW:
            x = g.rms_norm(x, norm, self.hp.eps)
        x = g.reshape(x, (g.rows, heads, dim))
        if self.qk_norm is QKNorm.HEAD:
            x = g.rms_norm(x, norm, self.hp.eps)
        rope = self.rope_of(layer)
        if rope is not None:
            x = g.rope(x, rope)
        return g.rms_norm(x, norm, self.hp.eps) if self.qk_norm is QKNorm.ROTATED_HEAD else x
