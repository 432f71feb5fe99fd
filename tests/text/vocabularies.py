"""GGUF files that carry a vocabulary under test and just enough of a model for llama.cpp to load them.

Owns training small byte-pair vocabularies and writing any vocabulary out. Vocabularies are trained without word
boundaries, so that a wrong boundary anywhere in a text shows as another id.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)


@dataclass
class Vocabulary:
    """A vocabulary as a GGUF spells it."""

    tokens: list[str]
    merges: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds += [NORMAL] * (len(self.tokens) - len(self.kinds))

    def add(self, text: str, kind: int, score: float = 0.0) -> int:
        """Appends a token; returns its id."""
        self.tokens.append(text)
        self.kinds.append(kind)
        if self.scores:
            self.scores.append(score)
        return len(self.tokens) - 1

    def set(self, text: str, kind: int) -> int:
        """Gives the token of that text, which is appended if there is none, another kind; returns its id."""
        if text not in self.tokens:
            return self.add(text, kind)
        id_ = self.tokens.index(text)
        self.kinds[id_] = kind
        return id_

    def metadata(self, model: str, pre: str | None = None, **extra: Any) -> dict[str, Any]:
        """Returns what a GGUF says of this vocabulary."""
        said: dict[str, Any] = {"model": model, "tokens": self.tokens, "token_type": self.kinds}
        if model == "llama":
            said["scores"] = self.scores
        else:
            said["merges"] = self.merges
        if pre is not None:
            said["pre"] = pre
        return {f"tokenizer.ggml.{key}": value for key, value in (said | extra).items()}


def train_bytes(texts: Sequence[str], size: int) -> Vocabulary:
    """Trains byte-level pairs over whole texts, word boundaries ignored."""
    pipeline = Tokenizer(BPE())
    pipeline.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False, min_frequency=1)
    pipeline.train_from_iterator(texts, trainer)
    return _trained(pipeline)


def train_characters(texts: Sequence[str], size: int) -> Vocabulary:
    """Trains pairs of characters, spaces written as U+2581, with a byte token for what no token covers."""
    pipeline = Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=size, show_progress=False, min_frequency=1)
    pipeline.train_from_iterator([line.replace(" ", "\u2581") for text in texts for line in text.split("\n")], trainer)
    vocabulary = _trained(pipeline)
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", BYTE)
    return vocabulary


def _trained(pipeline: Tokenizer) -> Vocabulary:
    import json

    model = json.loads(pipeline.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Vocabulary(tokens, [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])


def score_vocabulary(texts: Sequence[str], seed: int, *, ties: bool) -> Vocabulary:
    """Makes a vocabulary for merging by score out of substrings of the texts; with ties, many scores are equal."""
    chance = random.Random(seed)
    found: dict[str, None] = {}
    for text in texts:
        text = text.replace(" ", "\u2581")
        for char in text[:200]:
            if chance.random() < 0.9:
                found.setdefault(char)
        for _ in range(min(len(text), 60)):
            start = chance.randrange(max(len(text) - 1, 1))
            found.setdefault(text[start : start + chance.choice((2, 2, 3, 3, 4, 6, 9))])
    found.pop("", None)
    vocabulary = Vocabulary(["<unk>", "<s>", "</s>"], kinds=[UNKNOWN, CONTROL, CONTROL], scores=[0.0, 0.0, 0.0])
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", BYTE)
    for rank, text in enumerate(text for text in found if text not in vocabulary.tokens):
        vocabulary.add(text, NORMAL, -float(rank // 8 if ties else rank))
    return vocabulary


def write(path: Path, metadata: dict[str, Any], *, name: str = "vocabulary") -> Path:
    """Writes a model of one tiny layer with this tokenizer metadata."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    width = 32
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    square = np.zeros((width, width), np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokenizer.ggml.tokens"]), width), np.float16))
    writer.add_tensor("output_norm.weight", square[0])
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{norm}.weight", square[0])
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
