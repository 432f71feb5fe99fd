"""dots.llm1: a leading dense layer, heads that are normalised, sigmoid routing with a bias and a scale."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    attention,
    bias,
    every_layer,
    experts,
    feed_forward,
    head_norms,
    norm,
    sizes,
)

DENSE = 1


def _layer(layer: int) -> list[Weight]:
    shared = feed_forward(layer, "_shexp", 2 * EXPERT_FFN)
    routed = [*experts(layer), *shared, bias(f"blk.{layer}.exp_probs_b", EXPERTS)]
    return [
        *attention(layer, kv_heads=HEADS),
        *head_norms(layer),
        norm(f"blk.{layer}.ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="dots1",
    metadata=sizes(
        attention__head_count_kv=HEADS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=2,
        expert_weights_scale=2.5,
        expert_weights_norm=True,
        expert_gating_func=2,
    ),
    weights=every_layer(_layer),
    pre="qwen2",
)
