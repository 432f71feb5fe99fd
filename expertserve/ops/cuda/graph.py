"""A segment description recorded as CUDA commands.

Owns the translation of each operator of `ops.base.Graph` into commands, and checks every shape before, since a kernel
checks none. Where values lie is decided when the description is whole; execution belongs to the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from expertserve.errors import UnsupportedModelError
from expertserve.ops import base
from expertserve.ops.base import (
    Activation,
    DeltaLayout,
    HostAccess,
    KVLayout,
    KVType,
    RecurrentLayout,
    Rope,
    RopeStyle,
    ScanLayout,
    Tensor,
)
from expertserve.ops.checks import (
    check_attention,
    check_convolved,
    check_part,
    check_recurrence,
    check_rope,
    check_shape,
    check_table,
    factor_shape,
    head_outputs,
    linear_outputs,
    require,
)
from expertserve.ops.cuda.device import THREADS, Command, Download, Launch, Product
from expertserve.ops.cuda.scratch import Value
from expertserve.ops.cuda.source import (
    CELL_OF,
    GATED_OF,
    MOST_HEADS,
    MOST_KEY,
    MOST_TAPS,
    PAIR,
    QUERIES_AND_CELLS,
    TILE,
    WARPS,
    attend_many,
)

if TYPE_CHECKING:
    from expertserve.ops.cuda.backend import CudaBackend, Weight

MATVEC_ROWS = 2 * TILE
"""Up to how many rows a product decodes the weights as it goes; above, it is worth to write them out for cuBLAS."""
PRODUCT_BYTES = 64 << 20
"""Most bytes of weights written out at once."""
STRETCH = 256
"""KV cells that one block attends to, where the rows are too few to occupy the device."""
MANY_ROWS = 16


class CudaTensor(Tensor):
    """A value in row-major order, whole rows side by side."""

    __slots__ = ("value", "viewed")

    def __init__(self, value: Value, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.value = value
        self.viewed = False

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Elements but for the last axis."""
        return math.prod(self.shape[:-1])


