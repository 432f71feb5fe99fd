"""Qwen3-VL-MoE, its text: normalised heads, RoPE in sections, layers that pictures are added to."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, attention, every_layer, experts, head_norms, norm, sizes


def _layer(layer: int) -> list[Weight]:
    return [*attention(layer), *head_norms(layer), norm(f"blk.{layer}.ffn_norm"), *experts(layer)]


MADE = Made(
    architecture="qwen3vlmoe",
    metadata=sizes(
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        rope__dimension_sections=[3, 3, 2, 0],
        n_deepstack_layers=2,
        expert_feed_forward_length=EXPERT_FFN,
    ),
    weights=every_layer(_layer),
    pre="qwen2",
)
