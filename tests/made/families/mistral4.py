"""Mistral 4: latent attention with YaRN, and a temperature that begins early here."""

from tests.made.latent import latent_attention, latent_sizes
from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, every_layer, experts, feed_forward, norm


def _layer(layer: int) -> list[Weight]:
    routed = [*experts(layer), *feed_forward(layer, "_shexp", EXPERT_FFN)]
    return [*latent_attention(layer), norm(f"blk.{layer}.ffn_norm"), *routed]


MADE = Made(
    architecture="mistral4",
    metadata=latent_sizes(
        leading_dense_block_count=0,
        expert_shared_count=1,
        expert_weights_norm=True,
        expert_weights_scale=1.0,
        expert_gating_func=1,
        attention__temperature_scale=0.1,
        attention__temperature_length=16,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
        rope__scaling__yarn_log_multiplier=0.1,
    ),
    weights=every_layer(_layer),
    pre="tekken",
)
