"""Hyper-parameters of a model, read from GGUF metadata and checked for sense.

Every number a model builds shapes from passes through here once, so that a family file can trust what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.experts.router import Gating, RouterRule
from expertserve.gguf.file import GGUFFile
from expertserve.ops.base import Rope, RopeStyle

FREQ_FACTORS = "rope_freqs.weight"
MAX_COUNT = 1 << 24


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes that all families share; see the GGUF specification for the keys.

    Attributes:
        num_layers: layers of the trunk; those after it in the file predict tokens further ahead.
        num_heads: of the layer that has most.
        heads: of each layer, those after the trunk too.
        kv_heads: the same of K and V; none in a layer that does not attend.
    """

    num_layers: int
    hidden: int
    num_heads: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    k_dim: int
    v_dim: int
    eps: float
    context_length: int
    num_experts: int
    top_k: int


def read_count(file: GGUFFile, key: str, default: int | EllipsisType = ...) -> int:
    """A positive whole number under `{architecture}.{key}`."""
    value: int = file.get(key, default, kind=int)
    if not 0 < value <= MAX_COUNT:
        raise GGUFError(f"{file.paths[0].name}: {file.architecture}.{key} is {value!r}, expected a positive number")
    return value


def read_float(file: GGUFFile, key: str, default: float) -> float:
    """A finite number under `{architecture}.{key}`."""
    value: float = file.get(key, default, kind=float)
    if not abs(value) < 1e30:
        raise GGUFError(f"{file.paths[0].name}: {file.architecture}.{key} is {value!r}, expected a number")
    return value


def read_hparams(file: GGUFFile) -> HParams:
    """The sizes of a model whose layers are alike."""
    hidden = read_count(file, "embedding_length")
    num_experts, top_k = read_count(file, "expert_count"), read_count(file, "expert_used_count")
    if top_k > num_experts:
        raise GGUFError(f"{file.paths[0].name}: expert_used_count {top_k} exceeds expert_count {num_experts}")
    blocks, ahead = read_count(file, "block_count"), file.get("nextn_predict_layers", 0, kind=int)
    if not 0 <= ahead < blocks:
        raise GGUFError(f"{file.paths[0].name}: nextn_predict_layers is {ahead} of {blocks} layers")
    heads = _read_heads(file, "attention.head_count", blocks)
    num_heads = max(heads)
    k_dim = read_count(file, "attention.key_length", max(hidden // max(num_heads, 1), 1))
    return HParams(
        num_layers=blocks - ahead,
        hidden=hidden,
        num_heads=num_heads,
        heads=heads,
        kv_heads=_read_heads(file, "attention.head_count_kv", blocks, num_heads),
        k_dim=k_dim,
        v_dim=read_count(file, "attention.value_length", k_dim),
        eps=read_float(file, "attention.layer_norm_rms_epsilon", 1e-5),
        context_length=read_count(file, "context_length", 4096),
        num_experts=num_experts,
        top_k=top_k,
    )


def _read_heads(file: GGUFFile, key: str, layers: int, default: int | EllipsisType = ...) -> tuple[int, ...]:
    """Heads of each layer, which the file states once or layer by layer."""
    counts = file.get(key, default)
    if not isinstance(counts, list):
        counts = [read_count(file, key, default)] * layers
    if len(counts) != layers or not all(isinstance(n, int) and 0 <= n <= MAX_COUNT for n in counts):
        raise GGUFError(
            f"{file.paths[0].name}: {file.architecture}.{key} is not one number, or one for each of {layers} layers"
        )
    return tuple(counts)


def read_windowed(file: GGUFFile, layers: int, period: int) -> tuple[bool, ...]:
    """Whether each layer sees a window only: as the file lists them, else all but the last of every `period`."""
    period_or_list = file.get("attention.sliding_window_pattern", period)
    if isinstance(period_or_list, list):
        windowed = tuple(map(bool, period_or_list[:layers]))
    else:
        period = read_count(file, "attention.sliding_window_pattern", period)
        windowed = tuple((layer + 1) % period != 0 for layer in range(layers))
    if len(windowed) < layers:
        raise GGUFError(
            f"{file.paths[0].name}: {file.architecture}.attention.sliding_window_pattern lists {len(windowed)} of "
            f"{layers} layers"
        )
    return windowed


def read_rope(file: GGUFFile, style: RopeStyle, head_dim: int) -> Rope:
    """Rotary embedding with linear or YaRN scaling and frequency factors, as the file says."""
    kind: Any = file.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    factor = read_float(file, "rope.scaling.factor", read_float(file, "rope.scale_linear", 0.0))
    if factor < 0:
        raise GGUFError(f"{file.paths[0].name}: rope.scaling.factor is {factor}, expected a positive number")
    yarn = kind == "yarn"
    base = read_float(file, "rope.freq_base", 10000.0)
    if base <= 0:
        raise GGUFError(f"{file.paths[0].name}: rope.freq_base is {base}, expected a positive number")
    return Rope(
        dims=read_count(file, "rope.dimension_count", head_dim),
        style=style,
        freq_base=base,
        freq_scale=1.0 if kind == "none" or factor == 0 else 1.0 / factor,
        original_context=read_count(
            file, "rope.scaling.original_context_length", read_count(file, "context_length", 4096)
        ),
        ext_factor=read_float(file, "rope.scaling.yarn_ext_factor", 1.0) if yarn else 0.0,
        attn_factor=read_float(file, "rope.scaling.attn_factor", 1.0),
        beta_fast=read_float(file, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read_float(file, "rope.scaling.yarn_beta_slow", 1.0),
        freq_factors=FREQ_FACTORS if FREQ_FACTORS in file.tensors else None,
    )


def read_router_rule(file: GGUFFile, top_k: int, *, normalise: bool) -> RouterRule:
    """The family's rule, where metadata does not say otherwise."""
    gating = file.get("expert_gating_func", Gating.SOFTMAX.value) or Gating.SOFTMAX.value
    if gating not in [g.value for g in Gating]:
        raise UnsupportedModelError(f"expert_gating_func {gating!r} is not supported")
    groups = read_count(file, "expert_group_count", 1)
    groups_used, experts = read_count(file, "expert_group_used_count", groups), read_count(file, "expert_count")
    if experts % groups or groups_used > groups or top_k > groups_used * (experts // groups):
        raise GGUFError(
            f"{file.paths[0].name}: {top_k} of {experts} experts do not come from {groups_used} of {groups} groups"
        )
    return RouterRule(
        top_k=top_k,
        gating=Gating(gating),
        normalise=bool(file.get("expert_weights_norm", normalise)),
        scale=read_float(file, "expert_weights_scale", 1.0) or 1.0,
        groups=groups,
        groups_used=groups_used,
    )
