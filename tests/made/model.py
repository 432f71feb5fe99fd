"""A made-up model: its description, and the GGUF that is written from it.

Every weight depends on its name and shape alone, so that the files of one model differ by how they are stored only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType

from tests.gguf_writer import add_tokenizer, normal, quantize

VOCABULARY = 512
CONTEXT = 512
TYPES = ("f32", "f16", "q8_0")


@dataclass(frozen=True)
class Weight:
    """A tensor of normally distributed values.

    Attributes:
        shape: outermost first.
        spread: standard deviation.
        narrow: stored in the file's type; otherwise in float32.
    """

    name: str
    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    narrow: bool = True


@dataclass(frozen=True)
class Made:
    """A model.

    Attributes:
        metadata: what the file says under `{architecture}.`, less the prefix.
        weights: all but the embedding, the last norm and the output matrix.
        pre: name of the pre-tokenizer.
        embedding_spread: standard deviation of the embeddings, for a family that scales them.
        tolerance: most that a log-probability may differ from llama.cpp's, both computed in float32.
        narrow_tolerance: the same where products of narrow weights round their input, each in its own order.
    """

    architecture: str
    metadata: Mapping[str, Any]
    weights: Sequence[Weight]
    pre: str
    embedding_spread: float = 1.0
    tolerance: float = 1e-4
    narrow_tolerance: float = 0.02

    def write(self, path: Path, kind: str) -> Path:
        """Writes the model with its matrices stored as `kind`, one of TYPES."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(f"made-{self.architecture}")
        writer.add_quantization_version(2)
        writer.add_context_length(CONTEXT)
        for key, value in self.metadata.items():
            _add(writer, f"{self.architecture}.{key}", value)
        add_tokenizer(writer, "bpe", VOCABULARY, self.pre)
        hidden = self.metadata["embedding_length"]
        outer = [
            Weight("token_embd.weight", (VOCABULARY, hidden), self.embedding_spread),
            Weight("output_norm.weight", (hidden,), 0.1, 1.0, narrow=False),
            Weight("output.weight", (VOCABULARY, hidden), 2.0 * hidden**-0.5),
        ]
        for weight in (*outer, *self.weights):
            stored = TensorType[kind.upper()] if weight.narrow else TensorType.F32
            values = normal(0, weight.name, weight.shape, weight.spread, weight.mean)
            writer.add_tensor(weight.name, quantize(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)


def prompt(length: int) -> list[int]:
    """Tokens of a prompt; a shorter one begins a longer one."""
    return np.random.default_rng(7).integers(0, VOCABULARY - 4, CONTEXT)[:length].tolist()
