"""Compiles the CUDA source for the CPU with g++ and launches its kernels under `emulation.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from expertserve.ops.cuda.source import kernel_names, source_text

HEADER = Path(__file__).parent / "emulation.h"
available = shutil.which("g++") is not None
THREADS = 128


def compile_source(text: str, names: Sequence[str], folder: Path) -> ctypes.CDLL:
    """A library with entry `kernel_<i>` for each name."""
    entries = "".join(
        f'extern "C" void kernel_{i}(void **args, const unsigned *grid, unsigned threads)'
        f"{{ launch({name}, args, grid, threads); }}\n"
        for i, name in enumerate(names)
    )
    (folder / "emulated.cpp").write_text(f'#include "{HEADER}"\n{text}\n{entries}')
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-w")
    command = ["g++", *flags, "emulated.cpp", "-o", "emulated.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "emulated.so"))


class Emulator:
    """Kernels by name; arguments are NumPy arrays (passed as pointers), NumPy scalars, or None for a null pointer."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._library = compile_source(text, names, Path(folder))
        self._index = {name: i for i, name in enumerate(names)}

    def launch(self, name: str, grid: Sequence[int], *args: Any, threads: int = THREADS) -> None:
        held = [_as_parameter(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(held))(*(arg.ctypes.data for arg in held))
        dims = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        getattr(self._library, f"kernel_{self._index[name]}")(pointers, dims, ctypes.c_uint(threads))


def _as_parameter(arg: Any) -> np.ndarray[Any, Any]:
    if arg is None:
        return np.zeros(1, np.uint64)
    if isinstance(arg, np.ndarray):
        assert arg.flags.c_contiguous
        return np.array([arg.ctypes.data], np.uint64)
    assert isinstance(arg, np.generic), f"say how wide {arg!r} is"
    return np.array([arg])


@cache
def emulator() -> Emulator:
    """Every kernel, compiled once a test session."""
    return Emulator(source_text(), kernel_names())
