"""K-EXAONE: windows in three layers of four, a leading dense layer, a shared expert, V3's routing, an unused layer."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
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

LAYERS, DENSE = 5, 1  # and one more layer, which predicts further ahead


def _layer(layer: int) -> list[Weight]:
    routed = [*experts(layer), *feed_forward(layer, "_shexp", EXPERT_FFN), bias(f"blk.{layer}.exp_probs_b", EXPERTS)]
    return [
        *attention(layer),
        *head_norms(layer),
        norm(f"blk.{layer}.ffn_norm"),
        *(routed if DENSE <= layer < LAYERS else feed_forward(layer)),
    ]


MADE = Made(
    architecture="exaone-moe",
    metadata=sizes(
        block_count=LAYERS + 1,
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
        nextn_predict_layers=1,
    ),
    weights=[
        *every_layer(_layer, LAYERS + 1),
        matrix(f"blk.{LAYERS}.nextn.eh_proj", HIDDEN, 2 * HIDDEN),
        *(norm(f"blk.{LAYERS}.nextn.{name}") for name in ("enorm", "hnorm", "shared_head_norm")),
    ],
    pre="exaone-moe",
)
