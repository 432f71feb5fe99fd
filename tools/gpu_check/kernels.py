"""Every kernel against the reference operators, through the graph that models use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from expertserve.experts.batch import SlotBatch
from expertserve.experts.device_store import DeviceExpertSlotStore
from expertserve.gguf.file import TensorInfo, TensorType
from expertserve.gguf.spans import ExpertTower
from expertserve.ops.base import (
    Activation,
    Backend,
    DeltaLayout,
    ExpertShape,
    Graph,
    HostAccess,
    KVLayout,
    KVType,
    RecurrentLayout,
    Rope,
    RopeStyle,
    ScanLayout,
    Tensor,
)
from expertserve.ops.cuda.backend import CudaBackend
from expertserve.ops.cuda.device import Device
from expertserve.ops.cuda.source import FORMATS, kernel_names
from expertserve.ops.reference import ReferenceBackend, activate
from tools.gpu_check.report import Report
from tools.gpu_check.weights import PLAIN, make_weight

TOLERANCE = 5e-5
Weights = Mapping[str, tuple[str, NDArray[np.uint8], tuple[int, ...]]]
"""By name: format, raw bytes, shape."""
N_KV = 300


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@dataclass
class World:
    """What a graph computes with: `x` [rows, ..], weights, KV cache or states; `more` replaces the batch's buffers."""

    x: NDArray[np.float32]
    weights: Weights = field(default_factory=dict)
    kv: KVLayout | None = None
    states: RecurrentLayout | None = None
    kv_type: KVType = KVType.F32
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def run(self, backend: Backend, build: Callable[[Graph], Tensor]) -> NDArray[np.float32]:
        """The value that `build` describes."""
        rows = len(self.x)
        infos = [TensorInfo(n, s, TensorType[f], 0, 0, raw.nbytes) for n, (f, raw, s) in self.weights.items()]
        backend.load_weights(infos, self._read, lambda nbytes: None)
        if self.kv is not None:
            backend.allocate_kv([self.kv], N_KV, self.kv_type)
        if self.states is not None:
            backend.allocate_states([self.states], 3)
        cells = np.random.default_rng(1).permutation(N_KV)[:rows]
        mask = np.full((rows, N_KV), -np.inf, np.float16)
        for row in range(rows):
            mask[row, cells[: row + 1]] = 0
        half = rows // 2
        given: dict[str, NDArray[Any]] = {
            "x": self.x,
            "cells": cells,
            "tokens": np.arange(rows, dtype=np.int32) % 5,
            "positions": 37 * np.arange(rows, dtype=np.int32),
            "mask": np.zeros(rows * N_KV, np.float16),
            "runs": np.array([[-1, 0, 0, half], [0, 1, half, rows]] + [[0, 0, 0, 0]] * (rows - 2), np.int32)[:rows],
            "num_runs": np.array([min(2, rows)], np.int32),
            **self.more,
        }
        for name, values in given.items():
            backend.allocate_buffer(name, values.shape, values.dtype, HostAccess.WRITES)
            backend.host(name)[...] = values

        def build_and_store(g: Graph) -> None:
            out = build(g)
            backend.allocate_buffer("out", out.shape, np.float32, HostAccess.READS)
            g.store("out", out)

        backend.begin_batch(rows, mask, rows)
        backend.compile("case", build_and_store).run()
        found: NDArray[np.float32] = backend.host("out").copy()
        backend.close()
        return found

    def _read(self, name: str, target: memoryview) -> None:
        target[:] = self.weights[name][1].reshape(-1).data

    def agrees(
        self, device: Device, build: Callable[[Graph], Tensor], tolerance: float = TOLERANCE
    ) -> tuple[bool, str]:
        """Whether the device's answer is the reference's, with the largest error in parts of the largest value."""
        got, want = self.run(CudaBackend(device), build), self.run(ReferenceBackend(), build)
        error = float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
        return bool(np.isfinite(got).all() and error <= tolerance), f"error {error:.1e}"


def as_f32(array: NDArray[np.float32]) -> tuple[str, NDArray[np.uint8], tuple[int, ...]]:
    return "F32", np.ascontiguousarray(array).view(np.uint8), array.shape


