"""Ling v1: experts in every layer, shared ones beside."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, attention, every_layer, experts, feed_forward, norm, sizes


def _layer(layer: int) -> list[Weight]:
    return [
        *attention(layer),
        norm(f"blk.{layer}.ffn_norm"),
        *experts(layer),
        *feed_forward(layer, "_shexp", 2 * EXPERT_FFN),
    ]


MADE = Made(
    architecture="bailingmoe",
    metadata=sizes(
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        rope__dimension_count=HEAD_DIM,
        leading_dense_block_count=0,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=2,
        expert_weights_scale=1.0,
        expert_weights_norm=True,
    ),
    weights=every_layer(_layer),
    pre="bailingmoe",
)
