"""ggml and our own compiled kernels, loaded once.

Sets what must be in the environment before ggml's OpenMP runtime starts, corrects return types of the binding that lose
pointer bits, and declares the structures that our kernels take. It computes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

from expertserve.config import prepare_libraries
from expertserve.errors import KernelUnavailableError

prepare_libraries()

from ggml import ggml as ggml  # noqa: E402  the environment above must be set first

ggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p

GRAPH_COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(("ggml_graph_compute", ggml.lib))
"""`ggml_graph_compute(graph, plan)` on bare addresses; the binding's checked call costs more than a small graph."""


class TileFormat(ctypes.Structure):
    """`struct tile_format` of gemm.h."""

    _fields_ = (("unpack", ctypes.c_void_p), ("is_signed", ctypes.c_int))


class Matrix(ctypes.Structure):
    """`struct matrix` of kernels.c."""

    _fields_ = (
        ("dot", ctypes.c_void_p),
        ("quantize", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("input_row_bytes", ctypes.c_int64),
        ("tile", TileFormat),
        ("column_format", ctypes.c_int64),
    )


class ExpertCall(ctypes.Structure):
    """`struct expert_call` of kernels.c."""

    _fields_ = (
        ("num_groups", ctypes.c_int32),
        ("num_pairs", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("input_is_new", ctypes.c_int32),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("top_k", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("ffn", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("gate_m", Matrix),
        ("up_m", Matrix),
        ("down_m", Matrix),
        ("gated", ctypes.c_void_p),
        ("gate_bias", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("outer_bias_stride", ctypes.c_int64),
        ("input_weights", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_gate", ctypes.c_void_p),
        ("x_up", ctypes.c_void_p),
        ("gate_columns", ctypes.c_void_p),
        ("up_columns", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("down_columns", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("counters", ctypes.c_int32 * 3),
    )


class LinearCall(ctypes.Structure):
    """`struct linear_call` of kernels.c."""

    _fields_ = (
        ("m", Matrix),
        ("weights", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("n", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("next", ctypes.c_int32),
    )


class CombineCall(ctypes.Structure):
    """`struct combine_call` of kernels.c."""

    _fields_ = (
        ("y", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class AttentionCall(ctypes.Structure):
    """`struct attention_call` of attention.c."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_row_bytes", ctypes.c_int64),
        ("v_row_bytes", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("softmax", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("rows", ctypes.c_int32),
        ("n_kv", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("k_dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("counters", ctypes.c_int32 * 2),
    )


class ConvCall(ctypes.Structure):
    """`struct conv_call` of recurrent.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_void_p),
        ("channels", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


class DeltaCall(ctypes.Structure):
    """`struct delta_call` of recurrent.c."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("alpha", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("key_heads", ctypes.c_int32),
        ("value_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("grouped", ctypes.c_int32),
    )


class ScanCall(ctypes.Structure):
    """`struct scan_call` of recurrent.c."""

    _fields_ = (
        ("xbc", ctypes.c_void_p),
        ("dt", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("state_dim", ctypes.c_int32),
    )


def _load_kernels() -> ctypes.CDLL:
    spec = find_spec("expertserve.ops.ggml._kernels")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError(
            "the compiled expert kernels are missing: install the package with a C compiler at hand (pip install -e .)"
        )
    return ctypes.CDLL(spec.origin)


_kernels = _load_kernels()
_kernels.tile_format_of.argtypes = (ctypes.c_int,)
_kernels.tile_format_of.restype = TileFormat

DATA_OFFSET = int(cast(Any, ggml.ggml_tensor).data.offset)
for _structure, _kind in (
    (ExpertCall, "expert"),
    (LinearCall, "linear"),
    (CombineCall, "combine"),
    (AttentionCall, "attention"),
    (ConvCall, "conv"),
    (DeltaCall, "delta"),
    (ScanCall, "scan"),
):
    _nbytes = getattr(_kernels, f"{_kind}_call_bytes", None)  # an older build lacks it
    if _nbytes is None or _nbytes() != ctypes.sizeof(_structure):
        raise KernelUnavailableError(
            f"the compiled kernels do not fit this version ({_structure.__name__}): build them again (pip install -e .)"
        )

TILE_ROWS = 8
MIN_COLUMNS = 8
"""Fewest activation rows for which the tiled kernel is used, as in kernels.c."""

MAX_STATE_DIM: int = _kernels.max_state_dim()
"""Widest head of a gated delta rule."""

_COLUMN_FORMATS = {ggml.GGML_TYPE_Q8_K: 1, ggml.GGML_TYPE_Q8_0: 2, ggml.GGML_TYPE_Q8_1: 3}
_MAX_TILES = 4
_TILE_BLOCK_BYTES = 8 * 32 + 2 * 8 * 4


_abort_callbacks: list[Any] = []


def call_on_abort(callback: Callable[[str], None]) -> None:
    """Has `callback` called with ggml's message before a failed assertion inside ggml ends the process."""

    def called(message: bytes) -> None:
        callback(message.decode(errors="replace"))

    _abort_callbacks.append(ggml.ggml_abort_callback_t(called))  # ggml holds a bare pointer to the last one
    ggml.ggml_set_abort_callback(_abort_callbacks[-1])


def kernel(name: str) -> Any:
    """Our compiled operator `name`, as the function type ggml's custom operators take."""
    return ggml.ggml_custom_op_t(ctypes.cast(getattr(_kernels, name), ctypes.c_void_p).value or 0)


def function_address(name: str) -> int:
    """Address of a function of ours, else of one exported by ggml."""
    library = _kernels if hasattr(_kernels, name) else ggml.lib
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def data_slot(tensor: Any) -> int:
    """Address of the field in which a tensor keeps its data pointer."""
    return ctypes.addressof(tensor.contents) + DATA_OFFSET


def attention_fits(k_dim: int, v_dim: int) -> bool:
    """Whether our attention kernel runs here, and with heads of these sizes."""
    return bool(_kernels.have_attention()) and k_dim % 8 == 0 and v_dim % 16 == 0


def attention_scratch_bytes(n_kv: int) -> int:
    """Bytes that each thread of our attention kernel needs for `n_kv` cells."""
    return 5 * 4 * n_kv


def column_bytes(n: int) -> int:
    """Bytes of an activation row of n elements as the tiled kernel reads it."""
    return n + n // 32 * 8


def tile_scratch_bytes(n: int) -> int:
    """Bytes of unpacked tiles a thread needs for weight rows of n elements."""
    return _MAX_TILES * (n // 32) * _TILE_BLOCK_BYTES


def matrix(ggml_type: int, columns: int) -> Matrix:
    """How weights of type `ggml_type` multiply rows of `columns` elements."""
    traits = ggml.ggml_get_type_traits_cpu(ggml_type).contents
    dot_type = traits.vec_dot_type
    quantize = None if dot_type == ggml.GGML_TYPE_F32 else ggml.ggml_get_type_traits_cpu(dot_type).contents.from_float
    column_format = _COLUMN_FORMATS.get(dot_type, 0)
    return Matrix(
        dot=ctypes.cast(traits.vec_dot, ctypes.c_void_p).value,
        quantize=None if quantize is None else ctypes.cast(quantize, ctypes.c_void_p).value,
        row_bytes=ggml.ggml_row_size(ggml_type, columns),
        input_row_bytes=ggml.ggml_row_size(dot_type, columns),
        tile=_kernels.tile_format_of(ggml_type) if column_format else TileFormat(),
        column_format=column_format,
    )