def experts_agree(device: Device, fmt: str, *, weigh_inputs: bool = False) -> tuple[bool, str]:
    """Routed experts of a format in slots, three of four in two calls; weights multiply what comes out or goes in."""
    n = max(256, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt]][0])
    rows, top_k, chosen = 5, 2, (3, 0, 2)
    parts = {role: [make_weight(fmt, n, n, seed=7 * e + i) for e in range(4)] for i, role in enumerate("gud")}
    nbytes = parts["g"][0][0].nbytes
    infos = [TensorInfo(name, (4, n, n), TensorType[fmt], 0, 0, 4 * nbytes) for name in ("gate", "up", "down")]
    tower = ExpertTower(-1, 0, 4, tuple(infos), ("gate", "up", "down"))
    backend, x = CudaBackend(device), random(rows, n)
    backend.load_weights([], lambda name, target: None, lambda done: None)
    for name, shape, access in (
        ("ffn_input", (rows, n), HostAccess.WRITES),
        ("expert_weights", (rows, top_k), HostAccess.WRITES),
        ("expert_out", (rows * top_k, n), HostAccess.NONE),
        ("mask", (rows,), HostAccess.WRITES),
        ("combined", (rows, n), HostAccess.READS),
    ):
        backend.allocate_buffer(name, shape, np.float16 if name == "mask" else np.float32, access)
    backend.host("ffn_input")[...] = x
    weights = backend.host("expert_weights")
    weights[...] = np.abs(random(rows, top_k, seed=9))
    ids = np.array([[3, 0], [0, 2], [3, 2], [2, 0], [3, 0]])
    room = -(-nbytes // 256) * 256
    store = DeviceExpertSlotStore(device, 4, 3 * room)
    kernel = backend.expert_kernel(tower, ExpertShape(n, n, top_k, Activation.SILU, weigh_inputs=weigh_inputs))
    backend.begin_batch(rows, np.zeros((rows, 1), np.float16), rows)
    kernel.begin(rows)
    want = np.zeros((rows, n), np.float32)
    for e in chosen:
        slot = bytearray(3 * room)
        for i, role in enumerate("gud"):
            slot[i * room : i * room + nbytes] = parts[role][e][0].tobytes()
        store.write_slot(e, slot)
        at = store.slot_for_read(e).pointer
        pairs = np.flatnonzero(ids.ravel() == e).astype(np.int32)
        slices = tuple(np.array([at + i * room], np.uint64) for i in range(3))
        kernel(SlotBatch(slices, np.array([0, len(pairs)], np.int32), pairs, 0, np.array([e], np.int32)))
        gate, up, down = (parts[role][e][1] for role in "gud")
        for pair in pairs:
            row, j = divmod(int(pair), top_k)
            before, after = (weights[row, j], 1) if weigh_inputs else (1, weights[row, j])
            h = activate(before * (x[row] @ gate.T), before * (x[row] @ up.T), Activation.SILU)
            want[row] += after * (h @ down.T)

    def combine(g: Graph) -> None:
        g.store("combined", g.combine_experts(n, top_k, weighted=not weigh_inputs))

    backend.compile("combine", combine).run()
    got = backend.host("combined").copy()
    store.close()
    backend.close()
    error = float(np.abs(got - want).max() / np.abs(want).max())
    return error <= 2e-4, f"error {error:.1e}"


def check_kernels(device: Device, report: Report) -> None:
    """All of them, compiled at once."""
    device.load_kernels(kernel_names(FORMATS))
    for fmt in FORMATS:
        n = 301 if fmt in PLAIN else 3 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt]][0]
        w = {"w": (fmt, make_weight(fmt, 13, n)[0], (13, n)), "b": as_f32(random(13))}
        for rows in (1, 5, 40):
            report.check(f"product {fmt}, {rows} rows", World(random(rows, n), w).agrees, device, _product)
        report.check(f"embedding {fmt}", World(random(3, 1), w).agrees, device, lambda g: g.embed("w"))
        report.check(f"routed experts {fmt}", experts_agree, device, fmt)
    report.check("routed experts, weights of inputs", partial(experts_agree, weigh_inputs=True), device, "F16")
    w = {"w": as_f32(random(130)), "heads": as_f32(random(4, 24, 32))}
    report.check("norms and values", World(random(5, 130), w).agrees, device, _pointwise)
    report.check("products by head", World(random(5, 4, 32), w).agrees, device, _by_head)
    for style in RopeStyle:
        rope = Rope(64, style, 1e6, 0.25, 32768, 1.0)
        report.check(f"rope {style.name}", World(random(40, 3, 80)).agrees, device, partial(_turn, rope=rope))
    for kv_type, tolerance in ((KVType.F16, 2e-3), (KVType.F32, TOLERANCE)):
        for k_dim, v_dim in ((64, 64), (128, 128), (256, 256), (576, 512)):
            kv = KVLayout(0, 2 if k_dim < 512 else 1, k_dim, v_dim, values_in_keys=k_dim != v_dim)
            for rows in (1, 5, 40):
                world = World(random(rows, 6 * k_dim), kv=kv, kv_type=kv_type)
                what = f"attention {kv_type}, heads of {k_dim} and {v_dim}, {rows} rows"
                report.check(what, world.agrees, device, partial(_attend, kv=kv), tolerance)
    kv = KVLayout(0, 2, 128, 128)
    for rows in (1, 40):
        world = World(random(rows, 6 * 128), kv=kv, kv_type=KVType.F32)
        report.check(
            f"attention with a softcap, {rows} rows", world.agrees, device, partial(_attend, kv=kv, softcap=0.5)
        )
    for key_dim, value_dim, grouped in ((128, 128, True), (24, 40, False)):
        layout = DeltaLayout(0, 4, 2, 4, key_dim, value_dim, grouped)
        w = {
            "conv": as_f32(random(layout.channels, 4)),
            "a": as_f32(-np.abs(random(4))),
            "ab": as_f32(random(8, layout.channels) / math.sqrt(layout.channels)),
        }
        world = World(random(9, layout.channels), w, states=layout)
        report.check(f"recurrence {key_dim} x {value_dim}", world.agrees, device, partial(_recur, layout=layout))
    scanned = ScanLayout(0, 4, 4, 2, 64, 128)
    w = {
        "conv": as_f32(random(scanned.channels, 4)),
        "a": as_f32(-np.abs(random(4, 1))),
        "d": as_f32(random(4, 1)),
        "dt": as_f32(random(4, scanned.channels) / math.sqrt(scanned.channels)),
    }
    world = World(random(9, scanned.channels), w, states=scanned)
    report.check("selective scan", world.agrees, device, partial(_scan, layout=scanned))


