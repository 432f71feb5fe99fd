"""The routed-expert kernel: equal to plain arithmetic, and indifferent to slots, grouping into calls, and order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from expertserve.experts.batch import SlotBatch
from expertserve.gguf.file import GGUFFile, TensorInfo, TensorType
from expertserve.gguf.spans import ExpertTower, find_towers
from expertserve.ops.base import Activation, Backend, ExpertShape, HostAccess
from expertserve.ops.factory import make_backend
from expertserve.ops.reference import dequantise
from tests.gguf_writer import make_tiny_moe

HIDDEN, FFN, TOP_K, EXPERTS = 256, 256, 4, 8
PLAIN = ExpertShape(HIDDEN, FFN, TOP_K, Activation.SILU)
KINDS = [
    {"expert": "Q4_K", "down": "Q6_K"},
    {"expert": "Q4_K"},
    {"expert": "Q8_0", "down": "Q5_K"},
    {"expert": "F16", "down": "F32"},
    {"expert": "IQ4_XS", "down": "Q4_0"},
    {"expert": "MXFP4"},
]


class World:
    """One layer's experts scattered over a slot arena, and a backend with a kernel for them."""

    def __init__(self, path: Path, device: str, seed: int, *, gated: bool = True) -> None:
        file = GGUFFile.open(path)
        self.tower: ExpertTower = find_towers(file)[0]
        if not gated:
            self.tower = dataclasses.replace(self.tower, slices=self.tower.slices[1:], roles=("up", "down"))
        rng = np.random.default_rng(seed)
        self.memory = []
        self.slices = []
        for i, info in enumerate(self.tower.slices):
            raw = np.empty(info.nbytes, np.uint8)
            file.read_tensor(info.name, raw.data)
            size = self.tower.slice_bytes(i)
            stride = size + 4096
            arena = np.full(EXPERTS * stride + 64, 255, np.uint8)
            places = rng.permutation(EXPERTS)
            address = np.empty(EXPERTS, np.uint64)
            for expert in range(EXPERTS):
                start = int(places[expert]) * stride + 32 * int(rng.integers(0, 64))
                arena[start : start + size] = raw[expert * size : (expert + 1) * size]
                address[expert] = arena.ctypes.data + start
            self.memory.append(arena)
            self.slices.append(address)
        self.backend: Backend = make_backend(device, threads=2, flash_attention=True)

    def run(
        self, x: np.ndarray, ids: np.ndarray, waves: list[list[int]], shape: ExpertShape = PLAIN, seed: int = 0
    ) -> np.ndarray:
        """`seed` is that of the biases and of the pairs' weights."""
        rows = len(x)
        rng = np.random.default_rng(seed)
        sizes = {shape.biases[role]: HIDDEN if role == "down" else FFN for role in shape.biases}
        biases = {name: rng.standard_normal((EXPERTS, n), np.float32) for name, n in sizes.items()}
        infos = [TensorInfo(name, b.shape, TensorType.F32, 0, 0, b.nbytes) for name, b in biases.items()]
        self.backend.load_weights(infos, lambda name, out: _copy(biases[name], out), lambda nbytes: None)
        self.backend.allocate_buffer("ffn_input", (rows, HIDDEN), np.float32, HostAccess.NONE)
        self.backend.allocate_buffer("expert_out", (rows * TOP_K, HIDDEN), np.float32, HostAccess.NONE)
        self.backend.allocate_buffer("expert_weights", ids.shape, np.float32, HostAccess.NONE)
        kernel = self.backend.expert_kernel(self.tower, shape)
        self.backend.host("ffn_input")[:] = x
        self.backend.host("expert_out")[:] = np.nan
        self.backend.host("expert_weights")[:] = rng.random(ids.shape)
        kernel.begin(rows)
        flat = ids.reshape(-1)
        for wave in waves:
            groups = [np.flatnonzero(flat == expert).astype(np.int32) for expert in wave]
            start = np.cumsum([0, *map(len, groups)]).astype(np.int32)
            slices = tuple(address[wave] for address in self.slices)
            kernel(SlotBatch(slices, start, np.concatenate(groups), 0, np.array(wave, np.int32)))
        return self.backend.host("expert_out").copy()


def _copy(values: np.ndarray, out: memoryview) -> None:
    out[:] = values.tobytes()


def dequantised(path: Path, name: str) -> np.ndarray:
    file = GGUFFile.open(path)
    raw = np.empty(file.tensors[name].nbytes, np.uint8)
    file.read_tensor(name, raw.data)
    return dequantise(raw, file.tensors[name], file.tensors[name].shape)