def blocks(n: int, width: int) -> int:
    """How many of `width` cover n."""
    return -(-n // width)


def _launch(kernel: str, grid: tuple[int, int, int], *args: np.generic) -> Launch:
    return Launch(kernel, grid, args)


def _product(first: int, weight: np.generic, x: np.generic, y: np.generic, *sizes: int) -> Product:
    """A product whose outputs begin with number `first`."""
    return Product(int(weight), int(x), int(y) + 4 * first, *sizes)


class CudaGraph(base.Graph):
    """Records operators; `finish` gives the commands once the backend has placed the values."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self.rows = backend.rows
        self.values: list[Value] = []
        self.downloads = False
        self.uses_kv = False
        self.uses_outputs = False
        self._pending: list[tuple[Callable[..., Command], tuple[Any, ...]]] = []
        self._after: list[Command] = []
        self._loaded: dict[str, Value] = {}

    def finish(self, address_of: Callable[[Value], int]) -> list[Command]:
        """The commands, with values where `address_of` says."""

        def resolve(arg: Any) -> Any:
            if isinstance(arg, Value):
                return np.uint64(arg.address if arg.address is not None else address_of(arg))
            return arg

        return [make(*map(resolve, args)) for make, args in self._pending] + self._after

    # -- recording --------------------------------------------------------------------------------------------------

    def _add(self, make: Callable[..., Command], *args: Any) -> None:
        for arg in args:
            if isinstance(arg, Value):
                arg.last = len(self._pending)
        self._pending.append((make, args))

    def _run(self, kernel: str, grid: Sequence[int], *args: Any) -> None:
        """Records a launch: a tensor or value is its address, None a null pointer, an int an int32."""
        x, y, z = (*grid, 1, 1)[:3]
        self._add(partial(_launch, kernel, (x, y, z)), *map(self._parameter, args))

    def _parameter(self, arg: Any) -> Any:
        if isinstance(arg, CudaTensor):
            return arg.value
        if arg is None:
            return np.uint64(0)
        if isinstance(arg, int):
            return np.int32(arg)
        return np.float32(arg) if isinstance(arg, float) else arg

    def _new(self, *shape: int) -> CudaTensor:
        return CudaTensor(self._scratch(4 * math.prod(shape)), shape)

    def _scratch(self, nbytes: int) -> Value:
        value = Value(nbytes, len(self._pending), len(self._pending))
        self.values.append(value)
        return value

    def _buffer(self, name: str) -> np.uint64:
        return np.uint64(self._backend.address(name))

    def _vector(self, name: str, *shape: int) -> np.uint64:
        """The address of a float32 weight of this shape."""
        weight = self._backend.weight(name)
        check_shape(name, weight.shape, *shape)
        require(weight.format == "F32", f"{name} is {weight.format}, expected F32")
        return np.uint64(weight.address)

    # -- buffers ----------------------------------------------------------------------------------------------------

    def embed(self, weight: str) -> Tensor:
        table = self._backend.weight(weight)
        check_table(weight, table.shape)
        out = self._new(self.rows, table.shape[1])
        self._take_rows(table, self._buffer("tokens"), out.value, self.rows)
        return out

    def _take_rows(self, table: Weight, ids: np.uint64 | None, out: Value, rows: int, first: int = 0) -> None:
        n = table.shape[-1]
        start = np.uint64(table.address + first * table.row_bytes)
        self._run(f"take_rows<{table.format}>", (rows, blocks(n, 8 * THREADS)), start, ids, out, n)

    def load(self, buffer: str) -> Tensor:
        value = self._loaded.setdefault(buffer, Value(0, 0, 0, self._backend.address(buffer)))
        return CudaTensor(value, (self.rows, *self._backend.buffer_shape(buffer)[1:]))

    def store(self, buffer: str, x: Tensor) -> None:
        assert isinstance(x, CudaTensor)
        capacity = self._backend.buffer_shape(buffer)
        assert x.shape[1:] == capacity[1:] and x.shape[0] <= capacity[0], (buffer, x.shape, capacity)
        address, earlier = self._backend.address(buffer), self._loaded.pop(buffer, None)
        free = x.value.address is None and not x.viewed and (earlier is None or earlier.last < x.value.first)
        if free:
            x.value.address = address
        else:
            n = x.shape[-1]
            self._run("copy_columns", (x.num_rows, blocks(n, THREADS)), x, np.uint64(address), n, 1, n, 0, n, 0)
        if self._backend.access(buffer) is HostAccess.READS:
            self.downloads = True
            self._after.append(Download(self._backend.host(buffer)[: x.shape[0]], address))

    # -- products ---------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        assert isinstance(x, CudaTensor)
        w, n_in, rows = self._backend.weight(weight), x.shape[-1], x.num_rows
        n_out = linear_outputs(weight, w.shape, n_in)
        added = None if bias is None else self._vector(bias, n_out)
        out = self._new(*x.shape[:-1], n_out)
        if rows <= MATVEC_ROWS:
            grid = (blocks(n_out, PAIR * WARPS), blocks(rows, TILE))
            self._run(f"matvec<{w.format}>", grid, np.uint64(w.address), x, added, out, n_in, n_out, rows)
            return out
        self._multiply(w, x, out, n_out)
        return out if added is None else self._binary("Add", out, added, 1, n_out)

    def head_linear(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, CudaTensor) and len(x.shape) == 3
        w, (rows, heads, n_in) = self._backend.weight(weight), x.shape
        n_out = head_outputs(weight, w.shape, heads, n_in)
        out = self._new(rows, heads, n_out)
        grid = (blocks(n_out, PAIR * WARPS), blocks(rows, TILE), heads)
        self._run(f"matvec<{w.format}>", grid, np.uint64(w.address), x, None, out, n_in, n_out, rows)
        return out

    def _multiply(self, w: Weight, x: CudaTensor, out: CudaTensor, n_out: int) -> None:
        """By cuBLAS over weights written out in float32, some rows at a time."""
        n_in, rows = x.shape[-1], x.num_rows
        step = n_out if w.format == "F32" else max(1, min(n_out, PRODUCT_BYTES // (4 * n_in)))
        values = None if w.format == "F32" else self._scratch(4 * step * n_in)
        for first in range(0, n_out, step):
            width = min(step, n_out - first)
            if values is not None:
                self._take_rows(w, None, values, width, first)
            source = np.uint64(w.address) if values is None else values
            self._add(partial(_product, first), source, x.value, out.value, rows, n_in, width, n_out)

    # -- value by value ---------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: str | None, eps: float) -> Tensor:
        assert isinstance(x, CudaTensor)
        n = x.shape[-1]
        out = self._new(*x.shape)
        self._run("rms_norm", (x.num_rows,), x, None if weight is None else self._vector(weight, n), out, n, eps)
        return out

    def layer_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        assert isinstance(x, CudaTensor)
        n = x.shape[-1]
        out = self._new(*x.shape)
        self._run("layer_norm", (x.num_rows,), x, self._vector(weight, n), out, n, eps)
        return out

    def _binary(self, op: str, a: CudaTensor, b: Any, repeat: int, n: int) -> CudaTensor:
        out = self._new(*a.shape)
        self._run(f"binary<{op}>", (blocks(a.count, THREADS),), a, b, out, a.count, repeat, n)
        return out

    def _unary(self, kernel: str, x: Tensor, *more: float) -> CudaTensor:
        assert isinstance(x, CudaTensor)
        out = self._new(*x.shape)
        self._run(kernel, (blocks(x.count, THREADS),), x, out, x.count, *more)
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, CudaTensor) and isinstance(b, CudaTensor) and a.shape == b.shape
        return self._binary("Add", a, b, 1, a.count)

    def add_weight(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, CudaTensor)
        return self._binary("Add", x, self._vector(weight, x.shape[-1]), 1, x.shape[-1])

    def mul_weight(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, CudaTensor)
        shape = factor_shape(self._backend.weight(weight).shape, x.shape)
        return self._binary("Mul", x, self._vector(weight, *shape), 1, math.prod(shape))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, CudaTensor) and isinstance(b, CudaTensor)
        assert b.shape in (a.shape, (*a.shape[:-1], 1)), (a.shape, b.shape)
        return self._binary("Mul", a, b, 1 if b.shape == a.shape else a.shape[-1], b.count)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._unary("scale", x, float(factor))

    def clamp(self, x: Tensor, most: float) -> Tensor:
        return self._unary("clamp", x, float(most))

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._unary("unary<Sigmoid>", x)

    def tanh(self, x: Tensor) -> Tensor:
        return self._unary("unary<Tanh>", x)

    def silu(self, x: Tensor) -> Tensor:
        return self._unary("unary<Silu>", x)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        assert isinstance(gate, CudaTensor) and isinstance(up, CudaTensor) and gate.shape == up.shape
        return self._binary(f"Gated<{GATED_OF[activation]}>", gate, up, 1, gate.count)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        assert isinstance(x, CudaTensor) and math.prod(shape) == x.count
        x.viewed = True
        view = CudaTensor(x.value, shape)
        view.viewed = True
        return view

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(x, CudaTensor)
        check_part(x.shape[-1], start, stop)
        out = self._new(*x.shape[:-1], stop - start)
        self._copy(x, start, out, 0, stop - start)
        return out

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, CudaTensor) and isinstance(b, CudaTensor)
        assert b.shape[:-1] in (a.shape[:-1], (self.rows, 1)), (a.shape, b.shape)
        out = self._new(*a.shape[:-1], a.shape[-1] + b.shape[-1])
        self._copy(a, 0, out, 0, a.shape[-1])
        self._copy(b, 0, out, a.shape[-1], b.shape[-1])
        return out

    def _copy(self, x: CudaTensor, x_at: int, out: CudaTensor, out_at: int, width: int) -> None:
        """Copies columns of x beside each other; a row of x goes to as many rows of out as there are for each."""
        rows = out.num_rows
        sizes = (width, rows // x.num_rows, x.shape[-1], x_at, out.shape[-1], out_at)
        self._run("copy_columns", (rows, blocks(width, THREADS)), x, out, *sizes)

    def select_outputs(self, x: Tensor) -> Tensor:
        assert isinstance(x, CudaTensor) and len(x.shape) == 2
        self.uses_outputs = True
        n, outputs = x.shape[-1], self._backend.outputs
        out = self._new(outputs, n)
        self._run("take_rows<F32>", (outputs, blocks(n, 8 * THREADS)), x, self._buffer("outputs"), out, n)
        return out

    # -- attention --------------------------------------------------------------------------------------------------

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        assert isinstance(x, CudaTensor) and len(x.shape) == 3
        rows, heads, dim = x.shape
        check_rope(rope, dim)
        frequencies, magnitude = self._backend.frequencies(rope)
        neox = int(rope.style is RopeStyle.NEOX)
        out = self._new(rows, heads, dim)
        positions = self._buffer("positions")
        self._run("rope", (heads, rows), x, positions, frequencies, out, dim, rope.dims // 2, neox, float(magnitude))
        return out

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        kv: KVLayout,
        scale: float,
        *,
        mask: str = "mask",
        sinks: str | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        assert isinstance(q, CudaTensor) and (v is None) == kv.values_in_keys
        heads, rows, n_kv = q.shape[1], self.rows, self._backend.n_kv
        check_attention(heads, q.shape[2], kv)
        self.uses_kv = True
        cell = CELL_OF[self._backend.kv_type]
        keys, values = map(np.uint64, self._backend.kv(kv.layer))
        for x, cache, dim in ((k, keys, kv.k_dim), (v, values, kv.v_dim)):
            if x is None:
                continue
            n = kv.num_heads * dim
            self._run(f"write_cells<{cell}>", (blocks(n, THREADS), rows), x, self._buffer("cells"), cache, n)
        most, out = most_head(kv), self._new(rows, heads * kv.v_dim)
        v_width = kv.k_dim if kv.values_in_keys else kv.num_heads * kv.v_dim
        sources, dims = (q, keys, values, self._buffer(mask)), (kv.num_heads, kv.k_dim, kv.v_dim, v_width)
        extra, scales = None if sinks is None else self._vector(sinks, heads), (float(scale), float(softcap))
        if rows >= MANY_ROWS:
            tiles = blocks(rows, QUERIES_AND_CELLS[most][0])
            self._run(attend_many(cell, most), (heads, tiles), *sources, extra, out, rows, *dims, n_kv, *scales)
            return out
        splits = blocks(n_kv, STRETCH)
        part = self._new(rows, heads, splits, kv.v_dim + 2)
        kernel = f"attend<{cell}, {most}>"
        self._run(kernel, (heads, splits, rows), *sources, part, *dims, n_kv, STRETCH, *scales)
        self._run("merge_attention", (heads, rows), part, extra, out, splits, kv.v_dim)
        return out

    # -- recurrence -------------------------------------------------------------------------------------------------

    def causal_conv(self, x: Tensor, weight: str, state: RecurrentLayout) -> Tensor:
        assert isinstance(x, CudaTensor)
        channels, width = state.channels, state.conv_width
        check_convolved(x.shape, self.rows, state)
        if width > MOST_TAPS:
            raise UnsupportedModelError(f"a convolution over {width} tokens; {MOST_TAPS} are the most")
        out = self._new(self.rows, channels)
        states = np.uint64(self._backend.states(state.layer)[0])
        weights, runs = self._vector(weight, channels, width), (self._buffer("runs"), self._buffer("num_runs"))
        self._run("causal_conv", (blocks(channels, THREADS),), x, weights, states, *runs, out, channels, width)
        return out

    def gated_delta(self, qkv: Tensor, alpha: Tensor, beta: Tensor, a: str, state: DeltaLayout, eps: float) -> Tensor:
        heads = state.value_heads
        check_recurrence((qkv.shape, alpha.shape, beta.shape), self.rows, state.channels, heads, heads)
        if state.key_dim > MOST_KEY:
            raise UnsupportedModelError(f"recurrent keys of {state.key_dim}; {MOST_KEY} are the most")
        out = self._new(self.rows, heads * state.value_dim)
        states, runs = np.uint64(self._backend.states(state.layer)[1]), (self._buffer("runs"), self._buffer("num_runs"))
        sizes = (state.key_heads, state.key_dim, state.value_dim, int(state.grouped))
        self._run(
            "gated_delta",
            (heads, blocks(state.value_dim, 32)),
            *(qkv, alpha, beta, self._vector(a, heads), states, *runs, out, *sizes, float(eps)),
        )
        return out

    def selective_scan(self, xbc: Tensor, dt: Tensor, a: str, d: str, state: ScanLayout) -> Tensor:
        heads = state.heads
        check_recurrence((xbc.shape, dt.shape), self.rows, state.channels, heads)
        if state.state_dim > MOST_KEY:
            raise UnsupportedModelError(f"recurrent states of {state.state_dim}; {MOST_KEY} are the most")
        out = self._new(self.rows, heads * state.head_dim)
        weights, states = (self._vector(a, heads, 1), self._vector(d, heads, 1)), self._backend.states(state.layer)[1]
        runs, sizes = (self._buffer("runs"), self._buffer("num_runs")), (state.groups, state.state_dim, state.head_dim)
        grid = (heads, blocks(state.head_dim, 32))
        self._run("selective_scan", grid, xbc, dt, *weights, np.uint64(states), *runs, out, *sizes)
        return out

    # -- experts ----------------------------------------------------------------------------------------------------

    def combine_experts(self, hidden: int, top_k: int, *, weighted: bool = True) -> Tensor:
        out = self._new(self.rows, hidden)
        weights, y = self._buffer("expert_weights") if weighted else None, self._buffer("expert_out")
        self._run("combine_experts", (blocks(hidden, THREADS), self.rows), weights, y, out, hidden, top_k)
        return out


def most_head(kv: KVLayout) -> int:
    """The kernel's limit on heads that these fit."""
    longest = max(kv.k_dim, kv.v_dim)
    for most in MOST_HEADS:
        if longest <= most:
            return most
    raise UnsupportedModelError(f"attention heads of {longest}; {MOST_HEADS[-1]} are the most")


def cell_of(kv_type: KVType) -> str:
    """The source's name of a cache element."""
    if kv_type not in CELL_OF:
        raise UnsupportedModelError(f"no {kv_type.value} KV cache on this device: use --kv-type f16 or f32")
    return CELL_OF[kv_type]
