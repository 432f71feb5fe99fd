"""What the file says about one tensor: name, shape, type and where its bytes lie.

Owns the table of tensor types that are accepted and their block sizes. `COMPUTED_TYPES` are those the CPU kernels
multiply with; `PLAIN_TYPES` may appear (index tables and the like) but no product is taken of them. Anything else is
refused by name. Shapes are row-major, outermost first: ggml's `ne` reversed.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as TensorType

_COMPUTED = (
    "F32 F16 BF16 Q1_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K "
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4"
).split()
_PLAIN = "I8 I16 I32 I64 F64".split()

# By name: an older `gguf` package that does not know a type only makes this set smaller.
COMPUTED_TYPES = frozenset(t for t in TensorType if t.name in _COMPUTED)
PLAIN_TYPES = frozenset(t for t in TensorType if t.name in _PLAIN)
TYPE_BY_ID = {t.value: t for t in COMPUTED_TYPES | PLAIN_TYPES}


__all__ = [
    "COMPUTED_TYPES",
    "PLAIN_TYPES",
    "TYPE_BY_ID",
    "TensorInfo",
    "TensorType",
    "block_elements",
    "row_bytes",
]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table, checked against the file it lies in."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file_index: int
    offset: int  # absolute, in that file
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row."""
        return row_bytes(self.shape[-1], self.type)


def block_elements(type: TensorType) -> int:
    """Elements of one block: the innermost dimension is a multiple of it."""
    return GGML_QUANT_SIZES[type][0]


def row_bytes(elements: int, type: TensorType) -> int:
    """Bytes of a row of `elements`, which must be whole blocks."""
    per_block, block_bytes = GGML_QUANT_SIZES[type]
    return elements // per_block * block_bytes
