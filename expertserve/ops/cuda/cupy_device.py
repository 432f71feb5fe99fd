"""The real device, through CuPy.

Owns the module of compiled kernels, the cuBLAS handle and the streams of this process. A list of commands without
cuBLAS calls is captured once into a CUDA graph and then launched as one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
from cuda.pathfinder import DynamicLibNotFoundError
from cupy.cuda import runtime
from numpy.typing import NDArray

from expertserve.errors import CapacityError, KernelUnavailableError
from expertserve.ops.cuda import device
from expertserve.ops.cuda.device import THREADS, Command, Download, Launch, Product, Upload, Zero
from expertserve.ops.cuda.source import source_text
from expertserve.values import size_text

LEAST_CAPABILITY = 75
_ERROR_NO_DEVICE = 100  # cudaErrorNoDevice of driver_types.h; CuPy has no name for it
_NO_GPU = "there is no NVIDIA GPU (look at nvidia-smi and CUDA_VISIBLE_DEVICES)"
_NO_TOOLKIT = (
    "{} is missing beside CuPy: pip install 'expertserve[cuda]' for CUDA 12, 'expertserve[cuda13]' for CUDA 13"
)
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def why_unusable() -> str | None:
    """Why CuPy finds no GPU that the kernels run on; None where it does."""
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        missing = f"the NVIDIA driver is missing or too old for this CuPy ({error})"
        return _NO_GPU if error.status == _ERROR_NO_DEVICE else missing
    if count == 0:
        return _NO_GPU
    capability = int(cupy.cuda.Device(0).compute_capability)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability / 10:.1f}; {LEAST_CAPABILITY / 10:.1f} or more is needed"
    return None


class CupyMemory(device.DeviceMemory):
    """A block of CuPy's pool."""

    def __init__(self, pointer: Any, nbytes: int) -> None:
        self._pointer = pointer
        self.address = int(pointer.ptr)
        self.nbytes = nbytes

    def free(self) -> None:
        self._pointer = None


class CupyEvent(device.Event):
    """A CUDA event without timing."""

    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


class CupyStream(device.Stream):
    """A CUDA stream that does not wait for the default one."""

    def __init__(self, owner: CupyDevice) -> None:
        self._owner = owner
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def run(self, command: Command) -> None:
        match command:
            case Launch(kernel, grid, args):
                with self.stream:
                    self._owner.kernel(kernel)(grid, (THREADS,), args)
            case Upload(address, source):
                runtime.memcpyAsync(
                    address, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, self.stream.ptr
                )
            case Download(target, address):
                runtime.memcpyAsync(
                    target.ctypes.data, address, target.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr
                )
            case Zero(address, nbytes):
                runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)
            case Product():
                self._owner.multiply(command, self.stream)

    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        if any(isinstance(command, Product) for command in commands):
            return lambda: self.run_all(commands)
        return CapturedCommands(self, commands).run

    def run_all(self, commands: Iterable[Command]) -> None:
        """Queues commands one by one."""
        for command in commands:
            self.run(command)

    def record(self) -> CupyEvent:
        return CupyEvent(self.stream)

    def wait(self, event: device.Event) -> None:
        assert isinstance(event, CupyEvent)
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CapturedCommands:
    """Commands that become one CUDA graph on their second run; on the first, the driver may still have to load them."""

    def __init__(self, stream: CupyStream, commands: Sequence[Command]) -> None:
        self._stream, self._commands = stream, commands
        self._has_run = False
        self._graph: Any = None

    def run(self) -> None:
        """Queues them."""
        stream = self._stream.stream
        if not self._has_run:
            self._stream.run_all(self._commands)
            self._has_run = True
            return
        if self._graph is None:
            stream.begin_capture()
            try:
                self._stream.run_all(self._commands)
            except BaseException:
                with suppress(Exception):
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()
        self._graph.launch(stream)


class CupyDevice(device.Device):
    """The first GPU that CUDA shows this process."""

    def __init__(self) -> None:
        properties = runtime.getDeviceProperties(0)
        self.name = properties["name"].decode()
        self.compute = CupyStream(self)
        attribute = runtime.deviceGetAttribute
        self.reads_host_memory = bool(
            attribute(runtime.cudaDevAttrIntegrated, 0) and attribute(runtime.cudaDevAttrPageableMemoryAccess, 0)
        )
        self._kernels: dict[str, Any] = {}
        try:
            from cupy.cuda import cublas

            self._blas = cublas.create()
        except ImportError:
            raise KernelUnavailableError(_NO_TOOLKIT.format("cuBLAS")) from None

    def free_bytes(self) -> int:
        pool = cupy.get_default_memory_pool()
        return int(runtime.memGetInfo()[0] + pool.free_bytes())

    def allocate(self, nbytes: int, what: str) -> CupyMemory:
        try:
            return CupyMemory(cupy.cuda.alloc(max(nbytes, 1)), nbytes)
        except (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError):
            raise device.refusal(nbytes, what, self.free_bytes()) from None

    def allocate_pinned(self, nbytes: int, what: str) -> NDArray[np.uint8]:
        room = nbytes + mmap.PAGESIZE
        try:
            # Past CuPy's pool, which rounds up to a power of two and keeps what was freed.
            memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(room), 0)
        except (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError):
            raise CapacityError(f"{size_text(nbytes)} of page-locked host memory for {what} were refused") from None
        array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, room)
        skip = -array.ctypes.data % mmap.PAGESIZE
        return array[skip : skip + nbytes]

    def make_stream(self) -> CupyStream:
        return CupyStream(self)

    def load_kernels(self, names: Sequence[str]) -> None:
        wanted = [name for name in names if name not in self._kernels]
        if not wanted:
            return
        try:
            module = cupy.RawModule(code=source_text(), options=("--std=c++17",), name_expressions=wanted)
            self._kernels.update((name, module.get_function(name)) for name in wanted)
        except (ImportError, DynamicLibNotFoundError):
            raise KernelUnavailableError(_NO_TOOLKIT.format("NVRTC")) from None
        except cupy.cuda.compiler.CompileException as error:
            raise KernelUnavailableError(f"the CUDA kernels do not compile for {self.name}: {error}") from None

    def kernel(self, name: str) -> Any:
        """A loaded kernel."""
        return self._kernels[name]

    def multiply(self, product: Product, stream: Any) -> None:
        """Queues a matrix product on a stream."""
        from cupy.cuda import cublas

        cublas.setStream(self._blas, stream.ptr)
        # Column-major: y^T [n_out, rows] = weight [n_in, n_out]^T times x [n_in, rows].
        cublas.sgemm(
            self._blas,
            cublas.CUBLAS_OP_T,
            cublas.CUBLAS_OP_N,
            product.n_out,
            product.rows,
            product.n_in,
            _ONE.ctypes.data,
            product.weight,
            product.n_in,
            product.x,
            product.n_in,
            _ZERO.ctypes.data,
            product.y,
            product.stride,
        )
