"""A segment description recorded as a ggml graph.

Owns the translation of each operator of `ops.base.Graph` into ggml calls, and checks every shape before the call, since
ggml ends the process where an assertion of its own fails. Allocation and execution belong to the backend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expertserve.errors import UnsupportedModelError
from expertserve.ops import base
from expertserve.ops.base import Activation, DeltaLayout, KVLayout, RecurrentLayout, Rope, ScanLayout, Tensor
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
)
from expertserve.ops.ggml.library import (
    MAX_STATE_DIM,
    MIN_COLUMNS,
    TILE_ROWS,
    AttentionCall,
    CombineCall,
    ConvCall,
    DeltaCall,
    LinearCall,
    Matrix,
    ScanCall,
    attention_fits,
    attention_scratch_bytes,
    column_bytes,
    data_slot,
    function_address,
    ggml,
    kernel,
    matrix,
    tile_scratch_bytes,
)

if TYPE_CHECKING:
    from expertserve.ops.ggml.backend import GgmlBackend

GRAPH_TENSORS = 256
GLU_OPS = {
    Activation.SILU: ggml.ggml_swiglu_split,
    Activation.GELU: ggml.ggml_geglu_split,
    Activation.RELU: ggml.ggml_reglu_split,
    Activation.SWIGLU_OAI: lambda ctx, gate, up: ggml.ggml_swiglu_oai(ctx, gate, up, 1.702, 7.0),
}
ATTENTION = kernel("attention")
CAUSAL_CONV = kernel("causal_conv")
COMBINE = kernel("combine_experts")
GATED_DELTA = kernel("gated_delta")
LINEAR_INPUT = kernel("linear_input")
LINEAR_PRODUCT = kernel("linear_product")
SELECTIVE_SCAN = kernel("selective_scan")


class GgmlTensor(Tensor):
    """A node of the graph: row-major shape beside ggml's pointer (whose `ne` is the shape reversed)."""

    __slots__ = ("ptr", "viewed")

    def __init__(self, ptr: Any, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.ptr = ptr
        self.viewed = False


class GgmlGraph(base.Graph):
    """Records operators into `graph`, a ggml graph inside context `ctx` (metadata only, no tensor data)."""

    def __init__(self, backend: GgmlBackend) -> None:
        self._backend = backend
        self.rows = backend.rows
        size = GRAPH_TENSORS * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(GRAPH_TENSORS, False)
        self.ctx = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
        self.graph = ggml.ggml_new_graph_custom(self.ctx, GRAPH_TENSORS, False)
        self.keep: list[Any] = []
        self.uses_kv = False
        self.uses_outputs = False
        self._inputs: dict[str, Any] = {}
        self._count = 0

    def _new(self, ptr: Any, shape: Sequence[int]) -> GgmlTensor:
        self._count += 1
        if self._count > GRAPH_TENSORS // 2:
            raise UnsupportedModelError(f"a segment of this model has more than {GRAPH_TENSORS // 2} operators")
        return GgmlTensor(ptr, shape)

    def _input(self, name: str, ggml_type: int, address: int, *ne: int) -> Any:
        """A leaf over memory of the backend, created once a graph."""
        if name not in self._inputs:
            dims = (ctypes.c_int64 * len(ne))(*ne)
            tensor = ggml.ggml_new_tensor(self.ctx, ggml_type, len(ne), dims)
            tensor.contents.data = address
            self._inputs[name] = tensor
        return self._inputs[name]

    def _rows_input(self, name: str, ggml_type: int) -> Any:
        return self._input(name, ggml_type, self._backend.address(name), self.rows)

    def _weight(self, name: str, *shape: int) -> Any:
        tensor = self._backend.weight(name)
        check_shape(name, tensor.shape, *shape)
        return tensor.ptr

    def embed(self, weight: str) -> Tensor:
        table = self._backend.weight(weight)
        check_table(weight, table.shape)
        ids = self._rows_input("tokens", ggml.GGML_TYPE_I32)
        return self._new(ggml.ggml_get_rows(self.ctx, table.ptr, ids), (self.rows, table.shape[1]))

    def load(self, buffer: str) -> Tensor:
        shape = (self.rows, *self._backend.buffer_shape(buffer)[1:])
        return self._new(
            self._input(buffer, ggml.GGML_TYPE_F32, self._backend.address(buffer), *reversed(shape)), shape
        )

    def store(self, buffer: str, x: Tensor) -> None:
        assert isinstance(x, GgmlTensor)
        capacity = self._backend.buffer_shape(buffer)
        assert x.shape[1:] == capacity[1:] and x.shape[0] <= capacity[0], (buffer, x.shape, capacity)
        node = x.ptr
        if x.viewed or node.contents.view_src or node.contents.data:
            out = ggml.ggml_new_tensor(self.ctx, ggml.GGML_TYPE_F32, 4, node.contents.ne)
            out.contents.data = self._backend.address(buffer)
            node = ggml.ggml_cpy(self.ctx, node, out)
        else:
            node.contents.data = self._backend.address(buffer)
        ggml.ggml_build_forward_expand(self.graph, node)

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        assert isinstance(x, GgmlTensor)
        w = self._backend.weight(weight)
        n_out = linear_outputs(weight, w.shape, x.shape[-1])
        m = matrix(w.ptr.contents.type, x.shape[-1])
        if m.tile.unpack and len(x.shape) == 2 and x.shape[0] >= MIN_COLUMNS and n_out % TILE_ROWS == 0:
            out = self._tiled_product(m, w, x, n_out)
        else:
            out = ggml.ggml_mul_mat(self.ctx, w.ptr, x.ptr)
        if bias is not None:
            out = ggml.ggml_add(self.ctx, out, self._weight(bias, n_out))
        return self._new(out, (*x.shape[:-1], n_out))

    def head_linear(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, GgmlTensor) and len(x.shape) == 3
        w = self._backend.weight(weight)
        n_out = head_outputs(weight, w.shape, *x.shape[1:])
        by_head = ggml.ggml_mul_mat(self.ctx, w.ptr, ggml.ggml_permute(self.ctx, x.ptr, 0, 2, 1, 3))
        out = ggml.ggml_cont(self.ctx, ggml.ggml_permute(self.ctx, by_head, 0, 2, 1, 3))
        return self._new(out, (*x.shape[:2], n_out))

    def _tiled_product(self, m: Matrix, w: GgmlTensor, x: GgmlTensor, n_out: int) -> Any:
        """A product with many rows by our tiled kernel: one operator converts the rows, one multiplies."""
        rows, n = x.shape
        threads, scratch_bytes = self._backend.threads, tile_scratch_bytes(n)
        call = LinearCall(
            m=m,
            weights=w.ptr.contents.data,
            x=data_slot(x.ptr),
            scratch=self._backend.shared_scratch("tiles", 0, threads * scratch_bytes),
            scratch_bytes=scratch_bytes,
            n=n,
            rows=rows,
            num_outputs=n_out,
        )
        self.keep.append(call)
        user, nbytes = ctypes.addressof(call), rows * column_bytes(n) + threads * m.input_row_bytes
        columns = self._custom(LINEAR_INPUT, user, x.ptr, ggml.GGML_TYPE_I8, nbytes, 1)
        out = self._custom(LINEAR_PRODUCT, user, columns, ggml.GGML_TYPE_F32, n_out, rows)
        call.columns, call.out = data_slot(columns), data_slot(out)
        return out

    def _custom(self, function: Any, user: int, source: Any, ggml_type: int, ne0: int, ne1: int, *more: Any) -> Any:
        count = 1 + len(more)
        sources = (ctypes.POINTER(ggml.ggml_tensor) * count)(source, *more)
        return ggml.ggml_custom_4d(self.ctx, ggml_type, ne0, ne1, 1, 1, sources, count, function, -1, user)

    def rms_norm(self, x: Tensor, weight: str | None, eps: float) -> Tensor:
        assert isinstance(x, GgmlTensor)
        out = ggml.ggml_rms_norm(self.ctx, x.ptr, eps)
        if weight is not None:
            out = ggml.ggml_mul(self.ctx, out, self._weight(weight, x.shape[-1]))
        return self._new(out, x.shape)

    def layer_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        assert isinstance(x, GgmlTensor)
        out = ggml.ggml_norm(self.ctx, x.ptr, eps)
        return self._new(ggml.ggml_mul(self.ctx, out, self._weight(weight, x.shape[-1])), x.shape)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, GgmlTensor) and isinstance(b, GgmlTensor) and a.shape == b.shape
        return self._new(ggml.ggml_add(self.ctx, a.ptr, b.ptr), a.shape)

    def add_weight(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, GgmlTensor)
        return self._new(ggml.ggml_add(self.ctx, x.ptr, self._weight(weight, x.shape[-1])), x.shape)

    def mul_weight(self, x: Tensor, weight: str) -> Tensor:
        assert isinstance(x, GgmlTensor)
        shape = factor_shape(self._backend.weight(weight).shape, x.shape)
        return self._new(ggml.ggml_mul(self.ctx, x.ptr, self._weight(weight, *shape)), x.shape)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, GgmlTensor) and isinstance(b, GgmlTensor)
        assert b.shape in (a.shape, (*a.shape[:-1], 1)), (a.shape, b.shape)
        return self._new(ggml.ggml_mul(self.ctx, a.ptr, b.ptr), a.shape)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert isinstance(x, GgmlTensor)
        return self._new(ggml.ggml_scale(self.ctx, x.ptr, factor), x.shape)

    def clamp(self, x: Tensor, most: float) -> Tensor:
        assert isinstance(x, GgmlTensor)
        # ggml's own writes over its argument.
        return self._new(ggml.ggml_clamp(self.ctx, ggml.ggml_dup(self.ctx, x.ptr), -most, most), x.shape)

    def sigmoid(self, x: Tensor) -> Tensor:
        assert isinstance(x, GgmlTensor)
        return self._new(ggml.ggml_sigmoid(self.ctx, x.ptr), x.shape)

    def tanh(self, x: Tensor) -> Tensor:
        assert isinstance(x, GgmlTensor)
        return self._new(ggml.ggml_tanh(self.ctx, x.ptr), x.shape)

    def silu(self, x: Tensor) -> Tensor:
        assert isinstance(x, GgmlTensor)
        return self._new(ggml.ggml_silu(self.ctx, x.ptr), x.shape)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        assert isinstance(gate, GgmlTensor) and isinstance(up, GgmlTensor) and gate.shape == up.shape
        return self._new(GLU_OPS[activation](self.ctx, gate.ptr, up.ptr), gate.shape)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        assert isinstance(x, GgmlTensor)
        ne = [*reversed(shape), 1, 1, 1][:4]
        x.viewed = True
        return self._new(ggml.ggml_reshape_4d(self.ctx, x.ptr, *ne), shape)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(x, GgmlTensor) and len(x.shape) <= 3
        check_part(x.shape[-1], start, stop)
        x.viewed = True
        ne, nb = [*reversed(x.shape), 1, 1][:3], x.ptr.contents.nb
        view = ggml.ggml_view_3d(self.ctx, x.ptr, stop - start, ne[1], ne[2], nb[1], nb[2], 4 * start)
        return self._new(ggml.ggml_cont(self.ctx, view), (*x.shape[:-1], stop - start))

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        assert isinstance(a, GgmlTensor) and isinstance(b, GgmlTensor)
        assert b.shape[:-1] in (a.shape[:-1], (self.rows, 1)), (a.shape, b.shape)
        other = b.ptr
        if b.shape[:-1] != a.shape[:-1]:
            other = ggml.ggml_repeat_4d(self.ctx, other, b.shape[-1], a.shape[1], self.rows, 1)
        return self._new(ggml.ggml_concat(self.ctx, a.ptr, other, 0), (*a.shape[:-1], a.shape[-1] + b.shape[-1]))

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        assert isinstance(x, GgmlTensor) and len(x.shape) == 3
        check_rope(rope, x.shape[-1])
        factors = None if rope.freq_factors is None else self._weight(rope.freq_factors, rope.dims // 2)
        out = ggml.ggml_rope_ext(
            self.ctx,
            x.ptr,
            self._rows_input("positions", ggml.GGML_TYPE_I32),
            factors,
            rope.dims,
            rope.style.value,
            rope.original_context,
            rope.freq_base,
            rope.freq_scale,
            rope.ext_factor,
            rope.attn_factor,
            rope.beta_fast,
            rope.beta_slow,
        )
        return self._new(out, x.shape)

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
        assert isinstance(q, GgmlTensor) and (v is None) == kv.values_in_keys
        heads = q.shape[1]
        check_attention(heads, q.shape[2], kv)
        self.uses_kv = True
        c, caches = self.ctx, self._backend.kv(kv.layer)
        cells = self._rows_input("cells", ggml.GGML_TYPE_I64)
        for x, cache, dim in zip((k, v), caches, (kv.k_dim, kv.v_dim), strict=True):
            if x is None:
                continue
            assert isinstance(x, GgmlTensor)
            row = ggml.ggml_reshape_2d(c, x.ptr, kv.num_heads * dim, self.rows)
            ggml.ggml_build_forward_expand(self.graph, ggml.ggml_set_rows(c, cache, row, cells))
        half = caches[0].contents.type == ggml.GGML_TYPE_F16
        if self._backend.flash_attention and half and attention_fits(kv.k_dim, kv.v_dim) and not softcap:
            out = self._half_attention(q, caches, kv, scale, mask, sinks)
        else:
            out = self._ggml_attention(q, caches, kv, scale, mask, sinks, softcap)
        return self._new(out, (self.rows, heads * kv.v_dim))

    def _half_attention(
        self, q: GgmlTensor, caches: tuple[Any, Any], kv: KVLayout, scale: float, mask: str, sinks: str | None
    ) -> Any:
        """By our kernel over a half-precision cache."""
        keys, values = caches
        heads, n_kv, threads = q.shape[1], self._backend.n_kv, self._backend.threads
        scratch_bytes = attention_scratch_bytes(n_kv)
        call = AttentionCall(
            k=keys.contents.data,
            v=values.contents.data,
            k_row_bytes=keys.contents.nb[1],
            v_row_bytes=values.contents.nb[1],
            q=data_slot(q.ptr),
            mask=self._backend.address(mask),
            sinks=None if sinks is None else self._weight(sinks, heads).contents.data,
            softmax=function_address("ggml_vec_soft_max_f32"),
            scratch=self._backend.shared_scratch("attention", 0, threads * scratch_bytes),
            scratch_bytes=scratch_bytes,
            scale=scale,
            rows=self.rows,
            n_kv=n_kv,
            heads=heads,
            kv_heads=kv.num_heads,
            k_dim=kv.k_dim,
            v_dim=kv.v_dim,
        )
        self.keep.append(call)
        user, ne0 = ctypes.addressof(call), heads * kv.v_dim
        out = self._custom(ATTENTION, user, q.ptr, ggml.GGML_TYPE_F32, ne0, self.rows)
        call.out = data_slot(out)
        return out

    def _ggml_attention(
        self,
        q: GgmlTensor,
        caches: tuple[Any, Any],
        kv: KVLayout,
        scale: float,
        mask: str,
        sinks: str | None,
        softcap: float,
    ) -> Any:
        """By ggml's operators, fused or with a score matrix."""
        c, heads, n_kv = self.ctx, q.shape[1], self._backend.n_kv
        seen = self._input(mask, ggml.GGML_TYPE_F16, self._backend.address(mask), n_kv, self.rows)
        sink_scores = None if sinks is None else self._weight(sinks, heads)
        views = []
        for cache, dim in zip(caches, (kv.k_dim, kv.v_dim), strict=True):
            head = ggml.ggml_row_size(cache.contents.type, dim)
            views.append(ggml.ggml_view_3d(c, cache, dim, n_kv, kv.num_heads, cache.contents.nb[1], head, 0))
        queries = ggml.ggml_permute(c, q.ptr, 0, 2, 1, 3)  # [heads, rows, k_dim]
        if self._backend.flash_attention:
            out = ggml.ggml_flash_attn_ext(c, queries, *views, seen, scale, 0.0, softcap)
            ggml.ggml_flash_attn_ext_add_sinks(out, sink_scores)
            ggml.ggml_flash_attn_ext_set_prec(out, ggml.GGML_PREC_F32)
            return ggml.ggml_reshape_2d(c, out, heads * kv.v_dim, self.rows)
        scores = ggml.ggml_mul_mat(c, views[0], queries)
        ggml.ggml_mul_mat_set_prec(scores, ggml.GGML_PREC_F32)
        if softcap:
            scores = ggml.ggml_scale(c, ggml.ggml_tanh(c, ggml.ggml_scale(c, scores, scale / softcap)), softcap)
        probs = ggml.ggml_soft_max_ext(c, scores, seen, 1.0 if softcap else scale, 0.0)
        ggml.ggml_soft_max_add_sinks(probs, sink_scores)
        values = ggml.ggml_cont(c, ggml.ggml_transpose(c, views[1]))
        out = ggml.ggml_permute(c, ggml.ggml_mul_mat(c, values, probs), 0, 2, 1, 3)
        return ggml.ggml_cont_2d(c, out, heads * kv.v_dim, self.rows)

    def causal_conv(self, x: Tensor, weight: str, state: RecurrentLayout) -> Tensor:
        assert isinstance(x, GgmlTensor)
        check_convolved(x.shape, self.rows, state)
        call = ConvCall(
            x=data_slot(x.ptr),
            weight=self._weight(weight, state.channels, state.conv_width).contents.data,
            states=self._backend.states(state.layer)[0],
            runs=self._backend.address("runs"),
            num_runs=self._backend.address("num_runs"),
            channels=state.channels,
            width=state.conv_width,
        )
        self.keep.append(call)
        user = ctypes.addressof(call)
        out = self._custom(CAUSAL_CONV, user, x.ptr, ggml.GGML_TYPE_F32, state.channels, self.rows)
        call.out = data_slot(out)
        return self._new(out, x.shape)

    def gated_delta(self, qkv: Tensor, alpha: Tensor, beta: Tensor, a: str, state: DeltaLayout, eps: float) -> Tensor:
        assert isinstance(qkv, GgmlTensor) and isinstance(alpha, GgmlTensor) and isinstance(beta, GgmlTensor)
        heads = state.value_heads
        check_recurrence((qkv.shape, alpha.shape, beta.shape), self.rows, state.channels, heads, heads)
        if max(state.key_dim, state.value_dim) > MAX_STATE_DIM:
            raise UnsupportedModelError(f"recurrent heads of {state.key_dim} x {state.value_dim} are too wide")
        call = DeltaCall(
            qkv=data_slot(qkv.ptr),
            alpha=data_slot(alpha.ptr),
            beta=data_slot(beta.ptr),
            a=self._weight(a, heads).contents.data,
            states=self._backend.states(state.layer)[1],
            runs=self._backend.address("runs"),
            num_runs=self._backend.address("num_runs"),
            eps=eps,
            key_heads=state.key_heads,
            value_heads=heads,
            key_dim=state.key_dim,
            value_dim=state.value_dim,
            grouped=state.grouped,
        )
        self.keep.append(call)
        user, width = ctypes.addressof(call), heads * state.value_dim
        sources = (alpha.ptr, beta.ptr)
        out = self._custom(GATED_DELTA, user, qkv.ptr, ggml.GGML_TYPE_F32, width, self.rows, *sources)
        call.out = data_slot(out)
        return self._new(out, (self.rows, width))

    def selective_scan(self, xbc: Tensor, dt: Tensor, a: str, d: str, state: ScanLayout) -> Tensor:
        assert isinstance(xbc, GgmlTensor) and isinstance(dt, GgmlTensor)
        check_recurrence((xbc.shape, dt.shape), self.rows, state.channels, state.heads)
        call = ScanCall(
            xbc=data_slot(xbc.ptr),
            dt=data_slot(dt.ptr),
            a=self._weight(a, state.heads, 1).contents.data,
            d=self._weight(d, state.heads, 1).contents.data,
            states=self._backend.states(state.layer)[1],
            runs=self._backend.address("runs"),
            num_runs=self._backend.address("num_runs"),
            heads=state.heads,
            groups=state.groups,
            head_dim=state.head_dim,
            state_dim=state.state_dim,
        )
        self.keep.append(call)
        user, width = ctypes.addressof(call), state.heads * state.head_dim
        out = self._custom(SELECTIVE_SCAN, user, xbc.ptr, ggml.GGML_TYPE_F32, width, self.rows, dt.ptr)
        call.out = data_slot(out)
        return self._new(out, (self.rows, width))

    def combine_experts(self, hidden: int, top_k: int, *, weighted: bool = True) -> Tensor:
        call = CombineCall(
            y=self._backend.address("expert_out"),
            weights=self._backend.address("expert_weights") if weighted else None,
            rows=self.rows,
            top_k=top_k,
            hidden=hidden,
        )
        self.keep.append(call)
        user = ctypes.addressof(call)
        out = ggml.ggml_custom_4d(self.ctx, ggml.GGML_TYPE_F32, hidden, self.rows, 1, 1, None, 0, COMBINE, -1, user)
        call.out = data_slot(out)
        return self._new(out, (self.rows, hidden))

    def select_outputs(self, x: Tensor) -> Tensor:
        assert isinstance(x, GgmlTensor)
        self.uses_outputs = True
        n = self._backend.outputs
        rows = self._input("outputs", ggml.GGML_TYPE_I32, self._backend.address("outputs"), n)
        return self._new(ggml.ggml_get_rows(self.ctx, x.ptr, rows), (n, x.shape[1]))
