"""Mellum 2: windows in three layers of four, YaRN in the fourth."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, attention, every_layer, experts, head_norms, norm, sizes

LAYERS = 4


def _layer(layer: int) -> list[Weight]:
    return [*attention(layer), *head_norms(layer), norm(f"blk.{layer}.ffn_norm"), *experts(layer)]


MADE = Made(
    architecture="mellum",
    metadata=sizes(
        block_count=LAYERS,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__sliding_window=32,
        attention__sliding_window_pattern=[True, False, True, True],
        rope__scaling__type="yarn",
        rope__scaling__factor=16.0,
        rope__scaling__original_context_length=64,
        expert_feed_forward_length=EXPERT_FFN,
    ),
    weights=every_layer(_layer, LAYERS),
    pre="mellum2",
)
