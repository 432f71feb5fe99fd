"""The CUDA source compiles for every architecture served, and its tables are GGUF's."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
from gguf import quants

from expertserve.ops.cuda.source import FORMATS, kernel_names, source_text
from tests.cuda.nvrtc import compile_cubin, library

needs_nvrtc = pytest.mark.skipif(library() is None, reason="needs nvidia-cuda-nvrtc-cu12 (in the extra `dev`)")


def assert_compiles(arch: str, *, optimize: bool) -> None:
    names = kernel_names()
    symbols = compile_cubin(source_text(), names, arch, optimize=optimize)
    assert len(set(symbols.values())) == len(names)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_every_kernel_compiles_for_every_architecture(arch: str) -> None:
    assert_compiles(arch, optimize=False)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_every_kernel_compiles_optimized(arch: str) -> None:
    assert_compiles(arch, optimize=True)


@needs_nvrtc
def test_a_source_error_is_reported() -> None:
    with pytest.raises(AssertionError, match="undeclared_name"):
        compile_cubin("__global__ void k() { undeclared_name(); }", ["k"], "sm_75")


@pytest.mark.parametrize("fmt", FORMATS)
def test_block_sizes_are_those_of_the_file_format(fmt: str) -> None:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt]]
    assert f"struct {fmt} {{\n    enum {{ VALUES = {values}, BYTES = {nbytes} }};" in source_text()


GRIDS = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 2, "IQ3_XXS": 3, "IQ3_S": 3, "IQ1": 2}


@pytest.mark.parametrize("name", GRIDS)
def test_codebooks_are_those_of_the_file_format(name: str) -> None:
    kind = getattr(quants, "IQ1_S" if name == "IQ1" else name)
    kind.init_grid()
    found = re.search(rf"{name}_GRID\[\d+\] = \{{([^}}]*)\}}", source_text())
    assert found is not None
    codes = np.array([int(code) for code in found[1].replace("\n", " ").split(",") if code.strip()])
    want = np.asarray(kind.grid).reshape(kind.grid_shape)
    shifts, bits = np.arange(want.shape[1]) * GRIDS[name], GRIDS[name]
    digits = codes[:, None] >> shifts & (1 << bits) - 1
    assert np.array_equal(np.array(kind.grid_map)[digits], want)


def test_a_driver_without_a_gpu_is_told_from_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    from expertserve.ops.cuda import cupy_device

    def refuse(status: int) -> None:
        raise cupy_device.runtime.CUDARuntimeError(status)

    for status, said in ((100, "there is no NVIDIA GPU"), (35, "the NVIDIA driver is missing or too old")):
        monkeypatch.setattr(cupy_device.runtime, "getDeviceCount", lambda status=status: refuse(status))
        assert str(cupy_device.why_unusable()).startswith(said)
