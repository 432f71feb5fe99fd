"""The CUDA source as one text, and the names of its kernels.

Owns which block formats have kernels and how a template is named for each; the limits here are those of the source.
Compiles nothing and imports nothing of CUDA. Invariant: the text needs no header, so that every compiler that meets it
compiles the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from expertserve.ops.base import Activation, KVType

_FOLDER = Path(__file__).parent
_FILES = ("common.cuh", "grids.cuh", "formats.cuh", "products.cu", "pointwise.cu", "attention.cu", "recurrent.cu")
FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "MXFP4"),
)
"""GGUF tensor types that the kernels decode."""
CELL_OF = {KVType.F16: "HalfCell", KVType.F32: "FloatCell"}
GATED_OF = {Activation.SILU: 0, Activation.GELU: 1, Activation.SWIGLU_OAI: 2, Activation.RELU: 3}
"""The numbers of gated activations in the source."""
WARPS = 4
PAIR = 2
"""Weight rows that a warp multiplies at once."""
TILE = 8
MOST_HEADS = (128, 256, 576)
QUERIES_AND_CELLS = {128: (16, 32), 256: (16, 16), 576: (8, 8)}
"""What fits shared memory together, by the longest head."""
MOST_TAPS = 8
MOST_KEY = 256
PLAIN_KERNELS = (
    *("combine_experts", "rms_norm", "layer_norm", "rope", "merge_attention", "scale", "clamp", "copy_columns"),
    *("causal_conv", "gated_delta", "selective_scan"),
    *(
        "unary<Sigmoid>",
        "unary<Silu>",
        "unary<Tanh>",
        "binary<Add>",
        "binary<Mul>",
        *(f"binary<Gated<{n}>>" for n in GATED_OF.values()),
    ),
)


def source_text() -> str:
    """What a CUDA compiler is given."""
    infinity = "#ifndef INFINITY\n#define INFINITY __int_as_float(0x7f800000)\n#endif\n"
    return infinity + "\n".join((_FOLDER / name).read_text() for name in _FILES)


def dense_kernels(fmt: str) -> list[str]:
    """Kernels over resident weights of a format."""
    return [f"matvec<{fmt}>", f"take_rows<{fmt}>"]


def expert_kernels(gate: str, up: str, down: str) -> list[str]:
    """Kernels over routed experts whose matrices have these formats."""
    return [f"expert_gate_up<{gate}, {up}>", f"expert_down<{down}>"]


def cell_kernels(cell: str) -> list[str]:
    """Kernels over a KV cache of such elements."""
    few = [f"attend<{cell}, {most}>" for most in MOST_HEADS]
    return [f"write_cells<{cell}>", *few, *(attend_many(cell, most) for most in MOST_HEADS)]


def attend_many(cell: str, most: int) -> str:
    """The attention kernel for many rows."""
    queries, cells = QUERIES_AND_CELLS[most]
    return f"attend_many<{cell}, {most}, {queries}, {cells}>"


def kernel_names(formats: Iterable[str] = FORMATS) -> list[str]:
    """Every kernel over some formats, experts of one format each."""
    names = list(PLAIN_KERNELS)
    for fmt in formats:
        names += dense_kernels(fmt) + expert_kernels(fmt, fmt, fmt)
    return names + [name for cell in CELL_OF.values() for name in cell_kernels(cell)]
