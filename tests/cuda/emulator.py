"""Compiles the CUDA source for the CPU with g++ and launches its kernels under `emulation.h`.

What was compiled is kept in build/ by what it was compiled from, for the processes and sessions that come after.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
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
KEPT = Path(__file__).parents[2] / "build" / "emulated"
COMPILE = (
    "g++",
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing",
    "-w",
    "-x",
    "c++",
)
available = shutil.which("g++") is not None
THREADS = 128


def compile_source(text: str, names: Sequence[str]) -> ctypes.CDLL:
    """A library with entry `kernel_<i>` for each name."""
    entries = "".join(
        f'extern "C" void kernel_{i}(void **args, const unsigned *grid, unsigned threads)'
        f"{{ launch({name}, args, grid, threads); }}\n"
        for i, name in enumerate(names)
    )
    source = f"{HEADER.read_text()}\n{text}\n{entries}"
    compiler = subprocess.run([COMPILE[0], "--version"], capture_output=True, text=True).stdout
    made_of = hashlib.sha256("\n".join((compiler, *COMPILE, source)).encode()).hexdigest()
    library = KEPT / f"{made_of[:32]}.so"
    if not library.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            made = Path(folder, "emulated.so")
            done = subprocess.run([*COMPILE, "-", "-o", str(made)], input=source, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(made, library)  # whole at once: another process may be about to load it
    return ctypes.CDLL(str(library))


class Emulator:
    """Kernels by name; arguments are NumPy arrays (passed as pointers), NumPy scalars, or None for a null pointer."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self._library = compile_source(text, names)
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
    """Every kernel."""
    return Emulator(source_text(), kernel_names())
