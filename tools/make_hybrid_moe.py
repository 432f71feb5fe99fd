"""Writes a synthetic `qwen35moe` model with a draft layer: `python tools/make_hybrid_moe.py OUT.gguf`.

It is for measuring drafts. The trunk mostly answers by the last token, which the draft layer sees too: `--layers-scale`
is how much the layers add to that, and with it how often a draft is wrong. Weights are random; routers prefer some
experts by the size of their rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gguf_writer import add_tokenizer, normal, quantize

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
KEY_HEADS, VALUE_HEADS, STATE_DIM, CONV = 8, 16, 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="of the trunk, every fourth of full attention")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--layers-scale", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    writer = gguf.GGUFWriter(args.out, "qwen35moe")
    add_metadata(writer, args)
    add_tokenizer(writer, "bpe", args.vocab, "qwen2")
    for name, shape, scale, mean, kind in tensors(args):
        values = np.eye(*shape, dtype=np.float32) if scale is None else normal(args.seed, name, shape, scale, mean)
        if "ffn_gate_inp.weight" in name:
            values *= (0.3 + 1.7 * np.random.default_rng(len(name)).random((shape[0], 1))).astype(np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, args: argparse.Namespace) -> None:
    writer.add_name("synthetic hybrid")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(4096)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers + 1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM // 4)
    writer.add_rope_freq_base(1e7)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.top_k)
    writer.add_expert_feed_forward_length(args.ffn)
    writer.add_expert_shared_feed_forward_length(args.ffn)
    for key, value in {
        "nextn_predict_layers": 1,
        "full_attention_interval": 4,
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE_DIM,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * STATE_DIM,
    }.items():
        writer.add_uint32(f"qwen35moe.{key}", value)


def tensors(args: argparse.Namespace) -> list[tuple[str, tuple[int, ...], float | None, float, TensorType]]:
    """(name, shape, standard deviation or None for the identity, mean, type) in file order."""
    h, f, e, small = args.hidden, args.ffn, args.experts, args.layers_scale
    q8, f32 = TensorType.Q8_0, TensorType.F32
    rows: list[tuple[str, tuple[int, ...], float | None, float, TensorType]] = [
        ("token_embd.weight", (args.vocab, h), 1.0, 0.0, q8),
        ("output_norm.weight", (h,), 0.0, 1.0, f32),
        ("output.weight", (args.vocab, h), 3.0 * h**-0.5, 0.0, q8),
    ]
    for layer in range(args.layers + 1):
        p = f"blk.{layer}."
        rows += [(p + f"{name}.weight", (h,), 0.0, 1.0, f32) for name in ("attn_norm", "post_attention_norm")]
        if layer == args.layers or (layer + 1) % 4 == 0:
            rows += [
                (p + "attn_q.weight", (2 * HEADS * HEAD_DIM, h), h**-0.5, 0.0, q8),
                (p + "attn_k.weight", (KV_HEADS * HEAD_DIM, h), h**-0.5, 0.0, q8),
                (p + "attn_v.weight", (KV_HEADS * HEAD_DIM, h), h**-0.5, 0.0, q8),
                (p + "attn_output.weight", (h, HEADS * HEAD_DIM), small * h**-0.5, 0.0, q8),
                (p + "attn_q_norm.weight", (HEAD_DIM,), 0.0, 1.0, f32),
                (p + "attn_k_norm.weight", (HEAD_DIM,), 0.0, 1.0, f32),
            ]
        else:
            inner, channels = VALUE_HEADS * STATE_DIM, (2 * KEY_HEADS + VALUE_HEADS) * STATE_DIM
            rows += [
                (p + "attn_qkv.weight", (channels, h), h**-0.5, 0.0, q8),
                (p + "attn_gate.weight", (inner, h), h**-0.5, 0.0, q8),
                (p + "ssm_a", (VALUE_HEADS,), 0.05, -0.3, f32),
                (p + "ssm_alpha.weight", (VALUE_HEADS, h), h**-0.5, 0.0, q8),
                (p + "ssm_beta.weight", (VALUE_HEADS, h), h**-0.5, 0.0, q8),
                (p + "ssm_dt.bias", (VALUE_HEADS,), 0.1, 0.0, f32),
                (p + "ssm_conv1d.weight", (channels, CONV), 0.5, 0.0, f32),
                (p + "ssm_norm.weight", (STATE_DIM,), 0.0, 1.0, f32),
                (p + "ssm_out.weight", (h, inner), small * inner**-0.5, 0.0, q8),
            ]
        rows += [
            (p + "ffn_gate_inp.weight", (e, h), h**-0.5, 0.0, f32),
            (p + "ffn_gate_exps.weight", (e, f, h), h**-0.5, 0.0, q8),
            (p + "ffn_up_exps.weight", (e, f, h), h**-0.5, 0.0, q8),
            (p + "ffn_down_exps.weight", (e, h, f), 4 * small * f**-0.5, 0.0, q8),
            (p + "ffn_gate_inp_shexp.weight", (h,), h**-0.5, 0.0, f32),
            (p + "ffn_gate_shexp.weight", (f, h), h**-0.5, 0.0, q8),
            (p + "ffn_up_shexp.weight", (f, h), h**-0.5, 0.0, q8),
            (p + "ffn_down_shexp.weight", (h, f), 4 * small * f**-0.5, 0.0, q8),
        ]
    p = f"blk.{args.layers}.nextn."
    rows.append((p + "eh_proj.weight", (h, 2 * h), None, 0.0, q8))
    return rows + [(p + f"{name}.weight", (h,), 0.0, 1.0, f32) for name in ("enorm", "hnorm", "shared_head_norm")]


if __name__ == "__main__":
    main()
