"""DeepSeekMoE 16B: a leading dense layer, shared experts, plain attention with a KV head a head."""

from tests.made.model import Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    HEAD_DIM,
    HEADS,
    attention,
    every_layer,
    experts,
    feed_forward,
    norm,
    sizes,
)

DENSE = 1


def _layer(layer: int) -> list[Weight]:
    routed = [*experts(layer), *feed_forward(layer, "_shexp", 2 * EXPERT_FFN)]
    return [
        *attention(layer, kv_heads=HEADS),
        norm(f"blk.{layer}.ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="deepseek",
    metadata=sizes(
        attention__head_count_kv=HEADS,
        rope__dimension_count=HEAD_DIM,
        rope__scaling__type="none",
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=2,
        expert_weights_scale=1.0,
    ),
    weights=every_layer(_layer),
    pre="deepseek-llm",
)
