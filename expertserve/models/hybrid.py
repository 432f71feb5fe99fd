"""Decoders that mix gated-DeltaNet layers (arXiv:2412.06464) with gated full attention, as Qwen3-Next and Qwen3.5 do.

A family states how beta and alpha are projected, and which key head a value head reads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from expertserve.errors import GGUFError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.hparams import read_count
from expertserve.ops.base import Activation, DeltaLayout, Graph, RecurrentLayout, Tensor


class HybridModel(GqaModel):
    """Recurrent layers beside full attention, both followed by routed experts and a gated shared expert.

    The layer after the trunk, where the file has one, is one of full attention that predicts one token further ahead
    from the trunk's final hidden state and the next token.
    """

    qk_norm = QKNorm.HEAD
    ffn_norm = "post_attention_norm"
    predicts_ahead = True
    grouped_heads: ClassVar[bool]

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.delta = self._read_layouts()

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        return list(self.delta.values())

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        return self._delta_block(g, layer, x) if layer in self.delta else self._gated_attention(g, layer, x)

    @abstractmethod
    def beta_alpha(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes the writing strength and the decay of each value head, [rows, value heads] each."""

    def _delta_block(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        p, state = f"blk.{layer}.", self.delta[layer]
        qkv = g.silu(g.causal_conv(g.linear(x, p + "attn_qkv.weight"), p + "ssm_conv1d.weight", state))
        beta, alpha = self.beta_alpha(g, layer, x)
        out = g.gated_delta(qkv, alpha, beta, p + "ssm_a", state, self.hp.eps)
        heads = (g.rows, state.value_heads, state.value_dim)
        normed = g.rms_norm(g.reshape(out, heads), p + "ssm_norm.weight", self.hp.eps)
        gate = g.reshape(g.linear(x, p + "attn_gate.weight"), heads)
        gated = g.gated(gate, normed, Activation.SILU)
        return g.linear(g.reshape(gated, (g.rows, state.value_heads * state.value_dim)), p + "ssm_out.weight")

    def _gated_attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """Attention whose output is gated by a sigmoid; a query head and its gate lie side by side."""
        hp, kv, p = self.hp, self.kv_layout(layer), f"blk.{layer}."
        sizes = (2 * hp.num_heads * hp.k_dim, kv.num_heads * hp.k_dim, kv.num_heads * hp.v_dim)
        if self.has(p + "attn_qkv.weight"):
            fused, at = g.linear(x, p + "attn_qkv.weight"), (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
            q_gate, k, v = (g.part(fused, at[i], at[i + 1]) for i in range(3))
        else:
            q_gate, k, v = (g.linear(x, f"{p}attn_{role}.weight") for role in "qkv")
        q_gate = g.reshape(q_gate, (g.rows, hp.num_heads, 2 * hp.k_dim))
        gate = g.reshape(g.part(q_gate, hp.k_dim, 2 * hp.k_dim), (g.rows, hp.num_heads * hp.k_dim))
        q = self.into_heads(g, layer, "q", g.part(q_gate, 0, hp.k_dim), hp.num_heads, hp.k_dim)
        k = self.into_heads(g, layer, "k", k, kv.num_heads, hp.k_dim)
        v = g.reshape(v, (g.rows, kv.num_heads, hp.v_dim))
        out = g.attention(q, k, v, kv, self.attention_scale)
        return g.linear(g.mul(out, g.sigmoid(gate)), p + "attn_output.weight")

    def _read_layouts(self) -> dict[int, DeltaLayout]:
        """The layout of each recurrent layer, from the file's `ssm` keys."""
        file, layers = self.file, self.hp.num_layers
        interval = read_count(file, "full_attention_interval", 4)
        recurrent = file.get("attention.recurrent_layers", [(i + 1) % interval != 0 for i in range(layers)])
        if not isinstance(recurrent, list) or len(recurrent) < layers:
            raise GGUFError(f"{file.paths[0].name}: {file.architecture}.attention.recurrent_layers lacks layers")
        key_heads, value_heads = read_count(file, "ssm.group_count"), read_count(file, "ssm.time_step_rank")
        inner = read_count(file, "ssm.inner_size")
        if value_heads % key_heads or inner % value_heads:
            raise GGUFError(
                f"{file.paths[0].name}: {value_heads} value heads of the recurrent layers do not divide "
                f"among {key_heads} key heads or {inner} elements"
            )
        width, key_dim = read_count(file, "ssm.conv_kernel"), read_count(file, "ssm.state_size")
        sizes = (width, key_heads, value_heads, key_dim, inner // value_heads, self.grouped_heads)
        return {layer: DeltaLayout(layer, *sizes) for layer in range(layers) if recurrent[layer]}
