"""Cohere 2 MoE: one layer norm a layer, windows, a leading dense layer that sees all, shared experts."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, attention, every_layer, experts, feed_forward, sizes

LAYERS, DENSE = 4, 1


def _layer(layer: int) -> list[Weight]:
    routed = [*experts(layer), *feed_forward(layer, "_shexp", 2 * EXPERT_FFN)]
    return [*attention(layer), *(feed_forward(layer) if layer < DENSE else routed)]


MADE = Made(
    architecture="cohere2moe",
    metadata=sizes(
        block_count=LAYERS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=1e-5,
        attention__sliding_window=32,
        attention__sliding_window_pattern=[False, True, True, False],
        rope__dimension_count=HEAD_DIM,
        rope__scaling__type="none",
        leading_dense_block_count=DENSE,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=2,
        expert_shared_feed_forward_length=2 * EXPERT_FFN,
        expert_weights_norm=True,
        logit_scale=0.75,
    ),
    weights=every_layer(_layer, LAYERS),
    pre="cohere2moe",
)
