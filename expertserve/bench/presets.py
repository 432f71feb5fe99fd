"""The real models whose shapes a synthetic one can have: sizes, tensors and metadata of each.

Owns names, shapes, types and spread of tensors as llama.cpp's converter writes them; what their values are is for
synth.py. Sizes are those of the published configurations. A preset is plain data: replace a field,
and the rest follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from expertserve.experts.router import Gating, RouterRule
from expertserve.gguf.tensor import TensorType, row_bytes

F32, Q8_0, Q6_K, Q4_K, MXFP4 = (
    TensorType.F32,
    TensorType.Q8_0,
    TensorType.Q6_K,
    TensorType.Q4_K,
    TensorType.MXFP4,
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written.

    Attributes:
        shape: row-major, outermost first.
        gain: deviation of what a product with it gives for an input of deviation 1; of the values themselves for a
            vector.
        mean: of the values, for a vector.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    gain: float = 1.0
    mean: float = 0.0

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * row_bytes(self.shape[-1], self.type)

    @property
    def std(self) -> float:
        return self.gain if len(self.shape) == 1 else self.gain * self.shape[-1] ** -0.5


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv:2405.04434): both short vectors, a head's parts."""

    query: int
    keys: int
    nope: int
    rotated: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model's sizes, by the names of the GGUF specification.

    Attributes:
        ffn, shared_ffn, dense_ffn: of a routed expert, of the shared one, of a leading dense layer.
        expert_type, output_type: of routed experts, of the output matrix; other matrices are Q8_0.
        biased: attention, router and experts have biases, and every head a sink.
        score_merged: the vocabulary is SentencePiece's; byte pairs otherwise, cut into words as `pre` says.
        extra: further metadata, without the architecture's prefix.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    ffn: int
    vocab: int
    context: int
    rope_base: float = 1e6
    eps: float = 1e-6
    shared_ffn: int = 0
    dense_ffn: int = 0
    dense_layers: int = 0
    latent: Latent | None = None
    head_norms: bool = False
    biased: bool = False
    rule: RouterRule
    expert_type: TensorType = Q4_K
    output_type: TensorType = Q6_K
    pre: str = "qwen2"
    score_merged: bool = False
    extra: Mapping[str, Any]

    def with_layers(self, layers: int) -> Preset:
        """The same model of fewer layers, of which at least one has routed experts."""
        return replace(self, layers=layers, dense_layers=min(self.dense_layers, layers - 1))

    def routed(self, layer: int) -> bool:
        return layer >= self.dense_layers

    def tensors(self) -> Iterator[Planned]:
        """All tensors in the order of the file."""
        yield Planned("token_embd.weight", (self.vocab, self.hidden), Q8_0)
        for layer in range(self.layers):
            yield from self._layer(layer)
        yield _norm("output_norm.weight", self.hidden)
        yield Planned("output.weight", (self.vocab, self.hidden), self.output_type)

    def _layer(self, layer: int) -> Iterator[Planned]:
        p = f"blk.{layer}."
        yield _norm(p + "attn_norm.weight", self.hidden)
        yield from self._latent_attention(p) if self.latent else self._attention(p)
        yield _norm(p + ("post_attention_norm" if self.biased else "ffn_norm") + ".weight", self.hidden)
        if self.routed(layer):
            yield from self._experts(p)
        else:
            yield from self._dense(p, "", self.dense_ffn)

    def _attention(self, p: str) -> Iterator[Planned]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for role, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield Planned(f"{p}attn_{role}.weight", (rows, self.hidden), Q8_0)
            if self.biased:
                yield _bias(f"{p}attn_{role}.bias", rows)
        if self.head_norms:
            yield _norm(p + "attn_q_norm.weight", self.head_dim)
            yield _norm(p + "attn_k_norm.weight", self.head_dim)
        yield Planned(p + "attn_output.weight", (self.hidden, queries), Q8_0, self._branch_gain)
        if self.biased:
            yield _bias(p + "attn_output.bias", self.hidden)
            yield _bias(p + "attn_sinks.weight", self.heads)

    def _latent_attention(self, p: str) -> Iterator[Planned]:
        assert self.latent is not None
        a = self.latent
        yield Planned(p + "attn_q_a.weight", (a.query, self.hidden), Q8_0)
        yield _norm(p + "attn_q_a_norm.weight", a.query)
        yield Planned(p + "attn_q_b.weight", (self.heads * (a.nope + a.rotated), a.query), Q8_0)
        yield Planned(p + "attn_kv_a_mqa.weight", (a.keys + a.rotated, self.hidden), Q8_0)
        yield _norm(p + "attn_kv_a_norm.weight", a.keys)
        yield Planned(p + "attn_k_b.weight", (self.heads, a.keys, a.nope), Q8_0, (a.nope / a.keys) ** 0.5)
        yield Planned(p + "attn_v_b.weight", (self.heads, a.value, a.keys), Q8_0)
        yield Planned(p + "attn_output.weight", (self.hidden, self.heads * a.value), Q8_0, self._branch_gain)

    def _experts(self, p: str) -> Iterator[Planned]:
        e, h, f = self.experts, self.hidden, self.ffn
        yield Planned(p + "ffn_gate_inp.weight", (e, h), F32)
        if self.biased:
            yield Planned(p + "ffn_gate_inp.bias", (e,), F32, 0.0)
        if self.rule.gating is Gating.SIGMOID:
            yield Planned(p + "exp_probs_b.bias", (e,), F32, 0.0)
        down_gain = self._down_gain * self.top_k**0.5 / self.rule.scale
        for role, rows, columns, gain in (("gate", f, h, 1.0), ("up", f, h, 1.0), ("down", h, f, down_gain)):
            yield Planned(f"{p}ffn_{role}_exps.weight", (e, rows, columns), self.expert_type, gain)
            if self.biased:
                yield Planned(f"{p}ffn_{role}_exps.bias", (e, rows), F32, 0.02 * rows**0.5)
        if self.shared_ffn:
            yield from self._dense(p, "_shexp", self.shared_ffn)

    def _dense(self, p: str, suffix: str, ffn: int) -> Iterator[Planned]:
        yield Planned(f"{p}ffn_gate{suffix}.weight", (ffn, self.hidden), Q8_0)
        yield Planned(f"{p}ffn_up{suffix}.weight", (ffn, self.hidden), Q8_0)
        yield Planned(f"{p}ffn_down{suffix}.weight", (self.hidden, ffn), Q8_0, self._down_gain)

    @property
    def _branch_gain(self) -> float:
        """Of a layer's two branches, so that all of them together add BRANCHES to the residual stream's variance."""
        return float((BRANCHES / (2 * self.layers)) ** 0.5)

    @property
    def _down_gain(self) -> float:
        """What a gated input of deviation 0.6 needs, so that the branch comes to `_branch_gain`."""
        return self._branch_gain / 0.6

    def metadata(self) -> dict[str, Any]:
        """Keys and values of the header, without the vocabulary."""
        keys: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.dense_ffn or self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": 1 if self.latent else self.kv_heads,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.rope_base,
            "expert_count": self.experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.ffn,
            "vocab_size": self.vocab,
        }
        if self.latent:
            a = self.latent
            keys |= {
                "attention.q_lora_rank": a.query,
                "attention.kv_lora_rank": a.keys,
                "attention.key_length": a.keys + a.rotated,
                "attention.value_length": a.keys,
                "attention.key_length_mla": a.nope + a.rotated,
                "attention.value_length_mla": a.value,
                "rope.dimension_count": a.rotated,
                "leading_dense_block_count": self.dense_layers,
            }
        else:
            names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
            keys |= dict.fromkeys(names, self.head_dim)
        return {f"{self.architecture}.{key}": value for key, value in (keys | dict(self.extra)).items()}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def parameters(self) -> tuple[int, int]:
        """All of them, and those that one token is multiplied with: its experts, and not the table of embeddings."""
        total = active = 0
        for tensor in self.tensors():
            total += tensor.elements
            if "_exps." in tensor.name:
                active += tensor.elements * self.top_k // self.experts
            elif tensor.name != "token_embd.weight":
                active += tensor.elements
        return total, active


