"""Our tiled kernels against ggml's dot products and exact arithmetic, for every block format."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from expertserve.gguf.file import GGUFFile, TensorType
from expertserve.ops.base import HostAccess
from expertserve.ops.ggml.backend import GgmlBackend
from expertserve.ops.ggml.library import matrix
from expertserve.ops.reference import dequantise
from tests.gguf_writer import quantize

TILED = [TensorType.Q4_0, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q5_K]
PLAIN = [TensorType.Q6_K, TensorType.Q5_1, TensorType.IQ4_XS, TensorType.F16]


def write_weight(path: Path, values: np.ndarray, kind: TensorType) -> GGUFFile:
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    data = quantize(values, kind)
    writer.add_tensor("w.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(path)


def products(
    tmp_path: Path, kind: TensorType, outputs: int, n: int, rows: int, which: slice = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    """`which` of some rows times a weight of `kind`, by the backend and exactly; one row is ggml's own dot product."""
    rng = np.random.default_rng(rows * 1000 + n)
    weight = rng.standard_normal((outputs, n), np.float32)
    weight[:, ::37] *= 8  # outliers use the ends of a block's range
    x = rng.standard_normal((rows, n), np.float32)[which]
    rows = len(x)
    file = write_weight(tmp_path / "w.gguf", weight, kind)
    backend = GgmlBackend(threads=2, flash_attention=True)
    try:
        backend.load_weights(list(file.tensors.values()), file.read_tensor, lambda nbytes: None)
        backend.allocate_buffer("x", (rows, n), np.float32, HostAccess.NONE)
        backend.allocate_buffer("y", (rows, outputs), np.float32, HostAccess.NONE)
        backend.allocate_buffer("mask", (rows * 256,), np.float16, HostAccess.NONE)
        backend.host("x")[:] = x
        backend.begin_batch(rows, np.zeros((rows, 256), np.float16), 1)
        backend.compile("product", lambda g: g.store("y", g.linear(g.load("x"), "w.weight"))).run()
        out = backend.host("y").copy()
        raw = np.empty(file.tensors["w.weight"].nbytes, np.uint8)
        file.read_tensor("w.weight", raw.data)
    finally:
        backend.close()
    exact = x.astype(np.float64) @ dequantise(raw, file.tensors["w.weight"], (outputs, n)).astype(np.float64).T
    return out, exact


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 70])
@pytest.mark.parametrize("kind", TILED + PLAIN, ids=lambda kind: kind.name)
def test_product_is_exact_but_for_rounded_activations(tmp_path: Path, kind: TensorType, rows: int) -> None:
    out, exact = products(tmp_path, kind, 48, 512, rows)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 0.012


@pytest.mark.parametrize("outputs", [8, 24, 32, 40, 136])
@pytest.mark.parametrize("kind", TILED, ids=lambda kind: kind.name)
def test_tiled_rows_equal_single_rows(tmp_path: Path, kind: TensorType, outputs: int) -> None:
    many, _ = products(tmp_path, kind, outputs, 768, 16)
    few = np.concatenate(
        [products(tmp_path, kind, outputs, 768, 16, slice(row, row + 1))[0] for row in range(0, 16, 4)]
    )
    assert np.abs(many[::4] - few).max() <= 2e-6 * np.abs(many).max() * 8


@pytest.mark.skipif(not matrix(8, 32).tile.unpack, reason="this processor has no tiled kernel")
def test_common_formats_have_a_tiled_kernel() -> None:
    assert all(matrix(int(kind), 256).tile.unpack for kind in TILED)
    assert not any(matrix(int(kind), 256).tile.unpack for kind in PLAIN)
