"""Tiny deterministic MoE models in GGUF, written on the spot, that load in a real engine.

`make_tiny_moe` writes one of the families `qwen3moe`, `qwen2moe`, `olmoe` and `llama`, whole or in splits, with a
tokenizer and a chat template. A tensor depends only on the seed, its name, shape and type, so that two files with the
same seed hold the same weights however they are split, aligned or ordered.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import ggml
import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from numpy.typing import NDArray

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What a tensor is stored as unless `types` says otherwise; "down" follows "expert", the others "dense".
DEFAULT_TYPES = {"dense": "F16", "expert": "Q8_0"}
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def normal(seed: int, name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> NDArray[np.float32]:
    """Normally distributed weights that depend on seed, name and shape alone."""
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
    return generator.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(mean)


def quantize(values: NDArray[np.float32], type: TensorType) -> NDArray[Any]:
    """`values` in the blocks of `type`, by ggml's own quantisers; rows are whole blocks."""
    values = np.ascontiguousarray(values, np.float32)
    if type == TensorType.F32:
        return values
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    columns = values.shape[-1]
    if columns % per_block:
        raise ValueError(f"rows of {columns} are not whole blocks of {per_block} ({type.name})")
    out = np.zeros((*values.shape[:-1], columns // per_block * block_bytes), np.uint8)
    floats = ctypes.POINTER(ctypes.c_float)
    importance = np.ones(columns, np.float32)  # some formats demand one
    ggml.ggml_quantize_chunk(
        type.value,
        values.ctypes.data_as(floats),
        ctypes.c_void_p(out.ctypes.data),
        0,
        values.size // columns,
        columns,
        importance.ctypes.data_as(floats),
    )
    return out


def bpe_vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Byte-level BPE: 256 bytes, merges of letters, unused padding, three control tokens; (tokens, types, merges)."""
    if size < 256 + len(CONTROL):
        raise ValueError(f"a byte-level vocabulary has at least {256 + len(CONTROL)} tokens, not {size}")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    to_char = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens, merges = [to_char[byte] for byte in range(256)], []
    firsts = [to_char[ord(" ")], *_LETTERS]
    pairs = sorted((i + j, a, b) for i, a in enumerate(firsts) for j, b in enumerate(_LETTERS))
    for _, a, b in pairs[: max(0, size - 256 - len(CONTROL) - 4)]:
        merges.append(f"{a} {b}")
        tokens.append(a + b)
    types = [gguf.TokenType.NORMAL.value] * len(tokens)
    unused = size - len(tokens) - len(CONTROL)
    tokens += [f"[PAD{i}]" for i in range(unused)]
    types += [gguf.TokenType.UNUSED.value] * unused
    return [*tokens, *CONTROL], [*types, *[gguf.TokenType.CONTROL.value] * len(CONTROL)], merges


def spm_vocabulary(size: int) -> tuple[list[str], list[int], list[float]]:
    """SentencePiece style: unk, bos, eos, 256 byte tokens, then pieces by falling score; (tokens, types, scores)."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN.value, kinds.CONTROL.value, kinds.CONTROL.value, *[kinds.BYTE.value] * 256]
    letters = ["\u2581", *_LETTERS]
    pairs = sorted((i + j, a, b) for i, a in enumerate(letters) for j, b in enumerate(_LETTERS))
    pieces = [*(a + b for _, a, b in pairs), *letters]
    room = size - len(tokens)
    if room < len(letters):
        raise ValueError(f"a SentencePiece vocabulary has at least {len(tokens) + len(letters)} tokens, not {size}")
    chosen = [*pieces[: room - len(letters)], *letters] if room < len(pieces) else pieces
    chosen += [f"[PAD{i}]" for i in range(room - len(chosen))]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(chosen))]
    return tokens + chosen, types + [kinds.NORMAL.value] * len(chosen), scores


