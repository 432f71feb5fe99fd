"""MiMo-V2-Flash: windows with sinks, keys wider than values, KV heads of each layer's own, a leading dense layer."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEADS,
    HIDDEN,
    bias,
    every_layer,
    experts,
    feed_forward,
    matrix,
    norm,
    sizes,
)

WINDOWED = [False, True, True, True, False]
KV_HEADS = [2 if windowed else 1 for windowed in WINDOWED]
KEY, VALUE, ROTATED = 24, 16, 8


def _layer(layer: int) -> list[Weight]:
    p, kv_heads = f"blk.{layer}.", KV_HEADS[layer]
    routed = [*experts(layer), bias(p + "exp_probs_b", EXPERTS)]
    return [
        norm(p + "attn_norm"),
        matrix(p + "attn_q", HEADS * KEY, HIDDEN, 1.5),
        matrix(p + "attn_k", kv_heads * KEY, HIDDEN, 1.5),
        matrix(p + "attn_v", kv_heads * VALUE, HIDDEN),
        matrix(p + "attn_output", HIDDEN, HEADS * VALUE),
        *([Weight(p + "attn_sinks.weight", (HEADS,), 1.0, narrow=False)] if WINDOWED[layer] else []),
        norm(p + "ffn_norm"),
        *(routed if layer else feed_forward(layer)),
    ]


MADE = Made(
    architecture="mimo2",
    metadata=sizes(
        block_count=len(WINDOWED),
        attention__head_count_kv=KV_HEADS,
        attention__key_length=KEY,
        attention__value_length=VALUE,
        attention__value_scale=0.7,
        attention__sliding_window=32,
        attention__sliding_window_pattern=WINDOWED,
        rope__dimension_count=ROTATED,
        rope__freq_base=5000000.0,
        rope__freq_base_swa=10000.0,
        expert_feed_forward_length=EXPERT_FFN,
        expert_gating_func=2,
    ),
    weights=every_layer(_layer, len(WINDOWED)),
    pre="qwen2",
)
