"""K-EXAONE: windows in three layers of four, a leading dense layer, a shared expert, V3's routing, an unused layer."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    attention,
    bias,
    every_layer,
    experts,
    feed_forward,
    head_norms,
    norm,
    sizes,
)

LAYERS, DENSE = 5, 1


def _layer(layer: int) -> list[Weight]:
    routed = [*experts(layer), *feed_forward(layer, "_shexp", EXPERT_FFN), bias(f"blk.{layer}.exp_probs_b", EXPERTS)]
    return [
        *attention(layer),
        *head_norms(layer),
        norm(f"blk.{layer}.ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="exaone-moe",
    metadata=sizes(
        block_count=LAYERS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__sliding_window=32,
        attention__sliding_window_pattern=[True, False, True, True, False],
        rope__scaling__type="none",
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=1,
        expert_shared_feed_forward_length=EXPERT_FFN,
        expert_weights_scale=2.5,
        expert_weights_norm=True,
        expert_gating_func=2,
        nextn_predict_layers=0,
    ),
    weights=every_layer(_layer, LAYERS),
    pre="exaone-moe",
)
