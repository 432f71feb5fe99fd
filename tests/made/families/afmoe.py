"""Arcee Trinity: windows in three layers of four, gated attention, four norms a layer, a bias for the choice."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HEADS,
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

LAYERS, DENSE = 5, 1


def _layer(layer: int) -> list[Weight]:
    p = f"blk.{layer}."
    shared = feed_forward(layer, "_shexp", EXPERT_FFN)
    routed = [*experts(layer), *shared, bias(p + "exp_probs_b", EXPERTS)]
    return [
        *attention(layer),
        *head_norms(layer),
        matrix(p + "attn_gate", HEADS * HEAD_DIM, HIDDEN),
        *(norm(p + name) for name in ("post_attention_norm", "ffn_norm", "post_ffw_norm")),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="afmoe",
    metadata=sizes(
        block_count=LAYERS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__sliding_window=32,
        rope__dimension_count=HEAD_DIM,
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=1,
        expert_weights_scale=2.826,
        expert_weights_norm=True,
        expert_gating_func=2,
    ),
    weights=every_layer(_layer, LAYERS),
    pre="afmoe",
    embedding_spread=HIDDEN**-0.5,
)
