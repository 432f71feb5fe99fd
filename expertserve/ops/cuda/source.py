"""The CUDA source as one text, and the names of its kernels.

Owns which block formats have kernels and how a template is named for each. Compiles nothing and imports nothing of
CUDA. Invariant: the text needs no header, so that every compiler that meets it compiles the same.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "MXFP4"),
)
"""GGUF tensor types that the kernels decode."""
CELLS = ("HalfCell", "FloatCell")
PLAIN_KERNELS = ("combine_experts", "rms_norm", "rope", "merge_attention")


def source_text() -> str:
    """What a CUDA compiler is given."""
    parts = (_FOLDER / name for name in ("grids.cuh", "formats.cuh", "kernels.cu"))
    return "#ifndef INFINITY\n#define INFINITY __int_as_float(0x7f800000)\n#endif\n" + "\n".join(
        part.read_text() for part in parts
    )


def kernel_names(formats: tuple[str, ...] = FORMATS) -> list[str]:
    """Every kernel over some formats, as the source's template instances; gate and up are of one format."""
    names = list(PLAIN_KERNELS)
    for fmt in formats:
        names += [f"matvec<{fmt}>", f"take_rows<{fmt}>", f"expert_gate_up<{fmt}, {fmt}>", f"expert_down<{fmt}>"]
    return names + [f"{kernel}<{cell}>" for kernel in ("write_cells", "attend") for cell in CELLS]