def make_tiny_moe(
    path: str | Path,
    *,
    arch: str = "qwen3moe",
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 64,
    ffn: int = 32,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 16,
    vocab: int = 320,
    context: int = 512,
    shared_ffn: int = 64,
    types: Mapping[str, str] | None = None,
    fused: bool = False,
    tied: bool = False,
    alignment: int = 32,
    split: int = 0,
    seed: int = 0,
    tokenizer: str = "bpe",
    pre: str | None = None,
    chat_template: str | None = CHATML,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a model and return the path to open (of the first split where `split` > 1).

    Control tokens have near-zero output rows, so that greedy generation seldom ends by itself.

    Args:
        types: tensor types by role: "dense", "expert", and to differ from those "embd", "output", "attn", "shared",
            "down". Rows of K- and IQ-types are multiples of 256: give `hidden` (and for "down" `ffn`) such a size.
        fused: write gate and up as one `ffn_gate_up_exps` (llama.cpp does not read that for these families).
        tied: no `output.weight`; the embeddings serve.
        metadata: called with the writer before anything is written, to add or change keys.
    """
    path = Path(path)
    if kv_heads is None:
        kv_heads = heads if arch == "olmoe" else max(1, heads // 2)
    shapes = _Shapes(arch, layers, experts, hidden, ffn, heads, kv_heads, head_dim, vocab, shared_ffn, fused, tied)
    tensors = shapes.tensors()
    per_file = -(-len(tensors) // split) if split > 1 else 0
    if per_file and -(-len(tensors) // per_file) != split:
        raise ValueError(f"{len(tensors)} tensors do not divide into {split} files")
    writer = _Writer(path, arch, split_max_tensors=per_file)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    shapes.add_metadata(writer, top_k, context)
    add_tokenizer(writer, tokenizer, vocab, pre or {"olmoe": "olmo"}.get(arch, "qwen2"))
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    if metadata is not None:
        metadata(writer)
    chosen = DEFAULT_TYPES | dict(types or {})
    for name, shape, role, scale, mean in tensors:
        stored = TensorType[_type_name(chosen, role)]
        values = normal(seed, name, shape, scale, mean)
        if name == "output.weight":
            values[[0, 1, 2] if tokenizer == "spm" else [-3, -2, -1]] *= np.float32(0.01)
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{split:05d}.gguf") if split > 1 else path


class _Writer(gguf.GGUFWriter):
    """Says the alignment in every split, where the base says it in the first and pads them all to it."""

    def add_shard_kv_data(self) -> None:
        super().add_shard_kv_data()
        if (alignment := self.kv_data[0].get("general.alignment")) is not None:
            for keys in self.kv_data[1:]:
                keys["general.alignment"] = alignment


def _type_name(types: Mapping[str, str], role: str) -> str:
    if role == "f32":
        return "F32"
    return types.get(role) or types["expert" if role == "down" else "dense"]


class _Shapes:
    """Names, shapes, roles and spread of a family's tensors, and the metadata that goes with them."""

    def __init__(
        self,
        arch: str,
        layers: int,
        experts: int,
        hidden: int,
        ffn: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        shared_ffn: int,
        fused: bool,
        tied: bool,
    ) -> None:
        if arch not in ("qwen3moe", "qwen2moe", "olmoe", "llama"):
            raise ValueError(f"no tiny model of architecture {arch!r}")
        if arch != "qwen3moe" and heads * head_dim != hidden:
            raise ValueError(f"{arch} has heads * head_dim == hidden, not {heads} * {head_dim} and {hidden}")
        self.arch, self.layers, self.experts, self.hidden, self.ffn = arch, layers, experts, hidden, ffn
        self.heads, self.kv_heads, self.head_dim, self.vocab = heads, kv_heads, head_dim, vocab
        self.shared_ffn, self.fused, self.tied = shared_ffn, fused, tied

    def add_metadata(self, writer: gguf.GGUFWriter, top_k: int, context: int) -> None:
        writer.add_name(f"tiny-{self.arch}")
        writer.add_quantization_version(2)
        writer.add_context_length(context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.ffn)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_expert_count(self.experts)
        writer.add_expert_used_count(top_k)
        if self.arch == "llama":
            writer.add_vocab_size(self.vocab)
            writer.add_rope_dimension_count(self.head_dim)
        if self.arch == "qwen3moe":
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        if self.arch in ("qwen3moe", "qwen2moe"):
            writer.add_expert_feed_forward_length(self.ffn)
        if self.arch == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(self.shared_ffn)

    def tensors(self) -> list[tuple[str, tuple[int, ...], str, float, float]]:
        """(name, shape, role, standard deviation, mean) in file order."""
        hidden = self.hidden
        rows = [("token_embd.weight", (self.vocab, hidden), "embd", 1.0, 0.0)]
        for layer in range(self.layers):
            block = f"blk.{layer}."
            rows += [(block + name, *rest) for name, *rest in (*self._attention(), *self._ffn())]
        rows.append(("output_norm.weight", (hidden,), "f32", 0.1, 1.0))
        if not self.tied:
            rows.append(("output.weight", (self.vocab, hidden), "output", 3.0 * hidden**-0.5, 0.0))
        return rows

    def _attention(self) -> list[tuple[str, tuple[int, ...], str, float, float]]:
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = [
            ("attn_norm.weight", (hidden,), "f32", 0.1, 1.0),
            ("attn_q.weight", (queries, hidden), "attn", 1.5 * hidden**-0.5, 0.0),
            ("attn_k.weight", (keys, hidden), "attn", 1.5 * hidden**-0.5, 0.0),
            ("attn_v.weight", (keys, hidden), "attn", hidden**-0.5, 0.0),
            ("attn_output.weight", (hidden, queries), "attn", queries**-0.5, 0.0),
        ]
        if self.arch == "qwen2moe":
            rows += [
                (f"attn_{role}.bias", (n,), "f32", 0.2, 0.0)
                for role, n in zip("qkv", (queries, keys, keys), strict=True)
            ]
        if self.arch in ("qwen3moe", "olmoe"):
            wide = self.arch == "olmoe"
            rows.append(("attn_q_norm.weight", (queries if wide else self.head_dim,), "f32", 0.1, 1.0))
            rows.append(("attn_k_norm.weight", (keys if wide else self.head_dim,), "f32", 0.1, 1.0))
        return rows

    def _ffn(self) -> list[tuple[str, tuple[int, ...], str, float, float]]:
        experts, hidden, ffn, shared = self.experts, self.hidden, self.ffn, self.shared_ffn
        rows = [
            ("ffn_norm.weight", (hidden,), "f32", 0.1, 1.0),
            ("ffn_gate_inp.weight", (experts, hidden), "f32", 1.5 * hidden**-0.5, 0.0),
        ]
        if self.fused:
            rows.append(("ffn_gate_up_exps.weight", (experts, 2 * ffn, hidden), "expert", hidden**-0.5, 0.0))
        else:
            rows.append(("ffn_gate_exps.weight", (experts, ffn, hidden), "expert", hidden**-0.5, 0.0))
            rows.append(("ffn_up_exps.weight", (experts, ffn, hidden), "expert", hidden**-0.5, 0.0))
        rows.append(("ffn_down_exps.weight", (experts, hidden, ffn), "down", 2.0 * ffn**-0.5, 0.0))
        if self.arch == "qwen2moe":
            rows += [
                ("ffn_gate_inp_shexp.weight", (hidden,), "f32", hidden**-0.5, 0.0),
                ("ffn_gate_shexp.weight", (shared, hidden), "shared", hidden**-0.5, 0.0),
                ("ffn_up_shexp.weight", (shared, hidden), "shared", hidden**-0.5, 0.0),
                ("ffn_down_shexp.weight", (hidden, shared), "shared", 2.0 * shared**-0.5, 0.0),
            ]
        return rows


def add_tokenizer(writer: gguf.GGUFWriter, kind: str, vocab: int, pre: str) -> None:
    """Writes a `bpe` or `spm` vocabulary of `vocab` tokens with the pre-tokenizer `pre`."""
    if kind == "bpe":
        tokens, types, merges = bpe_vocabulary(vocab)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        bos, eos = vocab - 3, vocab - 1
    elif kind == "spm":
        tokens, types, scores = spm_vocabulary(vocab)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        bos, eos = 1, 2
    else:
        raise ValueError(f"no tiny tokenizer {kind!r}")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(kind == "spm")
