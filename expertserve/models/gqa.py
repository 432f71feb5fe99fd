"""Grouped-query attention as plain decoder families have it (arXiv:2305.13245).

A family states its RoPE pairing and how Q and K are normalised; biases are used where the file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import read_float, read_rope
from expertserve.models.model import Model
from expertserve.ops.base import Graph, KVLayout, RopeStyle, Tensor


class QKNorm(Enum):
    """Over what Q and K are RMS-normalised before rotation."""

    NONE = "none"
    HEAD = "head"
    ROW = "row"


class GqaModel(Model):
    """Decoder with grouped-query attention and routed experts in every layer."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NEOX
    qk_norm: ClassVar[QKNorm] = QKNorm.NONE

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.rope = read_rope(file, self.rope_style, self.hp.k_dim)
        self.attention_scale = read_float(file, "attention.scale", 0.0) or self.hp.k_dim**-0.5

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        hp, p = self.hp, f"blk.{layer}."
        q = self._project(g, p + "attn_q", x, hp.num_heads, hp.k_dim, rotate=True)
        k = self._project(g, p + "attn_k", x, hp.num_kv_heads, hp.k_dim, rotate=True)
        v = self._project(g, p + "attn_v", x, hp.num_kv_heads, hp.v_dim, rotate=False)
        kv = KVLayout(layer, hp.num_kv_heads, hp.k_dim, hp.v_dim)
        out = g.attention(q, k, v, kv, self.attention_scale)
        return g.linear(out, p + "attn_output.weight", self._optional(p + "attn_output.bias"))

    def _project(self, g: Graph, name: str, x: Tensor, heads: int, dim: int, *, rotate: bool) -> Tensor:
        out = g.linear(x, name + ".weight", self._optional(name + ".bias"))
        if rotate and self.qk_norm is QKNorm.ROW:
            out = g.rms_norm(out, name + "_norm.weight", self.hp.eps)
        out = g.reshape(out, (g.rows, heads, dim))
        if rotate and self.qk_norm is QKNorm.HEAD:
            out = g.rms_norm(out, name + "_norm.weight", self.hp.eps)
        return g.rope(out, self.rope) if rotate else out

    def _optional(self, name: str) -> str | None:
        return name if self.has(name) else None
