"""The CPU backend: ggml's own kernels through ctypes.

Owns dense weights, KV cache, persistent buffers and compiled segments. A segment is compiled once for each shape it
meets and then run by one call. Segments share one scratch area, since they run one after another; where it has to grow,
the segments compiled before are dropped and compiled again on their next use.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.anonymous import map_anonymous
from expertserve.errors import CapacityError, UnsupportedModelError
from expertserve.gguf.file import TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.ops import base
from expertserve.ops.base import NO_MASKS, ExpertShape, HostAccess, KVLayout, KVType, Mask, ReadTensor, RecurrentLayout
from expertserve.ops.checks import find_weight
from expertserve.ops.ggml.experts import GgmlExpertKernel
from expertserve.ops.ggml.graph import GgmlGraph, GgmlTensor
from expertserve.ops.ggml.library import ggml
from expertserve.ops.ggml.plan import GraphPlan
from expertserve.ops.segments import BatchShape, SegmentCache

ALIGNMENT = 64
KV_TYPES = {KVType.F16: ggml.GGML_TYPE_F16, KVType.F32: ggml.GGML_TYPE_F32, KVType.Q8_0: ggml.GGML_TYPE_Q8_0}


class Memory:
    """Zeroed anonymous memory, page-aligned, in huge pages where the kernel has them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, 1)
        self._map = map_anonymous(self.nbytes, "weights, KV cache or buffers (lower --ctx)")
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.array.ctypes.data


