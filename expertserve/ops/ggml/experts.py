"""Routed experts on the CPU: our kernels of kernels.c inside a graph of four custom operators.

The graph is built once; a call fills one structure with addresses and counts and runs it. The kernel reads experts
where they lie in their slots and writes rows of the buffer `expert_out`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from expertserve.gguf.spans import ExpertTower
from expertserve.ops import base
from expertserve.ops.base import Activation, ExpertShape
from expertserve.ops.checks import require
from expertserve.ops.expert_parts import ExpertParts
from expertserve.ops.ggml.library import (
    ExpertCall,
    Matrix,
    column_bytes,
    function_address,
    ggml,
    kernel,
    matrix,
    tile_scratch_bytes,
)

if TYPE_CHECKING:
    from expertserve.experts.batch import SlotBatch
    from expertserve.ops.ggml.backend import GgmlBackend
    from expertserve.ops.ggml.plan import GraphPlan

STAGES = tuple(kernel(name) for name in ("expert_input", "expert_gate_up", "expert_activation", "expert_down"))
GATED = {
    Activation.SILU: "ggml_vec_swiglu_f32",
    Activation.GELU: "gated_gelu",
    Activation.SWIGLU_OAI: "gated_swiglu_oai",
    Activation.RELU: "gated_relu",
}


class GgmlExpertKernel(base.ExpertKernel):
    """Experts of one slot layout: weight types and shapes are those of `tower`."""

    def __init__(self, backend: GgmlBackend, tower: ExpertTower, shape: ExpertShape) -> None:
        self._parts = parts = ExpertParts.of(tower, shape)
        gate_m, up_m = matrix(int(parts.gate.type), shape.hidden), matrix(int(parts.up.type), shape.hidden)
        down_m = matrix(int(parts.down.type), shape.ffn)
        rows = backend.buffer_shape("ffn_input")[0]
        pairs = rows * shape.top_k
        x = backend.address("ffn_input")

        def converted(m: Matrix) -> int:
            return backend.shared_scratch("expert_x", m.quantize or 0, rows * m.input_row_bytes) if m.quantize else x

        def columns(m: Matrix) -> int | None:
            if not m.tile.unpack:
                return None
            return backend.shared_scratch("expert_columns", m.column_format, rows * column_bytes(shape.hidden))

        scratch_bytes = tile_scratch_bytes(max(shape.hidden, shape.ffn))
        self._call = ExpertCall(
            top_k=shape.top_k,
            hidden=shape.hidden,
            ffn=shape.ffn,
            limit=shape.limit,
            gate_m=gate_m,
            up_m=up_m,
            down_m=down_m,
            gated=function_address(GATED[shape.activation]),
            **_biases(backend, tower, shape),
            input_weights=backend.address("expert_weights") if shape.weigh_inputs else None,
            x=x,
            y=backend.address("expert_out"),
            x_gate=converted(gate_m),
            x_up=converted(up_m),
            gate_columns=columns(gate_m),
            up_columns=columns(up_m),
            gate_up=backend.shared_scratch("expert_gate_up", 0, pairs * 2 * shape.ffn * 4),
            h=backend.shared_scratch("expert_h", 0, pairs * down_m.input_row_bytes),
            down_columns=backend.shared_scratch("expert_down_columns", 0, pairs * column_bytes(shape.ffn)),
            scratch=backend.shared_scratch("tiles", 0, backend.threads * scratch_bytes),
            scratch_bytes=scratch_bytes,
        )
        self._plan = self._build(backend)

    def _build(self, backend: GgmlBackend) -> GraphPlan:
        nodes = len(STAGES)
        context = backend.context(2 * nodes, ggml.ggml_graph_overhead_custom(2 * nodes, False))
        graph = ggml.ggml_new_graph_custom(context, 2 * nodes, False)
        unused_output = backend.shared_scratch("expert_unused", 0, 64)
        for stage in STAGES:
            user = ctypes.addressof(self._call)
            node = ggml.ggml_custom_4d(context, ggml.GGML_TYPE_F32, 1, 1, 1, 1, None, 0, stage, -1, user)
            node.contents.data = unused_output
            ggml.ggml_build_forward_expand(graph, node)
        return backend.plan(graph)

    def begin(self, rows: int) -> None:
        self._call.num_rows = rows
        self._call.input_is_new = 1

    def __call__(self, batch: SlotBatch) -> None:
        call = self._call
        gate, up, down = self._parts.addresses(batch)
        call.num_groups = gate.size
        call.num_pairs = batch.pairs.size
        call.gate = gate.ctypes.data
        call.up = up.ctypes.data
        call.down = down.ctypes.data
        call.experts = batch.experts.ctypes.data
        call.group_start = batch.group_start.ctypes.data
        call.pairs = batch.pairs.ctypes.data
        self._plan.run()
        call.input_is_new = 0


def _biases(backend: GgmlBackend, tower: ExpertTower, shape: ExpertShape) -> dict[str, int]:
    """Where the experts' biases lie, as the call has them."""
    address = {}
    for role, name in shape.biases.items():
        bias, outputs = backend.weight(name), tower.slices[tower.roles.index(role)].shape[1]
        require(
            bias.shape == (tower.num_experts, outputs) and bias.ptr.contents.type == ggml.GGML_TYPE_F32,
            f"{name} has shape {list(bias.shape)}, expected F32 {[tower.num_experts, outputs]}",
        )
        address[role] = int(bias.ptr.contents.data)
    if "gate_up" in address:
        address["gate"] = address["gate_up"]
        address["up"] = address.pop("gate_up") + 4 * shape.ffn
    stride = shape.ffn * (2 if "gate_up" in shape.biases else 1)
    return {f"{role}_bias": where for role, where in address.items()} | {"outer_bias_stride": stride}
