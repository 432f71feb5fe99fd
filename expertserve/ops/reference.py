"""The operators in plain NumPy: slow, float32 throughout, and the oracle for every other backend.

Weights are dequantised once; a graph executes each operator at once instead of recording it. It is chosen only by name
(`--device reference`) and never as a fallback.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.ops import base
from expertserve.ops.base import (
    NO_MASKS,
    Activation,
    DeltaLayout,
    ExpertShape,
    HostAccess,
    KVLayout,
    KVType,
    Mask,
    ReadTensor,
    RecurrentLayout,
    Rope,
    RopeStyle,
    ScanLayout,
    Tensor,
)
from expertserve.ops.checks import find_weight, head_outputs, linear_outputs
from expertserve.ops.rope import rope_frequencies

if TYPE_CHECKING:
    from expertserve.experts.batch import SlotBatch

Array = NDArray[np.float32]


class NumpyTensor(Tensor):
    """A computed value."""

    __slots__ = ("a",)

    def __init__(self, a: NDArray[Any]) -> None:
        super().__init__(a.shape)
        self.a: Array = a.astype(np.float32, copy=False)


def dequantise(raw: NDArray[np.uint8], info: TensorInfo, shape: Sequence[int]) -> Array:
    """Float32 values of raw tensor bytes."""
    rows = raw.reshape(-1, info.row_bytes)
    return np.asarray(gguf.quants.dequantize(rows, info.type), np.float32).reshape(shape)


def sigmoid(x: Array) -> Array:
    """Logistic function without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)


def activate(gate: Array, up: Array, activation: Activation, limit: float = 0.0) -> Array:
    """The activation of a gated feed-forward."""
    if activation is Activation.SILU:
        silu: Array = gate * sigmoid(gate)
        most = np.float32(limit or np.inf)
        return np.minimum(silu, most) * np.clip(up, -most, most)
    if activation is Activation.GELU:
        inner = np.float32(math.sqrt(2 / math.pi)) * gate * (1 + np.float32(0.044715) * gate * gate)
        gelu: Array = np.float32(0.5) * gate * (1 + np.tanh(inner))
        return gelu * up
    if activation is Activation.RELU:
        relu: Array = np.maximum(gate, np.float32(0))
        return relu * up
    limited: Array = np.minimum(gate, np.float32(7))
    shifted: Array = np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)
    return limited * sigmoid(np.float32(1.702) * limited) * shifted


