"""Nemotron 3 Super: a layer is Mamba-2, attention or experts alone, and experts work on a short vector."""

from __future__ import annotations

from tests.made.model import Made, Weight
from tests.made.parts import EXPERT_FFN, EXPERTS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TOP_K, bias, matrix, norm

PATTERN = "MEM*E"
INNER, STATE, GROUPS, SSM_HEADS, WIDTH, LATENT, SHARED_FFN = 128, 16, 2, 8, 4, 32, 96
CHANNELS = INNER + 2 * GROUPS * STATE


def mixer(layer: int) -> list[Weight]:
    p = f"blk.{layer}.ssm_"
    return [
        matrix(p + "in", INNER + CHANNELS + SSM_HEADS, HIDDEN),
        Weight(p + "conv1d.weight", (CHANNELS, WIDTH), 0.5, narrow=False),
        bias(p + "conv1d", CHANNELS),
        bias(p + "dt", SSM_HEADS, 1.0),
        Weight(p + "a", (SSM_HEADS, 1), 0.2, -1.0, narrow=False),
        Weight(p + "d", (SSM_HEADS, 1), 0.3, 1.0, narrow=False),
        Weight(p + "norm.weight", (GROUPS, INNER // GROUPS), 0.1, 1.0, narrow=False),
        matrix(p + "out", HIDDEN, INNER, 2.0),
    ]


def attention(layer: int) -> list[Weight]:
    p, rows = f"blk.{layer}.attn_", {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    parts = [matrix(p + role, heads * HEAD_DIM, HIDDEN, 1.5) for role, heads in rows.items()]
    return [*parts, matrix(p + "output", HIDDEN, HEADS * HEAD_DIM)]


def experts(layer: int) -> list[Weight]:
    p = f"blk.{layer}.ffn_"
    return [
        Weight(p + "gate_inp.weight", (EXPERTS, HIDDEN), 1.5 * HIDDEN**-0.5, narrow=False),
        bias(p[:-4] + "exp_probs_b", EXPERTS, 0.1),
        matrix(p + "latent_down", LATENT, HIDDEN),
        matrix(p + "latent_up", HIDDEN, LATENT),
        Weight(p + "up_exps.weight", (EXPERTS, EXPERT_FFN, LATENT), LATENT**-0.5),
        Weight(p + "down_exps.weight", (EXPERTS, LATENT, EXPERT_FFN), EXPERT_FFN**-0.5),
        matrix(p + "up_shexp", SHARED_FFN, HIDDEN),
        matrix(p + "down_shexp", HIDDEN, SHARED_FFN),
    ]


PARTS = {"M": mixer, "*": attention, "E": experts}
MADE = Made(
    "nemotron_h_moe",
    {
        "block_count": len(PATTERN),
        "embedding_length": HIDDEN,
        "feed_forward_length": [EXPERT_FFN if kind == "E" else 0 for kind in PATTERN],
        "attention.head_count": HEADS,
        "attention.head_count_kv": [KV_HEADS if kind == "*" else 0 for kind in PATTERN],
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": HEAD_DIM,
        "ssm.conv_kernel": WIDTH,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": SSM_HEADS,
        "ssm.group_count": GROUPS,
        "expert_count": EXPERTS,
        "expert_used_count": TOP_K,
        "expert_feed_forward_length": EXPERT_FFN,
        "expert_shared_feed_forward_length": SHARED_FFN,
        "expert_shared_count": 1,
        "expert_group_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "moe_latent_size": LATENT,
    },
    [weight for i, kind in enumerate(PATTERN) for weight in (norm(f"blk.{i}.attn_norm"), *PARTS[kind](i))],
    pre="pixtral",
)
