"""Every CUDA kernel, run from its own source under emulation, against NumPy and the `gguf` package's dequantisation."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from expertserve.ops.base import Rope, RopeStyle
from expertserve.ops.cuda.source import FORMATS, MOST_HEADS, PAIR, QUERIES_AND_CELLS, TILE, WARPS, attend_many
from expertserve.ops.reference import sigmoid
from expertserve.ops.rope import rope_frequencies
from tests.cuda.emulator import THREADS, available, emulator
from tools.gpu_check.weights import PLAIN, make_weight

pytestmark = pytest.mark.skipif(not available, reason="needs g++")

i32, f32 = np.int32, np.float32


def close(got: NDArray[np.float32], want: NDArray[np.floating], tolerance: float = 2e-5) -> None:
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * max(1.0, float(np.abs(want).max()))


def blocks(n: int, width: int) -> int:
    return -(-n // width)


def width_of(fmt: str, odd: int) -> int:
    """A row length that is no multiple of a warp's stride."""
    values = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[fmt]][0]
    return odd if values == 1 else 3 * values


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_decode_exactly(fmt: str) -> None:
    n = width_of(fmt, 37)
    raw, exact = make_weight(fmt, 5, n)
    ids = np.array([4, 0, 4], i32)
    out = np.full((3, n), np.nan, f32)
    emulator().launch(f"take_rows<{fmt}>", (3, blocks(n, 8 * THREADS)), raw, ids, out, i32(n))
    close(out, exact[ids], 3e-7)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_product(fmt: str, rows: int) -> None:
    n, out_rows = width_of(fmt, 301), 7
    raw, exact = make_weight(fmt, out_rows, n, seed=1)
    rng = np.random.default_rng(2)
    x, bias = rng.standard_normal((rows, n)).astype(f32), rng.standard_normal(out_rows).astype(f32)
    y = np.full((rows, out_rows), np.nan, f32)
    grid = (blocks(out_rows, PAIR * WARPS), blocks(rows, TILE))
    emulator().launch(f"matvec<{fmt}>", grid, raw, x, bias if rows > 1 else None, y, i32(n), i32(out_rows), i32(rows))
    close(y, x.astype(np.float64) @ exact.T.astype(np.float64) + (bias if rows > 1 else 0))


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_over_slots(fmt: str) -> None:
    hidden = ffn = width_of(fmt, 45) if fmt in PLAIN or width_of(fmt, 0) < 100 else 256
    top_k, tokens, experts = 2, 9, 3
    weights = [[make_weight(fmt, hidden, hidden, seed=10 * e + role) for role in range(3)] for e in range(experts)]
    pairs = np.array([3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13], i32)  # one pair is another call's: its row must stay
    start = np.array([0, 1, 11, 13], i32)
    x = np.random.default_rng(3).standard_normal((tokens, hidden)).astype(f32)
    h = np.full((tokens * top_k, ffn), np.nan, f32)
    y = np.full((tokens * top_k, hidden), np.nan, f32)
    gate, up, down = (
        np.array([weights[e][role][0].ctypes.data for e in range(experts)], np.uint64) for role in range(3)
    )
    grid = (blocks(ffn, WARPS), experts)
    common = (np.arange(experts, dtype=i32), start, pairs)
    sizes = (i32(hidden), i32(ffn), i32(top_k), i32(ffn), i32(0), f32(0))
    emulator().launch(f"expert_gate_up<{fmt}, {fmt}>", grid, gate, up, *common, None, None, None, x, h, *sizes)
    grid = (blocks(hidden, PAIR * WARPS), experts)
    emulator().launch(f"expert_down<{fmt}>", grid, down, *common, None, h, y, *sizes[:2])
    for e in range(experts):
        mine = pairs[start[e] : start[e + 1]]
        g, u, d = (weights[e][role][1] for role in range(3))
        rows = x[mine // top_k]
        gated = rows @ g.T
        close(y[mine], (gated * sigmoid(gated) * (rows @ u.T)) @ d.T, 1e-4)
    untouched = np.setdiff1d(np.arange(tokens * top_k), pairs)
    assert np.isnan(y[untouched]).all() and len(untouched)


def test_combination_keeps_the_order_of_choices() -> None:
    rng = np.random.default_rng(4)
    weights, y = rng.random((3, 4)).astype(f32), rng.standard_normal((12, 200)).astype(f32)
    out = np.empty((3, 200), f32)
    emulator().launch("combine_experts", (2, 3), weights, y, out, i32(200), i32(4))
    want = np.zeros((3, 200), f32)
    for j in range(4):
        want += weights[:, j, None] * y.reshape(3, 4, 200)[:, j]
    close(out, want, 3e-7)


@pytest.mark.parametrize("n", [8, 100, 517])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(n: int, weighted: bool) -> None:
    rng = np.random.default_rng(n)
    x, weight = rng.standard_normal((3, n)).astype(f32), rng.standard_normal(n).astype(f32)
    out = np.empty_like(x)
    emulator().launch("rms_norm", (3,), x, weight if weighted else None, out, i32(n), f32(1e-5))
    want = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * (weight if weighted else 1)
    close(out, want)


@pytest.mark.parametrize("n", [8, 100, 517])
def test_layer_norm(n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = (3 + rng.standard_normal((3, n))).astype(f32), rng.standard_normal(n).astype(f32)
    out = np.empty_like(x)
    emulator().launch("layer_norm", (3,), x, weight, out, i32(n), f32(1e-5))
    centred = x - x.mean(axis=1, keepdims=True)
    close(out, centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5) * weight)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("dims", [16, 20])
def test_rope(style: RopeStyle, dims: int) -> None:
    x = np.random.default_rng(5).standard_normal((4, 3, 20)).astype(f32)
    positions = np.array([0, 1, 77, 4095], i32)
    rope = Rope(dims, style, 10000.0)
    frequency, magnitude = rope_frequencies(rope, None)
    angle = positions[:, None] * frequency
    out = np.full_like(x, np.nan)
    neox = i32(style is RopeStyle.NEOX)
    emulator().launch("rope", (3, 4), x, positions, frequency, out, i32(20), i32(dims // 2), neox, f32(magnitude))
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    want = x.copy()
    half = dims // 2
    first, second = (slice(0, half), slice(half, dims)) if neox else (slice(0, dims, 2), slice(1, dims, 2))
    want[..., first], want[..., second] = x[..., first] * c - x[..., second] * s, x[..., first] * s + x[..., second] * c
    close(out, want)


@pytest.mark.parametrize("cell", ["HalfCell", "FloatCell"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim"), [(4, 2, 32, 32), (3, 1, 72, 40), (2, 2, 256, 256), (2, 1, 576, 512)]
)
@pytest.mark.parametrize(("stretch", "softcap"), [(7, 0.0), (64, 0.0), (7, 0.5)])
def test_attention(cell: str, heads: int, kv_heads: int, k_dim: int, v_dim: int, stretch: int, softcap: float) -> None:
    rng = np.random.default_rng(6)
    rows, n_kv, most = 19, 50, next(most for most in MOST_HEADS if max(k_dim, v_dim) <= most)
    dtype = np.float16 if cell == "HalfCell" else f32
    q = rng.standard_normal((rows, heads, k_dim)).astype(f32)
    new = [rng.standard_normal((n_kv, kv_heads, dim)).astype(f32) for dim in (k_dim, v_dim)]
    where = rng.permutation(n_kv).astype(np.int64)
    caches = [np.full(part.shape, np.nan, dtype) for part in new]
    for part, cache in zip(new, caches, strict=True):
        n = part[0].size
        emulator().launch(f"write_cells<{cell}>", (blocks(n, THREADS), n_kv), part, where, cache, i32(n))
        assert np.array_equal(cache[where], part.astype(dtype))
    mask = np.where(rng.random((rows, n_kv)) < 0.5, 0, -np.inf).astype(np.float16)
    mask[1] = -np.inf
    mask[1, 20] = 0  # one visible cell: most stretches see nothing
    mask[:, 32:40] = -np.inf  # a chunk that no row sees
    splits = blocks(n_kv, stretch)
    part = np.full((rows, heads, splits, v_dim + 2), np.nan, f32)
    sizes = tuple(map(i32, (kv_heads, k_dim, v_dim, kv_heads * v_dim, n_kv, stretch)))
    scales = f32(k_dim**-0.5), f32(softcap)
    emulator().launch(f"attend<{cell}, {most}>", (heads, splits, rows), q, *caches, mask, part, *sizes, *scales)
    out, at_once = np.full((2, rows, heads, v_dim), np.nan, f32)
    emulator().launch("merge_attention", (heads, rows), part, None, out, i32(splits), i32(v_dim))
    grid = (heads, blocks(rows, QUERIES_AND_CELLS[most][0]))
    many = (mask, None, at_once, i32(rows), *sizes[:5], *scales)
    emulator().launch(attend_many(cell, most), grid, q, *caches, *many)
    k, v = (cache.astype(f32).repeat(heads // kv_heads, axis=1) for cache in caches)
    scores = np.einsum("qhd,khd->hqk", q, k) * k_dim**-0.5
    scores = (softcap * np.tanh(scores / softcap) if softcap else scores) + mask.astype(f32)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("hqk,khd->qhd", probs / probs.sum(axis=-1, keepdims=True), v)
    close(out, want)
    close(at_once, want)


def test_a_barrier_some_threads_never_reach_is_an_error() -> None:
    code = """
        import numpy as np
        from tests.cuda.emulator import Emulator
        half = "if (threadIdx.x < 5) x[0] = __shfl_xor_sync(~0u, 1.0f, 1); else __syncthreads();"
        emulator = Emulator("__global__ void k(float *x) {" + half + "}", ["k"])
        emulator.launch("k", (1,), np.zeros(1, np.float32), threads=32)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode != 0 and "wait for each other" in done.stderr
