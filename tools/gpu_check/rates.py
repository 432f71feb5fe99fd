"""Rates of a real GPU, timed by its events: bandwidths, the expert kernels, products, copies to slots."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from time import perf_counter

import numpy as np

from expertserve.experts.batch import SlotBatch
from expertserve.experts.device_store import DeviceExpertSlotStore
from expertserve.gguf.file import TensorInfo, TensorType
from expertserve.gguf.spans import ExpertTower
from expertserve.ops.base import Activation, ExpertShape, HostAccess
from expertserve.ops.cuda.backend import CudaBackend
from expertserve.ops.cuda.device import Device, Launch, Upload
from expertserve.ops.cuda.graph import blocks
from expertserve.ops.cuda.source import GATED_OF, PAIR, TILE, WARPS
from expertserve.ops.reference import activate
from tools.gpu_check.report import Report
from tools.gpu_check.weights import make_weight

HIDDEN, FFN, TOP_K = 2048, 768, 8
"""Experts of Qwen3-30B-A3B."""
ROTATED_BYTES = 5 << 28
BAR = 0.60
"""Least part of the copy bandwidth that resident experts must be read at."""


def timed(device: Device, queue: Callable[[], None], times: int) -> tuple[float, float]:
    """Seconds a call on the device, by events, and on the host alone, after two calls that warm up."""
    import cupy

    stream = device.compute.stream  # type: ignore[attr-defined]
    for _ in range(2):
        queue()
    device.compute.synchronize()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    began = perf_counter()
    for _ in range(times):
        queue()
    host_s = perf_counter() - began
    end.record(stream)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end) / 1000 / times, host_s / times


def measure_rates(device: Device, report: Report) -> None:
    """Everything, as rows of the report."""
    copy = report.figure("device copy, read and written", copy_bandwidth, device, shown=_gb_s) or nan
    upload = report.figure("page-locked host to device", upload_bandwidth, device, shown=_gb_s) or nan
    report.check("resident experts, decode of one token", decode_experts, device, copy, report)
    report.figure("experts to slots", store_rate, device, upload, shown=str)
    for fmt in ("Q4_K", "Q6_K", "Q8_0", "F16"):
        report.figure(f"product {fmt} 32768 x 2048, one row", product_rate, device, fmt, copy, shown=str)


def _gb_s(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def copy_bandwidth(device: Device) -> float:
    from cupy.cuda import runtime

    nbytes = 1 << 29
    a, b = (device.allocate(nbytes, "a copy") for _ in range(2))
    stream = device.compute.stream.ptr  # type: ignore[attr-defined]
    seconds, _ = timed(
        device, lambda: runtime.memcpyAsync(b.address, a.address, nbytes, runtime.memcpyDeviceToDevice, stream), 20
    )
    a.free(), b.free()
    return 2 * nbytes / seconds


def upload_bandwidth(device: Device) -> float:
    nbytes = 1 << 28
    target, source = device.allocate(nbytes, "a copy"), device.allocate_pinned(nbytes, "a copy")
    seconds, _ = timed(device, lambda: device.compute.run(Upload(target.address, source)), 5)
    target.free()
    return nbytes / seconds


def decode_experts(device: Device, copy: float, report: Report) -> tuple[bool, str]:
    """Layers of eight experts, each call over other slots of an arena that no cache holds; checked, then timed."""
    parts = [(make_weight("Q4_K", FFN, HIDDEN, e), make_weight("Q4_K", FFN, HIDDEN, 50 + e)) for e in range(TOP_K)]
    downs = [make_weight("Q4_K", HIDDEN, FFN, 100 + e) for e in range(TOP_K)]
    nbytes = parts[0][0][0].nbytes
    slot_bytes = 3 * nbytes
    slots = ROTATED_BYTES // slot_bytes // TOP_K * TOP_K
    shapes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    infos = [TensorInfo(name, (TOP_K, *s), TensorType.Q4_K, 0, 0, TOP_K * nbytes) for name, s in shapes.items()]
    backend = CudaBackend(device)
    backend.load_weights([], lambda name, target: None, lambda done: None)
    for name, shape, access in (
        ("ffn_input", (1, HIDDEN), HostAccess.WRITES),
        ("expert_weights", (1, TOP_K), HostAccess.WRITES),
        ("expert_out", (TOP_K, HIDDEN), HostAccess.NONE),
        ("combined", (1, HIDDEN), HostAccess.READS),
        ("mask", (1,), HostAccess.WRITES),
    ):
        backend.allocate_buffer(name, shape, np.float16 if name == "mask" else np.float32, access)
    x = np.random.default_rng(0).standard_normal(HIDDEN, np.float32)
    backend.host("ffn_input")[0] = x
    backend.host("expert_weights")[0] = 1
    store = DeviceExpertSlotStore(device, slots, slot_bytes)
    for slot in range(slots):
        e = slot % TOP_K
        store.write_slot(slot, b"".join(w.tobytes() for w in (parts[e][0][0], parts[e][1][0], downs[e][0])))
        store.slot_for_read(slot)
    kernel = backend.expert_kernel(
        ExpertTower(-1, 0, TOP_K, tuple(infos), tuple(shapes)), ExpertShape(HIDDEN, FFN, TOP_K, Activation.SILU)
    )
    backend.begin_batch(1, np.zeros((1, 1), np.float16), 1)
    start, pairs = np.arange(TOP_K + 1, dtype=np.int32), np.arange(TOP_K, dtype=np.int32)
    base = np.uint64(store.base) + np.arange(slots, dtype=np.uint64) * np.uint64(store.stride)
    at = 0

    def layer() -> None:
        nonlocal at
        device.compute.synchronize()  # as a layer does that waits for its router
        chosen = base[at : at + TOP_K]
        at = (at + TOP_K) % slots
        kernel.begin(1)
        slices = tuple(chosen + np.uint64(i * nbytes) for i in range(3))
        kernel(SlotBatch(slices, start, pairs, 0, pairs))

    layer()
    backend.compile("combine", lambda g: g.store("combined", g.combine_experts(HIDDEN, TOP_K))).run()
    want = sum(
        activate(x @ gate[1].T, x @ up[1].T, Activation.SILU) @ down[1].T
        for (gate, up), down in zip(parts, downs, strict=True)
    )
    error = float(np.abs(backend.host("combined")[0] - want).max() / np.abs(want).max())
    device_s, host_s = timed(device, layer, 4 * slots // TOP_K)
    gate_up, down = _launches(kernel, base, nbytes)
    kernels_s, _ = timed(device, lambda: (device.compute.run(gate_up()), device.compute.run(down())) and None, 400)
    store.close()
    backend.close()
    read = TOP_K * slot_bytes
    report.note(
        "a layer's experts, host and copies included", f"{device_s * 1e6:.0f} us, {host_s * 1e6:.0f} us on the host"
    )
    rate = read / kernels_s
    figure = f"{rate / 1e9:.0f} GB/s = {rate / copy:.0%} of a copy, {kernels_s * 1e6:.0f} us, error {error:.1e}"
    return error < 1e-3 and rate >= BAR * copy, figure


def _launches(kernel: object, base: np.ndarray, nbytes: int) -> tuple[Callable[[], Launch], Callable[[], Launch]]:
    """The two kernels of a layer without what goes before them: one group after another of slots, laid out once."""
    backend, names = kernel._backend, kernel._names  # type: ignore[attr-defined]
    layers = base.size // TOP_K
    tables = []
    for i in range(3):
        memory = backend.device.allocate(base.nbytes, "addresses")
        addresses = base + np.uint64(i * nbytes)
        backend.device.compute.run(Upload(memory.address, addresses))
        backend.device.compute.synchronize()
        backend.own(memory)
        tables.append(memory.address)
    order = np.concatenate([np.arange(TOP_K + 1, dtype=np.int32), np.arange(TOP_K, dtype=np.int32)])
    memory = backend.device.allocate(order.nbytes, "pairs")
    backend.device.compute.run(Upload(memory.address, order))
    backend.device.compute.synchronize()
    backend.own(memory)
    start, pairs = np.uint64(memory.address), np.uint64(memory.address + 4 * (TOP_K + 1))
    groups, none = (pairs, start, pairs), np.uint64(0)  # pair i is of expert i
    silu, no_limit = np.int32(GATED_OF[Activation.SILU]), np.float32(0)
    hidden, ffn, top_k = np.int32(HIDDEN), np.int32(FFN), np.int32(TOP_K)
    at = 0

    def table(i: int) -> np.uint64:
        return np.uint64(tables[i] + 8 * TOP_K * at)

    def gate_up() -> Launch:
        nonlocal at
        at = (at + 1) % layers
        outer, x, h = (none,) * 3, kernel._x, kernel._h  # type: ignore[attr-defined]
        args = (table(0), table(1), *groups, *outer, x, h, hidden, ffn, top_k, ffn, silu, no_limit)
        return Launch(names[0], (blocks(FFN, WARPS), TOP_K, 1), args)

    def down() -> Launch:
        args = (table(2), *groups, none, kernel._h, kernel._y, hidden, ffn)  # type: ignore[attr-defined]
        return Launch(names[1], (blocks(HIDDEN, PAIR * WARPS), TOP_K, 1), args)

    return gate_up, down


def store_rate(device: Device, upload: float) -> str:
    """How fast experts pass through staging buffers, the copy into them included."""
    slot_bytes, slots = 4 << 20, 64
    store, source = DeviceExpertSlotStore(device, slots, slot_bytes), np.zeros(slot_bytes, np.uint8)
    began = perf_counter()
    for slot in range(slots):
        store.write_slot(slot, source.data)
        store.slot_for_read(slot)
    device.compute.synchronize()
    rate = slots * slot_bytes / (perf_counter() - began)
    store.close()
    return f"{rate / 1e9:.1f} GB/s = {rate / upload:.0%} of the link, the host's copy into staging included"


def product_rate(device: Device, fmt: str, copy: float) -> str:
    n_out, n_in, copies = 32768, 2048, 8
    row, _ = make_weight(fmt, 64, n_in)
    nbytes = row.nbytes * (n_out // 64)
    device.load_kernels([f"matvec<{fmt}>"])
    weight, x, y = (device.allocate(n, "a product") for n in (copies * nbytes, 4 * n_in, 4 * n_out))
    whole = np.tile(row, (n_out // 64, 1))
    for i in range(copies):
        device.compute.run(Upload(weight.address + i * nbytes, whole))
    device.compute.run(Upload(x.address, np.ones(n_in, np.float32)))
    device.compute.synchronize()
    at = 0

    def queue() -> None:
        nonlocal at
        at = (at + 1) % copies
        args = (np.uint64(weight.address + at * nbytes), np.uint64(x.address), np.uint64(0), np.uint64(y.address))
        sizes = (np.int32(n_in), np.int32(n_out), np.int32(1))
        device.compute.run(Launch(f"matvec<{fmt}>", (blocks(n_out, PAIR * WARPS), blocks(1, TILE), 1), (*args, *sizes)))

    seconds, _ = timed(device, queue, 100)
    for memory in (weight, x, y):
        memory.free()
    return f"{nbytes / seconds / 1e9:.0f} GB/s = {nbytes / seconds / copy:.0%} of a copy"