def _by_head(g: Graph) -> Tensor:
    return g.head_linear(g.load("x"), "heads")


def _turn(g: Graph, rope: Rope) -> Tensor:
    return g.rope(g.load("x"), rope)


def _product(g: Graph) -> Tensor:
    return g.linear(g.load("x"), "w", "b")


def _pointwise(g: Graph) -> Tensor:
    x = g.load("x")
    y = g.mul(g.add(g.scale(g.silu(g.add_weight(x, "w")), 0.5), x), g.sigmoid(g.part(x, 3, 4)))
    y = g.tanh(g.clamp(g.layer_norm(g.mul_weight(y, "w"), "w", 1e-5), 0.7))
    y = g.gated(g.rms_norm(y, "w", 1e-5), g.rms_norm(x, None, 1e-5), Activation.SILU)
    return g.concat(y, g.part(x, 1, 8))


def _attend(g: Graph, kv: KVLayout, softcap: float = 0.0) -> Tensor:
    rows = g.rows
    q = g.reshape(g.load("x"), (rows, 6, kv.k_dim))
    k = g.reshape(g.part(g.load("x"), 0, kv.num_heads * kv.k_dim), (rows, kv.num_heads, kv.k_dim))
    return g.attention(q, k, None if kv.values_in_keys else k, kv, kv.k_dim**-0.5, softcap=softcap)


def _recur(g: Graph, layout: DeltaLayout) -> Tensor:
    x = g.load("x")
    ab = g.linear(x, "ab")
    qkv = g.silu(g.causal_conv(x, "conv", layout))
    return g.gated_delta(qkv, g.part(ab, 0, 4), g.part(ab, 4, 8), "a", layout, 1e-6)


def _scan(g: Graph, layout: ScanLayout) -> Tensor:
    x = g.load("x")
    return g.selective_scan(g.silu(g.causal_conv(x, "conv", layout)), g.linear(x, "dt"), "a", "d", layout)