BRANCHES = 0.1
"""Variance that attention and feed-forward add to the residual stream, whose embeddings have 1: so little that routers
see what was put into the embeddings, at any depth."""


def _norm(name: str, size: int) -> Planned:
    return Planned(name, (size,), F32, 0.02, 1.0)


def _bias(name: str, size: int) -> Planned:
    return Planned(name, (size,), F32, 0.02)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, **other: Any) -> Preset:
    sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "experts": 128, "vocab": 151936, "context": 40960} | other
    return Preset(
        architecture="qwen3moe",
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        top_k=8,
        head_norms=True,
        rule=RouterRule(8),
        extra={},
        **sizes,
    )


def _gpt_oss(layers: int, experts: int) -> Preset:
    return Preset(
        architecture="gpt-oss",
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts=experts,
        top_k=4,
        ffn=2880,
        vocab=201088,
        context=131072,
        rope_base=150000.0,
        eps=1e-5,
        biased=True,
        rule=RouterRule(4),
        expert_type=MXFP4,
        output_type=Q8_0,
        pre="gpt-4o",
        extra={
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    )


_DEEPSEEK_V3 = Preset(
    architecture="deepseek2",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    experts=256,
    top_k=8,
    ffn=2048,
    shared_ffn=2048,
    dense_ffn=18432,
    dense_layers=3,
    latent=Latent(query=1536, keys=512, nope=128, rotated=64, value=128),
    vocab=129280,
    context=163840,
    rope_base=10000.0,
    rule=RouterRule(8, Gating.SIGMOID, scale=2.5, groups=8, groups_used=4),
    pre="deepseek-v3",
    extra={
        "expert_group_count": 8,
        "expert_group_used_count": 4,
        "expert_gating_func": Gating.SIGMOID.value,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
)
_MIXTRAL = Preset(
    architecture="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    experts=8,
    top_k=2,
    ffn=14336,
    vocab=32000,
    context=32768,
    eps=1e-5,
    rule=RouterRule(2),
    score_merged=True,
    extra={},
)

PRESETS: dict[str, Preset] = {
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536),
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": _MIXTRAL,
    "small": _qwen3(16, 1024, 16, 512, experts=64, vocab=32000, context=8192),
    "mid": _qwen3(27, 2048, 32, 768, vocab=32000, context=32768),
}
