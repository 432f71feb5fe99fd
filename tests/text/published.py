"""Vocabularies of published models, out of packages that carry them.

Owns reading the files' own formats. A reader returns None where its package is absent. Of rank-only vocabularies the
first ranks are taken, which are a whole vocabulary of their own.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from expertserve.text.byte_pairs import byte_alphabet
from tests.text.vocabularies import CONTROL, Vocabulary

_RANKS = 8_000


def mixtral() -> dict[str, Any] | None:
    """Mixtral's SentencePiece model."""
    path = _inside("mistral_common", "data/tokenizer.model.v1")
    if path is None:
        return None
    vocabulary = Vocabulary([])
    for number, payload in _fields(path.read_bytes()):
        if number == 1:
            piece = dict(_fields(payload))
            kind = piece.get(3, 1)
            vocabulary.tokens.append(piece[1].decode())
            vocabulary.kinds.append(kind)
            vocabulary.scores.append(struct.unpack("<f", piece[2])[0])
    return vocabulary.metadata("llama", "default")


def tekken() -> dict[str, Any] | None:
    """Mistral's Tekken."""
    path = _inside("mistral_common", "data/tekken_240911.json")
    if path is None:
        return None
    model = json.loads(path.read_text())
    return _from_ranks([base64.b64decode(entry["token_bytes"]) for entry in model["vocab"][:_RANKS]], "tekken")


def qwen() -> dict[str, Any] | None:
    """Qwen's ranks."""
    path = _inside("dashscope", "resources/qwen.tiktoken")
    if path is None:
        return None
    lines = path.read_text().splitlines()[:_RANKS]
    return _from_ranks([base64.b64decode(line.split()[0]) for line in lines], "qwen2")


READERS: dict[str, Callable[[], dict[str, Any] | None]] = {"mixtral": mixtral, "tekken": tekken, "qwen": qwen}


def _inside(package: str, path: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / path
    return found if found.is_file() else None


def _from_ranks(ranked: list[bytes], pre: str) -> dict[str, Any]:
    """Returns the metadata a converter writes: each token's merge is the last one that merging by rank makes of it."""
    alphabet = byte_alphabet()
    ranks = {token: rank for rank, token in enumerate(ranked)}

    def spelt(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            lowest = min(joined)
            if lowest >= rank:
                break
            at = joined.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(" ".join(map(spelt, parts)))
    vocabulary = Vocabulary([spelt(token) for token in ranked], merges)
    for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        vocabulary.set(text, CONTROL)
    ids = {"bos_token_id": vocabulary.set("<s>", CONTROL), "eos_token_id": vocabulary.set("</s>", CONTROL)}
    return vocabulary.metadata("gpt2", pre, **ids)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a protocol-buffer message: integers, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        length = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        yield key >> 3, data[at : at + length]
        at += length
