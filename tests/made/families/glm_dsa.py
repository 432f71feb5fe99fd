"""GLM-5: latent attention, a leading dense layer, V3's routing, an unused layer; as many tokens chosen as there are."""

from tests.made.latent import QUERY_RANK, latent_attention, latent_sizes
from tests.made.model import CONTEXT, Made, Weight
from tests.made.parts import (
    EXPERT_FFN,
    EXPERTS,
    HIDDEN,
    LAYERS,
    bias,
    every_layer,
    experts,
    feed_forward,
    matrix,
    norm,
)

DENSE, INDEXER_HEADS, INDEXER_DIM = 1, 32, 64


def _layer(layer: int) -> list[Weight]:
    p = f"blk.{layer}."
    routed = [*experts(layer), *feed_forward(layer, "_shexp", EXPERT_FFN), bias(p + "exp_probs_b", EXPERTS)]
    return [
        *latent_attention(layer),
        norm(p + "indexer.k_norm", INDEXER_DIM),
        bias(p + "indexer.k_norm", INDEXER_DIM),
        matrix(p + "indexer.proj", INDEXER_HEADS, HIDDEN),
        matrix(p + "indexer.attn_k", INDEXER_DIM, HIDDEN),
        matrix(p + "indexer.attn_q_b", INDEXER_HEADS * INDEXER_DIM, QUERY_RANK),
        norm(p + "ffn_norm"),
        *(feed_forward(layer) if layer < DENSE else routed),
    ]


MADE = Made(
    architecture="glm-dsa",
    metadata=latent_sizes(
        block_count=LAYERS + 1,
        leading_dense_block_count=DENSE,
        expert_shared_count=1,
        expert_weights_norm=True,
        expert_weights_scale=2.5,
        expert_gating_func=2,
        nextn_predict_layers=1,
        attention__indexer__head_count=INDEXER_HEADS,
        attention__indexer__key_length=INDEXER_DIM,
        attention__indexer__top_k=CONTEXT,
    ),
    weights=[
        *every_layer(_layer, LAYERS + 1),
        matrix(f"blk.{LAYERS}.nextn.eh_proj", HIDDEN, 2 * HIDDEN),
        *(norm(f"blk.{LAYERS}.nextn.{name}") for name in ("enorm", "hnorm", "shared_head_norm")),
    ],
    pre="glm4",
)
