"""Step-3.5-Flash: heads of each layer's own, windows, a gate a head, limits in two layers, a leading dense layer."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    attention,
    bias,
    every_layer,
    experts,
    feed_forward,
    head_norms,
    matrix,
    norm,
    sizes,
)

WINDOWED = [False, True, True, True, False]
HEADS = [6 if windowed else 4 for windowed in WINDOWED]
DENSE = 1


def _layer(layer: int) -> list[Weight]:
    p = f"blk.{layer}."
    routed = [*experts(layer), bias(p + "exp_probs_b", EXPERTS), *feed_forward(layer, "_shexp", EXPERT_FFN)]
    return [
        *attention(layer, heads=HEADS[layer]),
        *head_norms(layer),
        matrix(p + "attn_gate", HEADS[layer], HIDDEN),
        norm(p + "ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="step35",
    metadata=sizes(
        block_count=len(WINDOWED),
        attention__head_count=HEADS,
        attention__head_count_kv=[KV_HEADS] * len(WINDOWED),
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__sliding_window=32,
        attention__sliding_window_pattern=WINDOWED,
        rope__dimension_count=HEAD_DIM,
        rope__freq_base=5000000.0,
        rope__freq_base_swa=10000.0,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_feed_forward_length=EXPERT_FFN,
        expert_gating_func=2,
        expert_weights_scale=3.0,
        expert_weights_norm=True,
        swiglu_clamp_exp=[0.0, 0.0, 0.0, 0.5, 0.4],
        swiglu_clamp_shexp=[0.0, 0.0, 0.0, 0.0, 0.5],
    ),
    weights=every_layer(_layer, len(WINDOWED)),
    pre="deepseek-v3",
)
