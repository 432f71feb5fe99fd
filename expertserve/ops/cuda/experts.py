"""The routed feed-forward on the device: experts are read where they lie in their slots.

Owns the way of a call's addresses and pairs to the device: they are laid side by side in one page-locked block and go
over in one copy. Invariant: what was laid out for a call stays until the device has passed it, which the host knows
when a layer begins, since it has waited for the router's logits by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.spans import ExpertTower
from expertserve.ops import base
from expertserve.ops.base import ExpertShape
from expertserve.ops.checks import require
from expertserve.ops.cuda.device import Event, Launch, Upload
from expertserve.ops.cuda.graph import blocks
from expertserve.ops.cuda.source import GATED_OF, PAIR, WARPS, expert_kernels
from expertserve.ops.expert_parts import ExpertParts

if TYPE_CHECKING:
    from expertserve.experts.batch import SlotBatch
    from expertserve.ops.cuda.backend import CudaBackend

_ALIGN = 16


class CallStaging:
    """Page-locked bytes for the calls of one layer, and their place on the device."""

    def __init__(self, backend: CudaBackend, nbytes: int) -> None:
        self._stream = backend.device.compute
        self._memory = backend.device.allocate(nbytes, "expert calls (lower --chunk)")
        backend.own(self._memory)
        self._host = backend.device.allocate_pinned(nbytes, "expert calls (lower --chunk)")
        self._used = 0

    def reset(self) -> None:
        """The device has passed everything that was sent."""
        self._used = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[np.uint64]:
        """Queues one copy of arrays; returns where each lies on the device."""
        begin, places = self._used, []
        for array in arrays:
            self._host[self._used : self._used + array.nbytes] = array.view(np.uint8)
            places.append(np.uint64(self._memory.address + self._used))
            self._used += -(-array.nbytes // _ALIGN) * _ALIGN
        self._stream.run(Upload(self._memory.address + begin, self._host[begin : self._used]))
        return places


class CudaExpertKernel(base.ExpertKernel):
    """Two kernels a call: gate, up and activation; down."""

    def __init__(self, backend: CudaBackend, tower: ExpertTower, shape: ExpertShape) -> None:
        self._parts = parts = ExpertParts.of(tower, shape)
        self._backend, self._shape = backend, shape
        self._names = expert_kernels(parts.gate.type.name, parts.up.type.name, parts.down.type.name)
        backend.device.load_kernels(self._names)
        self._x, self._y = (np.uint64(backend.address(name)) for name in ("ffn_input", "expert_out"))
        pairs = backend.buffer_shape("expert_out")[0]
        self._h = np.uint64(backend.shared("expert_h", 4 * pairs * shape.ffn))
        self._biases = _biases(backend, tower, shape)
        self._input_weights = np.uint64(backend.address("expert_weights") if shape.weigh_inputs else 0)
        self._staging = backend.call_staging(tower.num_experts, pairs)

    def begin(self, rows: int) -> None:
        self._staging.reset()
        weights = self._backend.host("expert_weights")[:rows]
        self._backend.device.compute.run(Upload(self._backend.address("expert_weights"), weights))

    def __call__(self, batch: SlotBatch) -> Event:
        shape, stream = self._shape, self._backend.device.compute
        gate, up, down = self._parts.addresses(batch)
        arrays = (gate, up, down, batch.experts, batch.group_start, batch.pairs)
        gate_at, up_at, down_at, *groups = self._staging.send(arrays)
        hidden, ffn, top_k = np.int32(shape.hidden), np.int32(shape.ffn), np.int32(shape.top_k)
        stride = np.int32(ffn * (2 if "gate_up" in shape.biases else 1))
        *outer, last = self._biases
        kind = np.int32(GATED_OF[shape.activation])
        first: tuple[np.generic, ...] = (
            gate_at,
            up_at,
            *groups,
            *outer,
            self._input_weights,
            self._x,
            self._h,
            hidden,
            ffn,
            top_k,
            stride,
            kind,
            np.float32(shape.limit),
        )
        second: tuple[np.generic, ...] = (down_at, *groups, last, self._h, self._y, hidden, ffn)
        widths = blocks(shape.ffn, WARPS), blocks(shape.hidden, PAIR * WARPS)
        for name, width, args in zip(self._names, widths, (first, second), strict=True):
            stream.run(Launch(name, (width, gate.size, 1), args))
        return stream.record()


def staging_bytes(num_experts: int, pairs: int) -> int:
    """Most bytes that the calls of one layer send: every expert in a call of its own."""
    return num_experts * (3 * (8 + _ALIGN) + 3 * (4 + _ALIGN)) + num_experts * 4 + 4 * pairs + 6 * _ALIGN


def _biases(backend: CudaBackend, tower: ExpertTower, shape: ExpertShape) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Addresses of the biases of gate, up and down; null where there is none."""
    address = dict.fromkeys(("gate", "up", "down"), np.uint64(0))
    for role, name in shape.biases.items():
        bias, wanted = backend.weight(name), (tower.num_experts, tower.slices[tower.roles.index(role)].shape[1])
        require(bias.shape == wanted and bias.format == "F32", f"{name} has shape {list(bias.shape)}")
        if role == "gate_up":
            address["gate"], address["up"] = np.uint64(bias.address), np.uint64(bias.address + 4 * shape.ffn)
        else:
            address[role] = np.uint64(bias.address)
    return address["gate"], address["up"], address["down"]
