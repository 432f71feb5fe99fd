"""The parts that made-up models are put together from: a few sizes, and the weights of the common blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.made.model import Weight

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 3, 64, 4, 2, 16
EXPERTS, TOP_K, EXPERT_FFN, FFN = 8, 2, 32, 96


def sizes(**others: Any) -> dict[str, Any]:
    """The metadata that every family writes, and others (`__` for a dot); None leaves one out."""
    common: dict[str, Any] = {
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "expert_count": EXPERTS,
        "expert_used_count": TOP_K,
    }
    both = common | {key.replace("__", "."): value for key, value in others.items()}
    return {key: value for key, value in both.items() if value is not None}


def every_layer(weights_of: Callable[[int], list[Weight]], layers: int = LAYERS) -> list[Weight]:
    """The weights of all layers, one after another."""
    return [weight for layer in range(layers) for weight in weights_of(layer)]


def matrix(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    """A matrix that gives values of about `gain` for values of about one."""
    return Weight(f"{name}.weight", (outputs, inputs), gain * inputs**-0.5)


def norm(name: str, size: int = HIDDEN) -> Weight:
    """The weights of a norm."""
    return Weight(f"{name}.weight", (size,), 0.1, 1.0, narrow=False)


def bias(name: str, size: int, spread: float = 0.3) -> Weight:
    """A bias, or another vector around zero."""
    return Weight(f"{name}.bias", (size,), spread, narrow=False)


def attention(
    layer: int, *, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, fused: bool = False
) -> list[Weight]:
    """A norm and the four matrices of grouped-query attention, with Q, K and V in one where they are fused."""
    p, rows = f"blk.{layer}.attn_", {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    parts = {"qkv": sum(rows.values())} if fused else rows
    return [
        norm(p + "norm"),
        *(matrix(p + part, size, HIDDEN, 1.0 if part == "v" else 1.5) for part, size in parts.items()),
        matrix(p + "output", HIDDEN, heads * head_dim),
    ]


def head_norms(layer: int, head_dim: int = HEAD_DIM) -> list[Weight]:
    """Norms of Q and K a head."""
    return [norm(f"blk.{layer}.attn_{role}_norm", head_dim) for role in "qk"]


def feed_forward(layer: int, suffix: str = "", ffn: int = FFN) -> list[Weight]:
    """The three matrices of a gated feed-forward."""
    p = f"blk.{layer}.ffn_"
    return [
        *(matrix(f"{p}{role}{suffix}", ffn, HIDDEN) for role in ("gate", "up")),
        matrix(f"{p}down{suffix}", HIDDEN, ffn, 2.0),
    ]


def experts(layer: int, *, count: int = EXPERTS, ffn: int = EXPERT_FFN, router: float = 1.5) -> list[Weight]:
    """A router, whose logits spread by about `router`, and the stacks of experts."""
    p = f"blk.{layer}.ffn_"
    return [
        Weight(p + "gate_inp.weight", (count, HIDDEN), router * HIDDEN**-0.5, narrow=False),
        *(Weight(f"{p}{role}_exps.weight", (count, ffn, HIDDEN), HIDDEN**-0.5) for role in ("gate", "up")),
        Weight(p + "down_exps.weight", (count, HIDDEN, ffn), 2.0 * ffn**-0.5),
    ]