def case(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    ids = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    return rng.standard_normal((rows, HIDDEN), np.float32), ids


def model(tmp_path: Path, kinds: dict[str, str]) -> Path:
    return make_tiny_moe(
        tmp_path / "m.gguf", layers=1, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, ffn=FFN, types=kinds
    )


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kinds.values()))
def test_kernel_agrees_with_plain_arithmetic(tmp_path: Path, kinds: dict[str, str], rows: int) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, kinds), sorted(set(ids.reshape(-1).tolist()))
    ours = World(path, "cpu", 1).run(x, ids, [used])
    exact = World(path, "reference", 1).run(x, ids, [used])
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.02


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kinds.values()))
def test_slots_and_waves_cannot_change_a_bit(tmp_path: Path, kinds: dict[str, str], rows: int) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, kinds), sorted(set(ids.reshape(-1).tolist()))
    whole = World(path, "cpu", 1).run(x, ids, [used])
    one_by_one = World(path, "cpu", 2).run(x, ids, [[expert] for expert in reversed(used)])
    halves = World(path, "cpu", 3).run(x, ids, [used[::2], used[1::2]])
    assert not np.isnan(whole).any()
    assert np.array_equal(whole, one_by_one)
    assert np.array_equal(whole, halves)


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("activation", Activation)
def test_biases_and_every_activation_agree_and_do_not_depend_on_waves(
    tmp_path: Path, activation: Activation, rows: int
) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, {"expert": "Q8_0"}), sorted(set(ids.reshape(-1).tolist()))
    biased = ExpertShape(HIDDEN, FFN, TOP_K, activation, {role: f"{role}.bias" for role in ("gate", "up", "down")})
    ours = World(path, "cpu", 1).run(x, ids, [used], biased)
    exact = World(path, "reference", 1).run(x, ids, [used], biased)
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.02
    assert np.array_equal(ours, World(path, "cpu", 2).run(x, ids, [[expert] for expert in reversed(used)], biased))
    for role in biased.biases:
        less = ExpertShape(HIDDEN, FFN, TOP_K, activation, {r: n for r, n in biased.biases.items() if r != role})
        without = World(path, "cpu", 1).run(x, ids, [used], less)
        assert np.linalg.norm(ours - without) / np.linalg.norm(ours) > 0.1


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("kinds", KINDS[:4], ids=lambda kinds: "-".join(kinds.values()))
def test_an_up_without_a_gate_is_its_own(tmp_path: Path, kinds: dict[str, str], rows: int) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, kinds), sorted(set(ids.reshape(-1).tolist()))
    shape = dataclasses.replace(PLAIN, activation=Activation.RELU)
    ours = World(path, "cpu", 1, gated=False).run(x, ids, [used], shape)
    exact = World(path, "reference", 1, gated=False).run(x, ids, [used], shape)
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.02
    halves = World(path, "cpu", 3, gated=False).run(x, ids, [used[::2], used[1::2]], shape)
    assert np.array_equal(ours, halves)
    infos = {name: dequantised(path, f"blk.0.ffn_{name}_exps.weight") for name in ("up", "down")}
    squared = np.maximum(infos["up"][ids[0, 0]] @ x[0], 0) ** 2
    assert np.abs(infos["down"][ids[0, 0]] @ squared - exact[0]).max() < 1e-4 * np.abs(exact[0]).max()


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_products_are_limited(tmp_path: Path, rows: int) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, {"expert": "Q8_0"}), sorted(set(ids.reshape(-1).tolist()))
    limited = dataclasses.replace(PLAIN, limit=0.4)
    ours = World(path, "cpu", 1).run(x, ids, [used], limited)
    exact = World(path, "reference", 1).run(x, ids, [used], limited)
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.02
    assert np.array_equal(ours, World(path, "cpu", 2).run(x, ids, [[e] for e in reversed(used)], limited))
    without = World(path, "cpu", 1).run(x, ids, [used])
    assert np.linalg.norm(ours - without) / np.linalg.norm(ours) > 0.1


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_weights_of_inputs_multiply_both_products_but_not_their_biases(tmp_path: Path, rows: int) -> None:
    x, ids = case(rows)
    path, used = model(tmp_path, {"expert": "Q8_0"}), sorted(set(ids.reshape(-1).tolist()))
    biases = {role: f"{role}.bias" for role in ("gate", "up")}
    found = []
    for biased in ({}, biases):
        plain = ExpertShape(HIDDEN, FFN, TOP_K, Activation.SILU, biased)
        weighed = dataclasses.replace(plain, weigh_inputs=True)
        ours = World(path, "cpu", 1).run(x, ids, [used], weighed)
        exact = World(path, "reference", 1).run(x, ids, [used], weighed)
        assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.02
        assert np.array_equal(ours, World(path, "cpu", 2).run(x, ids, [[e] for e in reversed(used)], weighed))
        without = World(path, "cpu", 1).run(x, ids, [used], plain)
        assert np.linalg.norm(ours - without) / np.linalg.norm(ours) > 0.1
        found.append(ours)
    assert np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1]) > 0.1
