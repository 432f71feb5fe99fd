"""Tencent Hy3: a leading dense layer, a shared expert, a bias for the choice, and a draft layer that is not used."""

from dataclasses import replace

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
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

DENSE = 1


def _layer(layer: int) -> list[Weight]:
    name = f"blk.{layer}.exp_probs_b"
    choice = replace(bias(name, EXPERTS), name=name)
    routed = [*experts(layer), *feed_forward(layer, "_shexp", EXPERT_FFN), choice]
    return [
        *attention(layer),
        *head_norms(layer),
        norm(f"blk.{layer}.ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="hy_v3",
    metadata=sizes(
        block_count=LAYERS + 1,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=1,
        expert_shared_feed_forward_length=EXPERT_FFN,
        expert_weights_scale=2.826,
        expert_weights_norm=True,
        expert_gating_func=2,
        nextn_predict_layers=1,
    ),
    weights=[
        *every_layer(_layer, LAYERS + 1),
        matrix(f"blk.{LAYERS}.nextn.eh_proj", HIDDEN, 2 * HIDDEN),
        *(norm(f"blk.{LAYERS}.nextn.{name}") for name in ("enorm", "hnorm", "shared_head_norm")),
    ],
    pre="hunyuan",
)
