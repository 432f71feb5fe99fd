"""Multi-head latent attention (MLA) and DeepSeek's routing: DeepSeek-V2, V3 and R1, Kimi-K2, GLM-4.7-Flash.

Keys and values are made from one short vector a token (arXiv:2405.04434). Its matrices are absorbed into queries and
outputs, so that the KV cache keeps that vector and one rotated key only. A file from before they were split for that
(`attn_kv_b`) is served with whole keys and values instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from expertserve.errors import GGUFError
from expertserve.experts.router import Gating
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import read_count, read_float, read_rope
from expertserve.models.model import Model, PositionFactor
from expertserve.models.registry import register
from expertserve.ops.base import Graph, KVLayout, RopeStyle, Tensor


@register("deepseek2")
class DeepSeek2(Model):
    """A head's query and key are `nope` elements without position, then the rotated ones."""

    normalise_router = False

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        hp = self.hp
        self.latent = read_count(file, "attention.kv_lora_rank")
        self.head_dim = read_count(file, "attention.key_length_mla", hp.k_dim)
        self.value_dim = read_count(file, "attention.value_length_mla", hp.v_dim)
        rope = read_rope(file, RopeStyle.NORMAL, self.head_dim)
        self.nope = self.head_dim - rope.dims
        if self.nope <= 0:
            raise GGUFError(f"{file.paths[0].name}: heads of {self.head_dim} elements, of which {rope.dims} rotate")
        # YaRN's magnitude goes into the scores as a whole, and not into the rotated parts.
        stretch = math.log(1 / rope.freq_scale) if rope.ext_factor else 0.0
        self.rope = replace(rope, attn_factor=rope.attn_factor / (1 + 0.1 * stretch))
        magnitude = 1 + read_float(file, "rope.scaling.yarn_log_multiplier", 0.0) * stretch
        self.attention_scale = magnitude**2 / math.sqrt(self.head_dim)
        # What metadata leaves open: with a bias for the choice it is V3's rule, without V2's.
        biased = any(self.router_bias(layer) for layer in self.towers)
        if biased and not file.get("expert_gating_func", 0):
            self.router = replace(self.router, gating=Gating.SIGMOID)
        self.router = replace(self.router, group_judges=2 if biased else 1)
        self.temperature = read_temperature(file)

    def position_factors(self) -> Mapping[str, PositionFactor]:
        return {} if self.temperature is None else {"temperature": self.temperature}

    def kv_layout(self, layer: int) -> KVLayout:
        if self._absorbed(layer):
            return KVLayout(layer, 1, self.latent + self.rope.dims, self.latent, values_in_keys=True)
        return KVLayout(layer, self.hp.num_heads, self.head_dim, self.value_dim)

    def _absorbed(self, layer: int) -> bool:
        return not self.has(f"blk.{layer}.attn_kv_b.weight")

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        hp, p = self.hp, f"blk.{layer}.attn_"
        q = g.reshape(self._query(g, p, x), (g.rows, hp.num_heads, self.head_dim))
        q_nope, q_rope = g.part(q, 0, self.nope), g.rope(g.part(q, self.nope, self.head_dim), self.rope)
        both = g.linear(x, p + "kv_a_mqa.weight")
        latent = g.rms_norm(g.part(both, 0, self.latent), p + "kv_a_norm.weight", hp.eps)
        rotated = g.part(both, self.latent, self.latent + self.rope.dims)
        k_rope = g.rope(g.reshape(rotated, (g.rows, 1, self.rope.dims)), self.rope)
        kv = self.kv_layout(layer)
        if self._absorbed(layer):
            query = g.concat(g.head_linear(q_nope, p + "k_b.weight"), q_rope)
            key = g.concat(g.reshape(latent, (g.rows, 1, self.latent)), k_rope)
            mixed = g.attention(query, key, None, kv, self.attention_scale)
            latents = g.reshape(mixed, (g.rows, hp.num_heads, self.latent))
            values = g.head_linear(latents, p + "v_b.weight")
            out = g.reshape(values, (g.rows, hp.num_heads * self.value_dim))
        else:
            wide = self.nope + self.value_dim
            made = g.reshape(g.linear(latent, p + "kv_b.weight"), (g.rows, hp.num_heads, wide))
            key = g.concat(g.part(made, 0, self.nope), k_rope)
            out = g.attention(g.concat(q_nope, q_rope), key, g.part(made, self.nope, wide), kv, self.attention_scale)
        return g.linear(out, p + "output.weight")

    def _query(self, g: Graph, p: str, x: Tensor) -> Tensor:
        """All heads' queries; by way of a short vector of their own in the larger models."""
        if not self.has(p + "q.weight"):
            x = g.rms_norm(g.linear(x, p + "q_a.weight"), p + "q_a_norm.weight", self.hp.eps)
        q = g.linear(x, p + ("q.weight" if self.has(p + "q.weight") else "q_b.weight"))
        return q if self.temperature is None else g.mul(q, g.load("temperature"))


def read_temperature(file: GGUFFile) -> PositionFactor | None:
    """The factor on queries that keeps attention sharp at far positions, where the file asks for one."""
    gain = read_float(file, "attention.temperature_scale", 0.0)
    if not gain:
        return None
    step = read_count(file, "attention.temperature_length")
    return lambda positions: (1 + gain * np.log1p(positions // step)).astype(np.float32)
