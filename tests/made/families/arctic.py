"""Snowflake Arctic: experts beside a dense feed-forward, each behind a norm of its own."""

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, HEAD_DIM, HIDDEN, attention, every_layer, experts, feed_forward, norm, sizes


def _layer(layer: int) -> list[Weight]:
    return [
        *attention(layer),
        *(norm(f"blk.{layer}.{name}") for name in ("ffn_norm", "ffn_norm_exps")),
        *feed_forward(layer, ffn=HIDDEN),
        *experts(layer),
    ]


MADE = Made(
    architecture="arctic",
    metadata=sizes(feed_forward_length=EXPERT_FFN, rope__dimension_count=HEAD_DIM),
    weights=every_layer(_layer),
    pre="default",
)
