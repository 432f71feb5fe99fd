"""The CUDA backend: our kernels and cuBLAS on one GPU.

Owns dense weights, KV cache, recurrent states, persistent buffers and compiled segments, all in device memory. A
segment is compiled once for each shape it meets. The host waits for the device in one place, after a segment that
leaves something for the host to read; everything else is only queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.ops import base
from expertserve.ops.base import (
    NO_MASKS,
    ExpertShape,
    HostAccess,
    KVLayout,
    KVType,
    Mask,
    ReadTensor,
    RecurrentLayout,
    Rope,
)
from expertserve.ops.checks import find_weight, require
from expertserve.ops.cuda.device import Device, DeviceMemory, Download, Upload, Zero
from expertserve.ops.cuda.experts import CallStaging, CudaExpertKernel, staging_bytes
from expertserve.ops.cuda.graph import MANY_ROWS, CudaGraph, cell_of
from expertserve.ops.cuda.scratch import place
from expertserve.ops.cuda.source import FORMATS, PLAIN_KERNELS, cell_kernels, dense_kernels
from expertserve.ops.rope import rope_frequencies
from expertserve.ops.segments import BatchShape, SegmentCache

ALIGNMENT = 256
LEAST_WORKSPACE_BYTES = 768 << 20
"""What the backend leaves of the device for buffers, values between kernels, weights written out and the driver."""
WORKSPACE_SHARE = 0.04


def workspace_bytes(free: int) -> int:
    """How many of a device's free bytes models and slots must leave."""
    return max(LEAST_WORKSPACE_BYTES, int(free * WORKSPACE_SHARE))


