"""Every device's operators against the plain ones in float32: only the order of sums differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.gguf.file import TensorInfo, TensorType
from expertserve.ops.base import Activation, Graph, HostAccess, KVLayout, KVType, Tensor
from expertserve.ops.factory import make_backend
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice, installed

Array = NDArray[np.float32]
N_KV = 256


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@dataclass
class World:
    """What a graph computes with: inputs [rows, ..] by buffer, float32 weights by name, a KV cache."""

    inputs: dict[str, Array]
    weights: dict[str, Array] = field(default_factory=dict)
    kv: Sequence[KVLayout] = ()

    def run(self, device: str, build: Callable[[Graph], Tensor], *, flash: bool = False) -> Array:
        """The value that `build` describes, computed twice: the second run must equal the first."""
        rows = len(next(iter(self.inputs.values())))
        backend = make_backend(device, threads=2, flash_attention=flash)
        try:
            infos = [TensorInfo(n, w.shape, TensorType.F32, 0, 0, w.nbytes) for n, w in self.weights.items()]
            backend.load_weights(infos, self._read, lambda nbytes: None)
            backend.allocate_kv(self.kv, N_KV, KVType.F16 if flash else KVType.F32)
            cells = np.random.default_rng(1).permutation(N_KV)[:rows]
            given = {**self.inputs, "cells": cells, "positions": 3 * np.arange(rows, dtype=np.int32)}
            for name, values in given.items():
                backend.allocate_buffer(name, values.shape, values.dtype, HostAccess.WRITES)
            for name in ("mask", "mask.near"):
                backend.allocate_buffer(name, (rows * N_KV,), np.float16, HostAccess.WRITES)
            shape: list[int] = []

            def build_and_store(g: Graph) -> None:
                out = build(g)
                if not shape:
                    shape.extend(out.shape)
                    backend.allocate_buffer("out", shape, np.float32, HostAccess.READS)
                g.store("out", out)

            found = []
            for _ in range(2):
                for name, values in given.items():
                    backend.host(name)[:] = values
                backend.begin_batch(rows, seen_by(cells), 1, {"mask.near": seen_by(cells, 3)})
                backend.compile("case", build_and_store).run()
                found.append(backend.host("out").copy())
            assert np.array_equal(*found) and np.isfinite(found[0]).all()
            return found[0]
        finally:
            backend.close()

    def _read(self, name: str, out: memoryview) -> None:
        out[:] = self.weights[name].tobytes()


def seen_by(cells: NDArray[np.int64], most: int = N_KV) -> NDArray[np.float16]:
    """Each row sees its own cell and those of the rows before it, `most` in all."""
    mask = np.full((len(cells), N_KV), -np.inf, np.float16)
    for row in range(len(cells)):
        mask[row, cells[max(0, row + 1 - most) : row + 1]] = 0
    return mask


def assert_agree(world: World, build: Callable[[Graph], Tensor], tolerance: float = 2e-5, **how: bool) -> Array:
    """Checks every device's answer, and returns the CPU's."""
    exact, answers = world.run("reference", build), [world.run("cpu", build, **how)]
    if available:
        with installed(FakeDevice()):
            answers.append(world.run("cuda", build, **how))
    for ours in answers:
        assert ours.shape == exact.shape
        assert np.abs(ours - exact).max() <= tolerance * max(1.0, float(np.abs(exact).max()))
    return answers[0]


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_each_head_meets_its_own_matrix(rows: int) -> None:
    world = World({"x": random(rows, 3, 32)}, {"w": random(3, 24, 32)})
    out = assert_agree(world, lambda g: g.head_linear(g.load("x"), "w"))
    by_hand = np.stack([world.inputs["x"][:, h] @ world.weights["w"][h].T for h in range(3)], axis=1)
    assert np.abs(out - by_hand).max() < 1e-4


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_single_head_goes_beside_each(rows: int, heads: int) -> None:
    world = World({"a": random(rows, 4, 16), "b": random(rows, heads, 8)})
    out = assert_agree(world, lambda g: g.concat(g.load("a"), g.load("b")), 0)
    assert np.array_equal(out[..., :16], world.inputs["a"])
    assert np.array_equal(out[..., 16:], np.broadcast_to(world.inputs["b"], (rows, 4, 8)))


@pytest.mark.parametrize(("flash", "tolerance"), [(False, 2e-5), (True, 2e-3)])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_values_may_lie_in_the_keys(rows: int, flash: bool, tolerance: float) -> None:
    shared, apart = KVLayout(0, 1, 48, 32, values_in_keys=True), KVLayout(1, 1, 48, 32)
    world = World({"q": random(rows, 6, 48), "k": random(rows, 1, 48)}, kv=[shared, apart])
    found = [
        assert_agree(world, build, tolerance, flash=flash)
        for build in (
            lambda g: g.attention(g.load("q"), g.load("k"), None, shared, 0.3),
            lambda g: g.attention(g.load("q"), g.load("k"), g.part(g.load("k"), 0, 32), apart, 0.3),
        )
    ]
    assert np.array_equal(*found)
    assert shared.cell_bytes(KVType.F16) == 2 * 48 and apart.cell_bytes(KVType.F16) == 2 * 80


@pytest.mark.parametrize(("flash", "tolerance"), [(False, 2e-5), (True, 2e-3)])
@pytest.mark.parametrize("k_dim", [48, 52], ids=["our kernel", "ggml's"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_sinks_take_their_part_and_each_mask_is_its_own(rows: int, k_dim: int, flash: bool, tolerance: float) -> None:
    kv = [KVLayout(layer, 2, k_dim, 32) for layer in range(3)]
    inputs = {"q": random(rows, 6, k_dim), "k": random(rows, 2, k_dim), "v": random(rows, 2, 32)}
    world = World(inputs, {"sinks": random(6), "none": np.full(6, -1e30, np.float32)}, kv)

    def attend(layer: int, **how: str) -> Callable[[Graph], Tensor]:
        return lambda g: g.attention(g.load("q"), g.load("k"), g.load("v"), kv[layer], 0.3, **how)

    plain = assert_agree(world, attend(0), tolerance, flash=flash)
    with_sinks = assert_agree(world, attend(1, sinks="sinks", mask="mask.near"), tolerance, flash=flash)
    near = assert_agree(world, attend(2, mask="mask.near"), tolerance, flash=flash)
    assert np.abs(with_sinks - near).max() > 0.01
    assert (np.abs(near - plain).max() > 0.01) == (rows > 3)
    empty = assert_agree(world, attend(1, sinks="none", mask="mask.near"), tolerance, flash=flash)
    assert np.abs(empty - near).max() < tolerance


@pytest.mark.parametrize(("flash", "tolerance"), [(False, 2e-5), (True, 2e-3)])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_softcap_limits_the_scores(rows: int, flash: bool, tolerance: float) -> None:
    kv = [KVLayout(layer, 2, 48, 32) for layer in range(2)]
    world = World({"q": random(rows, 6, 48), "k": random(rows, 2, 48), "v": random(rows, 2, 32)}, kv=kv)
    capped, plain = (
        assert_agree(
            world,
            lambda g, i=i, cap=cap: g.attention(g.load("q"), g.load("k"), g.load("v"), kv[i], 1.0, softcap=cap),
            tolerance,
            flash=flash,
        )
        for i, cap in enumerate((0.5, 0.0))
    )
    assert (np.abs(capped - plain).max() > 0.1) == (rows > 1)


@pytest.mark.parametrize("activation", Activation)
def test_gated_activations(activation: Activation) -> None:
    world = World({"gate": 6 * random(9, 64), "up": 6 * random(9, 64, seed=1)})
    tolerance = 2e-3 if activation is Activation.GELU else 2e-6  # ggml's GELU looks up a table of halves
    assert_agree(world, lambda g: g.gated(g.load("gate"), g.load("up"), activation), tolerance)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_layer_norm_takes_the_mean_away_and_a_clamp_the_far_values(rows: int) -> None:
    world = World({"x": 3 + random(rows, 96)}, {"w": random(96, seed=1)})
    x, w = world.inputs["x"], world.weights["w"]
    normed = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * w
    assert np.abs(assert_agree(world, lambda g: g.layer_norm(g.load("x"), "w", 1e-5), 1e-5) - normed).max() < 1e-5
    out = assert_agree(world, lambda g: g.add(g.clamp(g.load("x"), 2.5), g.load("x")), 1e-6)
    assert np.array_equal(out, np.clip(x, -2.5, 2.5) + x) and (x > 2.5).any()


@pytest.mark.parametrize("shape", [(1,), (32,), (3, 32)])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_weight_multiplies_element_by_element_head_by_head_or_all_alike(rows: int, shape: tuple[int, ...]) -> None:
    world = World({"x": 3 * random(rows, 3, 32)}, {"w": random(*shape, seed=1)})
    out = assert_agree(world, lambda g: g.tanh(g.mul_weight(g.load("x"), "w")), 1e-6)
    assert np.abs(out - np.tanh(world.inputs["x"] * world.weights["w"])).max() < 1e-6
