"""NVRTC through ctypes: compiles CUDA source for an architecture, without a device or a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC from the package nvidia-cuda-nvrtc-cu12 (or -cu13); None where it is not installed."""
    found = find_spec("nvidia")
    folders = found.submodule_search_locations if found is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*[0-9]")):
            return ctypes.CDLL(str(path))
    return None


def compile_cubin(text: str, names: Sequence[str], arch: str, *, optimize: bool = True) -> dict[str, bytes]:
    """The machine code's symbol of every name; fails with the compiler's log."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None) == 0
    try:
        for name in names:
            assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        options += [] if optimize else [b"--Ofast-compile=max"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        assert status == 0, _log(nvrtc, program)
        size = ctypes.c_size_t()
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        cubin = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetCUBIN(program, cubin) == 0
        symbols = {}
        for name in names:
            lowered = ctypes.c_char_p()
            assert nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)) == 0
            assert lowered.value is not None and lowered.value in cubin.raw, name
            symbols[name] = lowered.value
        return symbols
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode()
