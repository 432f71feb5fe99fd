"""DBRX: layer norms, fused Q, K and V that are clamped."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, attention, every_layer, experts, norm, sizes


def _layer(layer: int) -> list[Weight]:
    return [*attention(layer, fused=True), norm(f"blk.{layer}.attn_output_norm"), *experts(layer)]


MADE = Made(
    architecture="dbrx",
    metadata=sizes(
        feed_forward_length=EXPERT_FFN,
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=1e-5,
        attention__clamp_kqv=1.0,
    ),
    weights=every_layer(_layer),
    pre="dbrx",
)