@dataclass(frozen=True, slots=True)
class Weight:
    """A dense weight on the device.

    Attributes:
        format: GGUF tensor type.
        row_bytes: bytes of one row of the last axis.
    """

    address: int
    shape: tuple[int, ...]
    format: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A persistent buffer: device bytes, and a page-locked host array where the host has to do with it."""

    address: int
    shape: tuple[int, ...]
    access: HostAccess
    mirror: NDArray[Any] | None


class CudaSegment(base.Segment):
    """Commands made ready, and whether the host has to wait for them."""

    def __init__(self, backend: CudaBackend, start: Callable[[], None], *, waits: bool) -> None:
        self._backend, self._start, self._waits = backend, start, waits

    def run(self) -> None:
        self._start()
        if self._waits:
            self._backend.device.compute.synchronize()


class CudaBackend(base.Backend):
    """One GPU."""

    other_widths = (MANY_ROWS - 1,)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows = self.n_kv = self.outputs = 0
        self.kv_type = KVType.F16
        self._memory: list[DeviceMemory] = []
        self._weights: dict[str, Weight] = {}
        self._buffers: dict[str, Buffer] = {}
        self._kv: dict[int, tuple[int, int]] = {}
        self._states: dict[int, tuple[int, int]] = {}
        self._frequencies: dict[Rope, tuple[np.uint64, float]] = {}
        self._scratch: DeviceMemory | None = None
        self._shared: dict[str, DeviceMemory] = {}
        self._staging: CallStaging | None = None
        self._segments: SegmentCache[CudaSegment] = SegmentCache(lambda segment: None)

    # -- set-up -----------------------------------------------------------------------------------------------------

    def check(self, infos: Iterable[TensorInfo], towers: Iterable[ExpertTower]) -> None:
        for info in (*infos, *(part for tower in towers for part in tower.slices)):
            if info.type.name not in FORMATS:
                raise UnsupportedModelError(f"{info.name}: tensor type {info.type.name} has no kernel on this device")

    def memory(self) -> tuple[int, int]:
        free = self.device.free_bytes()
        return free, workspace_bytes(free)

    def load_weights(self, infos: Sequence[TensorInfo], read: ReadTensor, progress: Callable[[int], None]) -> None:
        formats = {info.type.name for info in infos}
        self.device.load_kernels(
            [*PLAIN_KERNELS, *(k for fmt in sorted(formats | {"F32"}) for k in dense_kernels(fmt))]
        )
        memory = self._allocate(sum(_aligned(info.nbytes) for info in infos), "dense weights")
        staging = np.empty(max((info.nbytes for info in infos), default=0), np.uint8)
        address = memory.address
        for info in infos:
            part = staging[: info.nbytes]
            read(info.name, part.data)
            self.device.compute.run(Upload(address, part))
            self.device.compute.synchronize()
            self._weights[info.name] = Weight(address, info.shape, info.type.name, info.row_bytes)
            address += _aligned(info.nbytes)
            progress(info.nbytes)

    def allocate_kv(self, layouts: Sequence[KVLayout], cells: int, kv_type: KVType) -> None:
        self.device.load_kernels(cell_kernels(cell_of(kv_type)))
        self.kv_type = kv_type
        for layout in layouts:
            dims = (layout.k_dim,) if layout.values_in_keys else (layout.k_dim, layout.v_dim)
            parts = [
                self._allocate(cells * kv_type.row_bytes(layout.num_heads * dim), "the KV cache (lower --ctx)").address
                for dim in dims
            ]
            self._kv[layout.layer] = parts[0], parts[-1]

    def allocate_states(self, layouts: Sequence[RecurrentLayout], slots: int) -> None:
        for layout in layouts:
            conv, matrix = (
                self._allocate(4 * slots * math.prod(shape), "recurrent states (lower --parallel)").address
                for shape in (layout.conv_shape, layout.matrix_shape)
            )
            self._states[layout.layer] = conv, matrix

    def allocate_buffer(self, name: str, shape: Sequence[int], dtype: Any, access: HostAccess) -> None:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._allocate(nbytes, "buffers (lower --chunk)")
        self.device.compute.run(Zero(memory.address, nbytes))
        mirror = None
        if access is not HostAccess.NONE:
            mirror = self.device.allocate_pinned(nbytes, f"the buffer {name}").view(dtype).reshape(shape)
            mirror[...] = 0
        self._buffers[name] = Buffer(memory.address, tuple(shape), access, mirror)

    def _allocate(self, nbytes: int, what: str) -> DeviceMemory:
        memory = self.device.allocate(nbytes, what)
        self.own(memory)
        return memory

    # -- what a graph asks for --------------------------------------------------------------------------------------

    def weight(self, name: str) -> Weight:
        """The dense weight `name`."""
        return find_weight(self._weights, name)

    def kv(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's K and V, [cells, heads, dim]; one and the same where values lie in keys."""
        return self._kv[layer]

    def states(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's convolution states and recurrent states, by slot."""
        return self._states[layer]

    def address(self, name: str) -> int:
        """Where a persistent buffer lies on the device."""
        return self._buffers[name].address

    def access(self, name: str) -> HostAccess:
        """What the host does with a persistent buffer."""
        return self._buffers[name].access

    def buffer_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a persistent buffer."""
        return self._buffers[name].shape

    def own(self, memory: DeviceMemory) -> None:
        """Frees `memory` with the backend."""
        self._memory.append(memory)

    def shared(self, name: str, nbytes: int) -> int:
        """Address of at least `nbytes` that kernels share, since they run one after another."""
        memory = self._shared.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._shared[name] = self._allocate(nbytes, "values between kernels (lower --chunk)")
        return memory.address

    def call_staging(self, num_experts: int, pairs: int) -> CallStaging:
        """What the calls of expert kernels send through; one for all, since one layer runs at a time."""
        if self._staging is None:
            self._staging = CallStaging(self, staging_bytes(num_experts, pairs))
        return self._staging

    def frequencies(self, rope: Rope) -> tuple[np.uint64, float]:
        """Where the frequencies of a rotation lie, float64 [dims / 2], and its magnitude."""
        if rope not in self._frequencies:
            factors = None if rope.freq_factors is None else self._host_vector(rope.freq_factors, rope.dims // 2)
            values, magnitude = rope_frequencies(rope, factors)
            memory = self._allocate(values.nbytes, "rotation frequencies")
            self.device.compute.run(Upload(memory.address, values))
            self.device.compute.synchronize()
            self._frequencies[rope] = np.uint64(memory.address), magnitude
        return self._frequencies[rope]

    def _host_vector(self, name: str, n: int) -> NDArray[np.float32]:
        """A float32 weight [n], brought back from the device."""
        weight = self.weight(name)
        require(weight.shape == (n,) and weight.format == "F32", f"{name} is no F32 vector of {n}")
        values = np.empty(n, np.float32)
        self.device.compute.run(Download(values, weight.address))
        self.device.compute.synchronize()
        return values

    # -- running ----------------------------------------------------------------------------------------------------

    def host(self, name: str) -> NDArray[Any]:
        mirror = self._buffers[name].mirror
        assert mirror is not None, f"the host has nothing to do with {name}"
        return mirror

    def begin_batch(self, rows: int, mask: Mask, outputs: int, more_masks: Mapping[str, Mask] = NO_MASKS) -> None:
        self.rows, self.n_kv, self.outputs = rows, mask.shape[1], outputs
        masks = {"mask": mask, **more_masks}
        for name, values in masks.items():
            self.host(name)[: values.size] = values.reshape(-1)
        for name, buffer in self._buffers.items():
            if buffer.access is HostAccess.WRITES and name != "expert_weights":
                assert buffer.mirror is not None
                used = buffer.mirror[: mask.size if name in masks else rows]
                self.device.compute.run(Upload(buffer.address, used))

    def compile(self, name: str, build: Callable[[base.Graph], None]) -> CudaSegment:
        segment = self._segments.find(name, self._shape)
        return self._build(name, build) if segment is None else segment

    @property
    def _shape(self) -> BatchShape:
        return BatchShape(self.rows, self.n_kv, self.outputs)

    def _build(self, name: str, build: Callable[[base.Graph], None]) -> CudaSegment:
        graph = CudaGraph(self)
        build(graph)
        offsets, area = place([value for value in graph.values if value.address is None])
        start = self._area(area)
        commands = graph.finish(lambda value: start + offsets[value])
        segment = CudaSegment(self, self.device.compute.prepare(commands), waits=graph.downloads)
        self._segments.keep(name, self._shape, segment, uses_kv=graph.uses_kv, uses_outputs=graph.uses_outputs)
        return segment

    def _area(self, nbytes: int) -> int:
        """The address of the values' area; where it has to grow, segments compiled before are dropped."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._segments.clear()
            if self._scratch is not None:
                self.device.compute.synchronize()
                self._scratch.free()
                self._scratch = None  # a refusal below must not leave an address that is gone
            self._scratch = self.device.allocate(nbytes, "values between kernels (lower --chunk)")
        return self._scratch.address

    def expert_kernel(self, tower: ExpertTower, shape: ExpertShape) -> CudaExpertKernel:
        return CudaExpertKernel(self, tower, shape)

    def close(self) -> None:
        self.device.compute.synchronize()
        self._segments.clear()
        for memory in (*self._memory, *([] if self._scratch is None else [self._scratch])):
            memory.free()
        self._memory.clear()
        self._scratch = None
        self._weights.clear()
        self._kv.clear()
        self._buffers.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
