"""The parts of made-up models with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from tests.made.model import Weight
from tests.made.parts import EXPERT_FFN, HEADS, HIDDEN, matrix, norm, sizes

QUERY_RANK, LATENT, NOPE, ROTATED, VALUE = 64, 32, 32, 8, 16


def latent_sizes(**others: Any) -> dict[str, Any]:
    """The metadata of such a model, absorbed as converters write it, and others."""
    return sizes(
        attention__head_count_kv=1,
        attention__q_lora_rank=QUERY_RANK,
        attention__kv_lora_rank=LATENT,
        attention__key_length=LATENT + ROTATED,
        attention__value_length=LATENT,
        attention__key_length_mla=NOPE + ROTATED,
        attention__value_length_mla=VALUE,
        rope__dimension_count=ROTATED,
        expert_feed_forward_length=EXPERT_FFN,
        **others,
    )


def latent_attention(layer: int) -> list[Weight]:
    """A norm, the queries by way of a short vector, the latents, and the matrices that are absorbed."""
    p = f"blk.{layer}.attn_"
    return [
        norm(p + "norm"),
        matrix(p + "q_a", QUERY_RANK, HIDDEN),
        norm(p + "q_a_norm", QUERY_RANK),
        matrix(p + "q_b", HEADS * (NOPE + ROTATED), QUERY_RANK, 1.5),
        matrix(p + "kv_a_mqa", LATENT + ROTATED, HIDDEN),
        norm(p + "kv_a_norm", LATENT),
        Weight(p + "k_b.weight", (HEADS, LATENT, NOPE), 1.5 * LATENT**-0.5),
        Weight(p + "v_b.weight", (HEADS, VALUE, LATENT), LATENT**-0.5),
        matrix(p + "output", HIDDEN, HEADS * VALUE),
    ]
