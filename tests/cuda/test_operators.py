"""Every operator of the CUDA graph against the reference operators, over odd shapes and wide batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.ops.base import Activation, DeltaLayout, Graph, ScanLayout, Tensor
from expertserve.ops.cuda import graph
from expertserve.ops.cuda.backend import CudaBackend
from expertserve.ops.cuda.scratch import ALIGNMENT, Value, place
from expertserve.ops.reference import ReferenceBackend
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice
from tools.gpu_check.kernels import Weights, World, as_f32, random
from tools.gpu_check.weights import make_weight

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


def agree(build: Callable[[Graph], Tensor], x: NDArray[np.float32], weights: Weights, **more: NDArray[Any]) -> None:
    good, figure = World(x, weights, more=more).agrees(FakeDevice(), build, 2e-5)
    assert good, figure


@pytest.mark.parametrize("n", [1, 7, 130])
def test_value_by_value(n: int) -> None:
    weights = {"w": as_f32(random(n, seed=1)), "one": as_f32(random(1, n, seed=2))}

    def build(g: Graph) -> Tensor:
        x = g.load("x")
        y = g.scale(g.silu(g.add_weight(x, "w")), 0.5)
        y = g.mul(g.add(y, x), g.sigmoid(g.linear(x, "one")))
        y = g.clamp(g.layer_norm(y, "w", 1e-5), 0.7)
        return g.gated(g.rms_norm(y, "w", 1e-5), g.rms_norm(x, None, 1e-5), Activation.SILU)

    agree(build, random(5, n), weights)


@pytest.mark.parametrize("activation", Activation)
def test_every_activation_and_a_weight_of_a_row_a_head(activation: Activation) -> None:
    def build(g: Graph) -> Tensor:
        x = g.reshape(g.load("x"), (5, 3, 16))
        y = g.reshape(g.mul_weight(x, "w"), (5, 48))
        return g.gated(g.scale(y, 6.0), g.load("x"), activation)

    agree(build, random(5, 48), {"w": as_f32(random(3, 16, seed=1))})


def test_parts_views_and_concatenation() -> None:
    def build(g: Graph) -> Tensor:
        x = g.load("x")
        heads = g.reshape(x, (3, 4, 35))
        both = g.concat(g.part(x, 3, 133), g.part(x, 0, 7))
        tail = g.reshape(g.part(heads, 34, 35), (3, 4))
        return g.concat(both, tail)

    agree(build, random(3, 140), {})


def test_more_heads_and_rows_than_the_second_axis_of_a_grid_has() -> None:
    agree(lambda g: g.part(g.reshape(g.load("x"), (2, 35_000, 2)), 1, 2), random(2, 70_000), {})


@pytest.mark.parametrize("fmt", ["F32", "F16", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("rows", [1, graph.MATVEC_ROWS, graph.MATVEC_ROWS + 1, 40])
def test_products_narrow_and_wide(fmt: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "PRODUCT_BYTES", 5 * 4 * 256)  # weights are written out in several pieces
    raw, _ = make_weight(fmt, 13, 256)
    weights: Weights = {"w": (fmt, raw, (13, 256)), "b": as_f32(random(13, seed=3))}
    agree(lambda g: g.linear(g.load("x"), "w", "b"), random(rows, 256, seed=4), weights)


def test_selected_outputs() -> None:
    agree(lambda g: g.select_outputs(g.load("x")), random(4, 9), {}, outputs=np.array([3, 0, 3, 1], np.int32))


RUNS = {
    "runs": np.array([[-1, 0, 0, 3], [0, 1, 3, 4], [1, 1, 4, 4], [-1, 2, 4, 7]], np.int32),
    "num_runs": np.array([4], np.int32),
}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_scan_carries_states_along_runs(groups: int) -> None:
    layout = ScanLayout(0, 4, 4, groups, 40, 24)
    weights = {
        "conv": as_f32(random(layout.channels, 4, seed=5)),
        "a": as_f32(-np.abs(random(4, 1, seed=6))),
        "d": as_f32(random(4, 1, seed=8)),
        "dt": as_f32(random(4, layout.channels, seed=7) / 10),
    }

    def build(g: Graph) -> Tensor:
        x = g.load("x")
        return g.selective_scan(g.silu(g.causal_conv(x, "conv", layout)), g.linear(x, "dt"), "a", "d", layout)

    world = World(random(7, layout.channels), weights, states=layout, more=RUNS)
    ours, exact = world.run(CudaBackend(FakeDevice()), build), world.run(ReferenceBackend(), build)
    assert np.isfinite(ours).all()
    assert np.abs(ours - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("grouped", [True, False])
def test_recurrence_carries_states_along_runs(grouped: bool) -> None:
    layout = DeltaLayout(0, 4, 2, 4, 24, 40, grouped)
    weights = {
        "conv": as_f32(random(layout.channels, 4, seed=5)),
        "a": as_f32(-np.abs(random(4, seed=6))),
        "ab": as_f32(random(8, layout.channels, seed=7) / 10),
    }

    def build(g: Graph) -> Tensor:
        x = g.load("x")
        ab = g.linear(x, "ab")
        qkv = g.silu(g.causal_conv(x, "conv", layout))
        return g.gated_delta(qkv, g.part(ab, 0, 4), g.part(ab, 4, 8), "a", layout, 1e-6)

    found = []
    world = World(random(7, layout.channels), weights, states=layout, more=RUNS)
    for backend in (CudaBackend(FakeDevice()), ReferenceBackend()):
        found.append(world.run(backend, build))
    assert np.isfinite(found[0]).all()
    assert np.abs(found[0] - found[1]).max() <= 2e-5 * np.abs(found[1]).max()


def test_shapes_that_do_not_fit_are_refused_before_a_launch() -> None:
    backend = CudaBackend(FakeDevice())
    weights = {"w": as_f32(random(5, 8)), "half": ("F16", np.zeros(14, np.uint8), (7,))}
    with pytest.raises(UnsupportedModelError, match=r"w has shape \[5, 8\], expected \[\*, 7\]"):
        World(random(2, 7), weights).run(backend, lambda g: g.linear(g.load("x"), "w"))
    for build, message in (
        (lambda g: g.add_weight(g.load("x"), "half"), "half is F16, expected F32"),
        (lambda g: g.rms_norm(g.load("x"), "w", 1e-5), r"w has shape \[5, 8\], expected \[7\]"),
        (lambda g: g.part(g.load("x"), 3, 8), "elements 3 to 8 are asked of 7"),
        (lambda g: g.linear(g.load("x"), "absent"), "the file has no tensor absent"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            backend.compile(message, build)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=30),
)
def test_values_that_live_at_once_do_not_share_bytes(drawn: list[tuple[int, int, int]]) -> None:
    values = [Value(nbytes, first, first + length) for nbytes, first, length in drawn]
    offsets, area = place(values)
    for i, a in enumerate(values):
        assert offsets[a] % ALIGNMENT == 0 and offsets[a] + a.nbytes <= area
        for b in values[:i]:
            apart = offsets[a] + a.nbytes <= offsets[b] or offsets[b] + b.nbytes <= offsets[a]
            assert apart or a.last < b.first or b.last < a.first


def test_bytes_are_used_again() -> None:
    chain = [Value(1000, i, i + 1) for i in range(50)]
    assert place(chain)[1] <= 3 * 1024
