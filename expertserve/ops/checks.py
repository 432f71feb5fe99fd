"""Whether a model's tensors fit together: what every backend looks at before a kernel does, which looks at nothing.

Owns the rules and their words; knows shapes only. A check that fails raises UnsupportedModelError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from expertserve.errors import UnsupportedModelError
from expertserve.ops.base import KVLayout, RecurrentLayout, Rope

W = TypeVar("W")


def require(condition: bool, what: str) -> None:
    """Raises UnsupportedModelError where the model's tensors do not fit together."""
    if not condition:
        raise UnsupportedModelError(f"{what}; the file's tensors do not match its metadata")


def find_weight(weights: Mapping[str, W], name: str) -> W:
    """The loaded weight `name`."""
    try:
        return weights[name]
    except KeyError:
        raise UnsupportedModelError(f"the file has no tensor {name}, which its architecture needs") from None


def check_shape(name: str, shape: Sequence[int], *expected: int) -> None:
    """A weight has exactly this shape."""
    require(tuple(shape) == expected, f"{name} has shape {list(shape)}, expected {list(expected)}")


def check_table(name: str, shape: Sequence[int]) -> None:
    """A weight is a table of rows."""
    require(len(shape) == 2, f"{name} has shape {list(shape)}, expected two axes")


def linear_outputs(name: str, shape: Sequence[int], n_in: int) -> int:
    """Outputs of a weight [out, in], or [in] for one, that multiplies rows of `n_in`."""
    require(len(shape) <= 2 and shape[-1] == n_in, f"{name} has shape {list(shape)}, expected [*, {n_in}]")
    return shape[0] if len(shape) == 2 else 1


def head_outputs(name: str, shape: Sequence[int], heads: int, n_in: int) -> int:
    """Outputs a head of a weight [heads, out, in] that multiplies heads of `n_in`."""
    fits = len(shape) == 3 and (shape[0], shape[2]) == (heads, n_in)
    require(fits, f"{name} has shape {list(shape)}, expected {[heads, '*', n_in]}")
    return shape[1]


def factor_shape(shape: Sequence[int], x: Sequence[int]) -> tuple[int, ...]:
    """The shape of a weight that multiplies x: a single value, one for each of the last axis, or one row a head."""
    if tuple(shape) == (1,):
        return (1,)
    return tuple(x[-2:]) if len(shape) == 2 else (x[-1],)


def check_part(width: int, start: int, stop: int) -> None:
    """[start, stop) lies in an axis of `width`."""
    require(0 <= start < stop <= width, f"elements {start} to {stop} are asked of {width}")


def check_rope(rope: Rope, dim: int) -> None:
    """What rotates is an even part of heads of `dim`."""
    fits = 0 < rope.dims <= dim and rope.dims % 2 == 0
    require(fits, f"rope dimension count {rope.dims} does not fit heads of {dim}")


def check_attention(heads: int, dim: int, kv: KVLayout) -> None:
    """`heads` queries of `dim` meet the keys of a layer."""
    require(dim == kv.k_dim, f"query heads of {dim} elements meet keys of {kv.k_dim}")
    require(
        kv.num_heads > 0 and heads % kv.num_heads == 0,
        f"{heads} query heads do not divide among {kv.num_heads} KV heads",
    )


def check_convolved(shape: Sequence[int], rows: int, state: RecurrentLayout) -> None:
    """Rows of all channels are convolved."""
    require(tuple(shape) == (rows, state.channels), f"{list(shape)} is convolved, not {state.channels} channels")


def check_recurrence(shapes: Sequence[Sequence[int]], rows: int, *widths: int) -> None:
    """What changes a recurrent state comes in rows of these widths."""
    for shape, n in zip(shapes, widths, strict=True):
        require(tuple(shape) == (rows, n), f"{list(shape)} meets a recurrent state, not rows of {n}")
