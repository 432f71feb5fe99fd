"""SmallThinker: the router gets a layer's input, experts are of ReLU; the first of four layers does not rotate."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, attention, every_layer, experts, norm, sizes

LAYERS = 5


def _layer(layer: int) -> list[Weight]:
    return [*attention(layer), norm(f"blk.{layer}.ffn_norm"), *experts(layer, router=0.5)]


MADE = Made(
    architecture="smallthinker",
    metadata=sizes(
        block_count=LAYERS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__sliding_window=4096,
        rope__dimension_count=HEAD_DIM,
        expert_feed_forward_length=EXPERT_FFN,
        expert_gating_func=2,
    ),
    weights=every_layer(_layer, LAYERS),
    pre="qwen2",
)