def align(n: int) -> int:
    """The next multiple of the tensor alignment."""
    return -(-n // ALIGNMENT) * ALIGNMENT


class GgmlSegment(base.Segment):
    """A compiled graph and its plan."""

    def __init__(self, graph: GgmlGraph, plan: GraphPlan) -> None:
        self._graph = graph
        self._plan = plan

    def run(self) -> None:
        self._plan.run()

    def free(self) -> None:
        """Releases ggml's context; the segment must not run again."""
        ggml.ggml_free(self._graph.ctx)


class GgmlBackend(base.Backend):
    """ggml on the CPU with `threads` threads."""

    def __init__(self, *, threads: int, flash_attention: bool) -> None:
        ggml.ggml_cpu_init()
        self.threads = threads
        self.flash_attention = flash_attention
        self.rows = self.n_kv = self.outputs = 0
        self._weights: dict[str, GgmlTensor] = {}
        self._contexts: list[Any] = []
        self._memory: list[Memory] = []
        self._buffers: dict[str, NDArray[Any]] = {}
        self._shared: dict[tuple[str, int], Memory] = {}
        self._kv: dict[int, tuple[Any, Any]] = {}
        self._states: dict[int, tuple[int, int]] = {}
        self._segments: SegmentCache[GgmlSegment] = SegmentCache(GgmlSegment.free)
        self._allocator = ggml.ggml_gallocr_new(ggml.ggml_backend_cpu_buffer_type())
        self._scratch_bytes = 0

    # -- set-up ---------------------------------------------------------------------------------------------------

    def check(self, infos: Iterable[TensorInfo], towers: Iterable[ExpertTower]) -> None:
        dense = list(infos)
        for info in dense:
            if len(info.shape) == 1 and int(info.type) != ggml.GGML_TYPE_F32:
                raise UnsupportedModelError(f"{info.name}: a vector of {info.type.name}; only F32 is computed with")
        for info in (*dense, *(part for tower in towers for part in tower.slices)):
            if not ggml.ggml_get_type_traits_cpu(int(info.type)).contents.vec_dot:
                raise UnsupportedModelError(f"{info.name}: tensor type {info.type.name} has no CPU kernel")

    def memory(self) -> None:
        return None

    def load_weights(self, infos: Sequence[TensorInfo], read: ReadTensor, progress: Callable[[int], None]) -> None:
        memory = self._allocate(sum(align(info.nbytes) for info in infos))
        context = self.context(len(infos))
        offset = 0
        for info in infos:
            read(info.name, memory.array.data[offset : offset + info.nbytes])
            dims = (ctypes.c_int64 * len(info.shape))(*reversed(info.shape))
            tensor = ggml.ggml_new_tensor(context, int(info.type), len(info.shape), dims)
            tensor.contents.data = memory.address + offset
            self._weights[info.name] = GgmlTensor(tensor, info.shape)
            offset += align(info.nbytes)
            progress(info.nbytes)

    def allocate_kv(self, layouts: Sequence[KVLayout], cells: int, kv_type: KVType) -> None:
        if kv_type is KVType.Q8_0 and not self.flash_attention:
            raise UnsupportedModelError("a q8_0 KV cache needs flash attention: use --flash-attn on or --kv-type f16")
        context = self.context(2 * len(layouts))
        for layout in layouts:
            pair = []
            for dim in (layout.k_dim,) if layout.values_in_keys else (layout.k_dim, layout.v_dim):
                if kv_type is KVType.Q8_0 and dim % 32:
                    raise UnsupportedModelError(f"a q8_0 KV cache needs heads of a multiple of 32, not {dim}")
                tensor = ggml.ggml_new_tensor_2d(context, KV_TYPES[kv_type], layout.num_heads * dim, cells)
                memory = self._allocate(cells * kv_type.row_bytes(layout.num_heads * dim))
                tensor.contents.data = memory.address
                pair.append(tensor)
            self._kv[layout.layer] = (pair[0], pair[-1])

    def allocate_states(self, layouts: Sequence[RecurrentLayout], slots: int) -> None:
        for layout in layouts:
            conv, matrix = (self._allocate(4 * slots * math.prod(s)) for s in (layout.conv_shape, layout.matrix_shape))
            self._states[layout.layer] = conv.address, matrix.address

    def allocate_buffer(self, name: str, shape: Sequence[int], dtype: Any, access: HostAccess) -> None:
        memory = self._allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._buffers[name] = memory.array.view(dtype)[: int(np.prod(shape))].reshape(shape)

    def shared_scratch(self, name: str, variant: int, nbytes: int) -> int:
        """Address of at least `nbytes` that kernels of one (name, variant) share, since they run one after another."""
        memory = self._shared.get((name, variant))
        if memory is None or memory.nbytes < nbytes:
            memory = self._shared[name, variant] = self._allocate(nbytes)
        return memory.address

    def _allocate(self, nbytes: int) -> Memory:
        memory = Memory(align(nbytes))
        self._memory.append(memory)
        return memory

    def context(self, tensors: int, more_bytes: int = 0) -> Any:
        """A ggml context with room for `tensors` descriptions, freed with the backend."""
        size = (tensors + 1) * ggml.ggml_tensor_overhead() + more_bytes
        context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
        self._contexts.append(context)
        return context

    # -- what a graph asks for --------------------------------------------------------------------------------------

    def weight(self, name: str) -> GgmlTensor:
        """The dense weight `name`."""
        return find_weight(self._weights, name)

    def kv(self, layer: int) -> tuple[Any, Any]:
        """The K and V tensors of a layer, [cells, heads * dim] each; one and the same where values lie in keys."""
        return self._kv[layer]

    def states(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's convolution states and recurrent states, by slot."""
        return self._states[layer]

    def address(self, name: str) -> int:
        """Address of a persistent buffer."""
        return int(self._buffers[name].ctypes.data)

    def buffer_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a persistent buffer."""
        return self._buffers[name].shape

    # -- running ------------------------------------------------------------------------------------------------------

    def host(self, name: str) -> NDArray[Any]:
        return self._buffers[name]

    def begin_batch(self, rows: int, mask: Mask, outputs: int, more_masks: Mapping[str, Mask] = NO_MASKS) -> None:
        self.rows, self.n_kv, self.outputs = rows, mask.shape[1], outputs
        for name, values in {"mask": mask, **more_masks}.items():
            self._buffers[name][: values.size] = values.reshape(-1)

    def compile(self, name: str, build: Callable[[base.Graph], None]) -> GgmlSegment:
        segment = self._segments.find(name, self._shape)
        return self._build(name, build) if segment is None else segment

    @property
    def _shape(self) -> BatchShape:
        return BatchShape(self.rows, self.n_kv, self.outputs)

    def _build(self, name: str, build: Callable[[base.Graph], None]) -> GgmlSegment:
        graph = GgmlGraph(self)
        try:
            build(graph)
        except BaseException:
            ggml.ggml_free(graph.ctx)
            raise
        if not ggml.ggml_gallocr_alloc_graph(self._allocator, graph.graph):
            ggml.ggml_free(graph.ctx)
            raise CapacityError("no memory for the scratch area of a forward: lower --chunk or --ctx")
        scratch = ggml.ggml_gallocr_get_buffer_size(self._allocator, 0)
        if scratch > self._scratch_bytes:
            self._scratch_bytes = scratch
            self._segments.clear()
        segment = GgmlSegment(graph, self.plan(graph.graph))
        self._segments.keep(name, self._shape, segment, uses_kv=graph.uses_kv, uses_outputs=graph.uses_outputs)
        return segment

    def plan(self, graph: Any) -> GraphPlan:
        """A graph made ready to run; all work in one place, since they run one after another."""
        return GraphPlan(graph, self.threads, partial(self.shared_scratch, "work", 0))

    def expert_kernel(self, tower: ExpertTower, shape: ExpertShape) -> GgmlExpertKernel:
        return GgmlExpertKernel(self, tower, shape)

    def close(self) -> None:
        self._segments.clear()
        for context in self._contexts:
            ggml.ggml_free(context)
        self._contexts.clear()
        if self._allocator:
            ggml.ggml_gallocr_free(self._allocator)
            self._allocator = None
        self._weights.clear()
        self._kv.clear()
        self._buffers.clear()
        self._memory.clear()