class NumpyGraph(base.Graph):
    """Executes operators on the backend's current batch."""

    def __init__(self, backend: ReferenceBackend) -> None:
        self._b = backend
        self.rows = backend.rows

    def _rows(self, buffer: str) -> NDArray[Any]:
        return self._b.host(buffer)[: self.rows]

    def embed(self, weight: str) -> Tensor:
        return NumpyTensor(self._b.weight(weight)[self._rows("tokens")])

    def load(self, buffer: str) -> Tensor:
        return NumpyTensor(self._rows(buffer).copy())

    def store(self, buffer: str, x: Tensor) -> None:
        self._b.host(buffer)[: x.shape[0]] = _a(x)

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        w = self._b.weight(weight)
        linear_outputs(weight, w.shape, x.shape[-1])
        out = _a(x) @ np.atleast_2d(w).T
        return NumpyTensor(out if bias is None else out + self._b.weight(bias))

    def head_linear(self, x: Tensor, weight: str) -> Tensor:
        w = self._b.weight(weight)
        head_outputs(weight, w.shape, *x.shape[1:])
        return NumpyTensor(np.einsum("rhi,hoi->rho", _a(x), w))

    def rms_norm(self, x: Tensor, weight: str | None, eps: float) -> Tensor:
        a = _a(x)
        out = a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + eps)
        return NumpyTensor(out if weight is None else out * self._b.weight(weight))

    def layer_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        a = _a(x)
        centred = a - np.mean(a, axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        return NumpyTensor(centred / np.sqrt(variance + np.float32(eps)) * self._b.weight(weight))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return NumpyTensor(_a(a) + _a(b))

    def add_weight(self, x: Tensor, weight: str) -> Tensor:
        return NumpyTensor(_a(x) + self._b.weight(weight))

    def mul_weight(self, x: Tensor, weight: str) -> Tensor:
        return NumpyTensor(_a(x) * self._b.weight(weight))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return NumpyTensor(_a(a) * _a(b))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return NumpyTensor(_a(x) * np.float32(factor))

    def clamp(self, x: Tensor, most: float) -> Tensor:
        return NumpyTensor(np.clip(_a(x), np.float32(-most), np.float32(most)))

    def sigmoid(self, x: Tensor) -> Tensor:
        return NumpyTensor(sigmoid(_a(x)))

    def tanh(self, x: Tensor) -> Tensor:
        return NumpyTensor(np.tanh(_a(x)))

    def silu(self, x: Tensor) -> Tensor:
        return NumpyTensor(_a(x) * sigmoid(_a(x)))

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return NumpyTensor(activate(_a(gate), _a(up), activation))

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return NumpyTensor(_a(x).reshape(shape))

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        return NumpyTensor(_a(x)[..., start:stop])

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        return NumpyTensor(np.concatenate([_a(a), np.broadcast_to(_a(b), (*a.shape[:-1], b.shape[-1]))], axis=-1))

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        factors = None if rope.freq_factors is None else self._b.weight(rope.freq_factors)
        frequencies, magnitude = rope_frequencies(rope, factors)
        angle = self._rows("positions")[:, None] * frequencies
        cos, sin = np.cos(angle)[:, None, :] * magnitude, np.sin(angle)[:, None, :] * magnitude
        out = _a(x).copy()
        half = rope.dims // 2
        if rope.style is RopeStyle.NEOX:
            first, second = slice(0, half), slice(half, rope.dims)
        else:
            first, second = slice(0, rope.dims, 2), slice(1, rope.dims, 2)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return NumpyTensor(out)

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
        keys, values = self._b.kv(kv.layer)
        cells = self._rows("cells")
        keys[cells] = _a(k)
        if v is not None:
            values[cells] = _a(v)
        seen = self._b.masks[mask]
        n_kv = seen.shape[1]
        repeat = q.shape[1] // kv.num_heads
        ks = keys[:n_kv].astype(np.float32).repeat(repeat, axis=1)
        vs = values[:n_kv].astype(np.float32).repeat(repeat, axis=1)
        scores = np.einsum("qhd,khd->hqk", _a(q), ks) * np.float32(scale)
        if softcap:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        scores = scores + seen.astype(np.float32)
        if sinks is not None:
            sink = np.broadcast_to(self._b.weight(sinks)[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink], axis=-1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probs = (scores / scores.sum(axis=-1, keepdims=True))[..., :n_kv]
        return NumpyTensor(np.einsum("hqk,khd->qhd", probs, vs).reshape(self.rows, -1))

    def causal_conv(self, x: Tensor, weight: str, state: RecurrentLayout) -> Tensor:
        states, a, w = self._b.states(state.layer)[0], _a(x), self._b.weight(weight)
        out = np.zeros_like(a)
        for source, target, start, end in self._b.runs():
            before = states[source] if source >= 0 else np.zeros(state.conv_shape, np.float32)
            seen = np.concatenate([before, a[start:end]])
            for j in range(state.conv_width):
                out[start:end] += seen[j : j + end - start] * w[:, j]
            states[target] = seen[len(seen) - len(before) :]
        return NumpyTensor(out)

    def gated_delta(self, qkv: Tensor, alpha: Tensor, beta: Tensor, a: str, state: DeltaLayout, eps: float) -> Tensor:
        states, decay = self._b.states(state.layer)[1], np.exp(self._b.weight(a) * np.logaddexp(0, _a(alpha)))
        keys = state.key_heads * state.key_dim
        q, k = (_a(qkv)[:, i * keys : (i + 1) * keys].reshape(self.rows, state.key_heads, -1) for i in (0, 1))
        v = _a(qkv)[:, 2 * keys :].reshape(self.rows, state.value_heads, state.value_dim)
        q, k = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), eps) for x in (q, k))
        times = state.value_heads // state.key_heads
        q, k = (x.repeat(times, axis=1) if state.grouped else np.tile(x, (1, times, 1)) for x in (q, k))
        out = np.zeros_like(v)
        for source, target, start, end in self._b.runs():
            s = states[source].copy() if source >= 0 else np.zeros(state.matrix_shape, np.float32)
            for row in range(start, end):
                s *= decay[row][:, None, None]
                change = sigmoid(_a(beta)[row])[:, None] * (v[row] - np.einsum("hk,hkv->hv", k[row], s))
                s += k[row][:, :, None] * change[:, None, :]
                out[row] = np.einsum("hk,hkv->hv", q[row], s) * state.key_dim**-0.5
            states[target] = s
        return NumpyTensor(out.reshape(self.rows, -1))

    def selective_scan(self, xbc: Tensor, dt: Tensor, a: str, d: str, state: ScanLayout) -> Tensor:
        states, inner = self._b.states(state.layer)[1], state.heads * state.head_dim
        x = _a(xbc)[:, :inner].reshape(self.rows, state.heads, state.head_dim)
        groups = _a(xbc)[:, inner:].reshape(self.rows, 2, state.groups, state.state_dim)
        b, c = groups.repeat(state.heads // state.groups, axis=2).swapaxes(0, 1)
        step = np.logaddexp(np.float32(0), _a(dt))
        decay = np.exp(self._b.weight(a)[:, 0] * step)
        out = self._b.weight(d) * x
        for source, target, start, end in self._b.runs():
            s = states[source].copy() if source >= 0 else np.zeros(state.matrix_shape, np.float32)
            for row in range(start, end):
                s *= decay[row][:, None, None]
                s += b[row][:, :, None] * (step[row][:, None] * x[row])[:, None, :]
                out[row] += np.einsum("hs,hsd->hd", c[row], s)
            states[target] = s
        return NumpyTensor(out.reshape(self.rows, -1))

    def combine_experts(self, hidden: int, top_k: int, *, weighted: bool = True) -> Tensor:
        y = self._b.host("expert_out")[: self.rows * top_k].reshape(self.rows, top_k, hidden)
        weights = self._rows("expert_weights") if weighted else np.ones((self.rows, top_k), np.float32)
        out = np.zeros((self.rows, hidden), np.float32)
        for j in range(top_k):
            out += weights[:, j, None] * y[:, j]
        return NumpyTensor(out)

    def select_outputs(self, x: Tensor) -> Tensor:
        return NumpyTensor(_a(x)[self._b.host("outputs")[: self._b.outputs]])


def _a(x: Tensor) -> Array:
    assert isinstance(x, NumpyTensor)
    return x.a


class NumpySegment(base.Segment):
    """Runs its description on a fresh graph each time."""

    def __init__(self, backend: ReferenceBackend, build: Callable[[base.Graph], None]) -> None:
        self._backend, self._build = backend, build

    def run(self) -> None:
        self._build(NumpyGraph(self._backend))


class NumpyExpertKernel(base.ExpertKernel):
    """Dequantises the experts it is given, one group at a time."""

    def __init__(self, backend: ReferenceBackend, tower: ExpertTower, shape: ExpertShape) -> None:
        self._b, self._tower, self._shape = backend, tower, shape

    def begin(self, rows: int) -> None:
        pass

    def __call__(self, batch: SlotBatch) -> None:
        x, out = self._b.host("ffn_input"), self._b.host("expert_out")
        for group in range(batch.group_start.size - 1):
            parts = {
                role: self._matrix(info, int(batch.slices[i][group]))
                for i, (role, info) in enumerate(zip(self._tower.roles, self._tower.slices, strict=True))
            }
            added = {role: self._b.weight(name)[batch.experts[group]] for role, name in self._shape.biases.items()}
            pairs = batch.pairs[batch.group_start[group] : batch.group_start[group + 1]]
            rows = x[pairs // self._shape.top_k]
            if self._shape.weigh_inputs:
                rows = rows * self._b.host("expert_weights").reshape(-1, 1)[pairs]
            made = {role: rows @ parts[role].T + added.get(role, 0) for role in parts if role != "down"}
            if "gate_up" in made:
                made["gate"], made["up"] = np.split(made["gate_up"], 2, axis=1)
            h = activate(made.get("gate", made["up"]), made["up"], self._shape.activation, self._shape.limit)
            out[pairs] = h @ parts["down"].T + added.get("down", 0)

    def _matrix(self, info: TensorInfo, address: int) -> Array:
        nbytes = info.nbytes // info.shape[0]
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return dequantise(raw, info, info.shape[1:])


class ReferenceBackend(base.Backend):
    """NumPy on the host."""

    def __init__(self) -> None:
        self.rows = self.outputs = 0
        self.masks: dict[str, Mask] = {}
        self._weights: dict[str, Array] = {}
        self._buffers: dict[str, NDArray[Any]] = {}
        self._kv: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._states: dict[int, tuple[Array, Array]] = {}

    def check(self, infos: Iterable[TensorInfo], towers: Iterable[ExpertTower]) -> None:
        for info in (*infos, *(part for tower in towers for part in tower.slices)):
            if info.type not in gguf.quants._type_traits and info.type.name not in ("F32", "F16"):
                raise UnsupportedModelError(f"{info.name}: tensor type {info.type.name} cannot be dequantised")

    def memory(self) -> None:
        return None

    def load_weights(self, infos: Sequence[TensorInfo], read: ReadTensor, progress: Callable[[int], None]) -> None:
        for info in infos:
            raw = np.empty(info.nbytes, np.uint8)
            read(info.name, raw.data)
            self._weights[info.name] = dequantise(raw, info, info.shape)
            progress(info.nbytes)

    def allocate_kv(self, layouts: Sequence[KVLayout], cells: int, kv_type: KVType) -> None:
        if kv_type is KVType.Q8_0:
            raise UnsupportedModelError("the reference device has no q8_0 KV cache: use --kv-type f16 or f32")
        for kv in layouts:
            k = np.zeros((cells, kv.num_heads, kv.k_dim), kv_type.value.replace("f", "float"))
            v = k[..., : kv.v_dim] if kv.values_in_keys else np.zeros((cells, kv.num_heads, kv.v_dim), k.dtype)
            self._kv[kv.layer] = k, v

    def allocate_states(self, layouts: Sequence[RecurrentLayout], slots: int) -> None:
        for layout in layouts:
            conv, matrix = ((slots, *layout.conv_shape), (slots, *layout.matrix_shape))
            self._states[layout.layer] = np.zeros(conv, np.float32), np.zeros(matrix, np.float32)

    def allocate_buffer(self, name: str, shape: Sequence[int], dtype: Any, access: HostAccess) -> None:
        self._buffers[name] = np.zeros(shape, dtype)

    def weight(self, name: str) -> Array:
        """The dequantised weight `name`."""
        return find_weight(self._weights, name)

    def kv(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer, [cells, heads, dim]."""
        return self._kv[layer]

    def states(self, layer: int) -> tuple[Array, Array]:
        """Convolution states and recurrent states of a layer, by slot."""
        return self._states[layer]

    def runs(self) -> list[list[int]]:
        """The batch's runs: source slot, target slot, first row, row after the last."""
        count = int(self.host("num_runs")[0])
        return [[int(n) for n in run] for run in self.host("runs")[:count]]

    def host(self, name: str) -> NDArray[Any]:
        return self._buffers[name]

    def begin_batch(self, rows: int, mask: Mask, outputs: int, more_masks: Mapping[str, Mask] = NO_MASKS) -> None:
        self.rows, self.outputs = rows, outputs
        self.masks = {"mask": mask, **more_masks}

    def compile(self, name: str, build: Callable[[base.Graph], None]) -> NumpySegment:
        return NumpySegment(self, build)

    def expert_kernel(self, tower: ExpertTower, shape: ExpertShape) -> NumpyExpertKernel:
        return NumpyExpertKernel(self, tower, shape)

    def close(self) -> None:
        self._weights.clear()
        self._kv.clear()
        self._buffers.clear()
