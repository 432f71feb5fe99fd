"""The trained model as GGUF: in float, or in the mix of block formats that is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import libgguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from numpy.typing import NDArray

from .data import END_OF_TEXT, TURN_END
from .model import Model, Shape
from .tokenizer import SPECIAL

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LICENSE_NOTE = (
    "Trained on public-domain text (Presidents' addresses, Moby-Dick, the King James Bible) and on dialogues made from "
    "WordNet 3.0, Copyright 2006 by Princeton University; docs/DEMO_MODEL.md has the notices."
)
# Quantisation hurts the first and the last layers most; unlike layers are also what dynamic quants look like.
_DOWN = [TensorType.Q8_0, TensorType.Q5_0, TensorType.Q4_0]


def down_type(layer: int, layers: int) -> TensorType:
    """Block format of a layer's `down` matrices: finer towards both ends."""
    return _DOWN[min(layer, layers - 1 - layer, len(_DOWN) - 1)]


def export(model: Model, tokenizer: Path, path: Path, *, quantised: bool) -> None:
    """Writes the model to `path`: everything in float32, or the shipped mix."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_metadata(writer, model.shape, quantised)
    _add_tokenizer(writer, json.loads(tokenizer.read_text()))
    for name, values in _tensors(model):
        stored = _stored(name, model.shape.layers) if quantised and values.ndim > 1 else TensorType.F32
        if stored == TensorType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, libgguf.quantize_rows(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(name: str, layers: int) -> TensorType:
    if "ffn_gate_inp" in name:
        return TensorType.F32
    if "ffn_down_exps" in name:
        return down_type(int(name.split(".")[1]), layers)
    return TensorType.Q4_K if "_exps" in name else TensorType.Q8_0


def _tensors(model: Model) -> list[tuple[str, NDArray[np.float32]]]:
    """(GGUF name, float32 values) of every tensor in the order of the layers."""
    inner = {"attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.output": "attn_output"}
    inner |= {"attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "ffn.router": "ffn_gate_inp"}
    found = []
    for name, parameter in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        if parts[0] != "blocks":
            told = {"embedding": "token_embd", "norm": "output_norm"}[parts[0]]
        elif (end := ".".join(parts[2:])) in ("ffn.gate", "ffn.up", "ffn.down"):
            told = f"blk.{parts[1]}.ffn_{parts[3]}_exps"
        else:
            told = f"blk.{parts[1]}.{inner.get(end, end)}"
        found.append((told + ".weight", parameter.float().numpy()))
    return found


def _add_metadata(writer: gguf.GGUFWriter, s: Shape, quantised: bool) -> None:
    writer.add_name("expertserve demo")
    writer.add_description(
        "A small Mixture-of-Experts model that speaks plain English; it knows little and makes things up."
    )
    writer.add_license("MIT AND WordNet-3.0")
    writer.add_string("general.license.note", LICENSE_NOTE)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.ffn)


def _add_tokenizer(writer: gguf.GGUFWriter, told: dict) -> None:
    ids = told["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in told["model"]["merges"]])
    writer.add_bos_token_id(ids[END_OF_TEXT])
    writer.add_eos_token_id(ids[TURN_END])
    writer.add_pad_token_id(ids[END_OF_TEXT])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
