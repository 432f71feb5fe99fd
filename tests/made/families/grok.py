"""Grok-2: a dense feed-forward beside the experts, softcaps, scales, YaRN, norms before and after each block."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, HIDDEN, attention, every_layer, experts, feed_forward, norm, sizes


def _layer(layer: int) -> list[Weight]:
    return [
        *attention(layer),
        *(norm(f"blk.{layer}.{name}") for name in ("attn_output_norm", "ffn_norm", "post_ffw_norm")),
        *feed_forward(layer),
        *experts(layer),
    ]


MADE = Made(
    architecture="grok",
    metadata=sizes(
        expert_feed_forward_length=EXPERT_FFN,
        rope__scaling__type="yarn",
        rope__scaling__factor=16.0,
        rope__scaling__original_context_length=64,
        rope__scaling__yarn_ext_factor=1.0,
        rope__scaling__yarn_attn_factor=1.0,
        rope__scaling__yarn_beta_fast=8.0,
        rope__scaling__yarn_beta_slow=1.0,
        attn_logit_softcapping=2.0,
        router_logit_softcapping=30.0,
        final_logit_softcapping=5.0,
        attention__output_scale=HEAD_DIM**-0.5,
        embedding_scale=HIDDEN**0.5,
        logit_scale=0.75,
    ),
    weights=every_layer(_layer),
    pre="grok-2",
    embedding_spread=HIDDEN**-0.5,
    tolerance=5e-3,  # GELU: ggml's is looked up in a table of halves
    narrow_tolerance=0.2,
)
