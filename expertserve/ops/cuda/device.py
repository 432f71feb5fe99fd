"""What the backend and the slot store ask of a CUDA device: memory, streams, events, commands.

Owns nothing itself; `cupy_device.py` is the real one, and tests put another behind the same classes. Invariant: a
command names only memory that its caller keeps alive until the stream has passed it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, KernelUnavailableError
from expertserve.values import size_text

THREADS = 128
"""Threads of every block: WARPS warps, as the source has it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel over a grid of blocks; pointers are uint64."""

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[np.generic, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """By cuBLAS in float32: y[row, o] = sum over i of x[row, i] * weight[o, i]; rows of y are `stride` apart."""

    weight: int
    x: int
    y: int
    rows: int
    n_in: int
    n_out: int
    stride: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Page-locked host bytes to the device; the array must not change before the stream has passed this."""

    address: int
    source: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Download:
    """Device bytes to page-locked host memory."""

    target: NDArray[Any]
    address: int


@dataclass(frozen=True, slots=True)
class Zero:
    """Zeroes device bytes."""

    address: int
    nbytes: int


Command = Launch | Product | Upload | Download | Zero


class DeviceMemory(ABC):
    """Bytes on the device, until `free`."""

    address: int
    nbytes: int

    @abstractmethod
    def free(self) -> None:
        """Gives the bytes back; idempotent."""


class Event(ABC):
    """A point of a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the stream has passed it."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until the stream has passed it."""


class Stream(ABC):
    """Commands in order."""

    @abstractmethod
    def run(self, command: Command) -> None:
        """Queues one command."""

    @abstractmethod
    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        """What queues all of them at once, any number of times."""

    @abstractmethod
    def record(self) -> Event:
        """The point after what is queued now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is queued later starts after `event`; the host goes on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until everything queued is done."""


class Device(ABC):
    """One GPU.

    Attributes:
        name: for the user.
        compute: the stream of all kernels.
        reads_host_memory: kernels may work on any host memory at full speed, because there is only one memory.
    """

    name: str
    compute: Stream
    reads_host_memory: bool

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that may be allocated."""

    @abstractmethod
    def allocate(self, nbytes: int, what: str) -> DeviceMemory:
        """At least `nbytes`, aligned to 256.

        Raises:
            CapacityError: refused; names `what`, the bytes and what is free.
        """

    @abstractmethod
    def allocate_pinned(self, nbytes: int, what: str) -> NDArray[np.uint8]:
        """Page-locked, page-aligned host memory, freed with its last array.

        Raises:
            CapacityError: refused; names `what` and the bytes.
        """

    @abstractmethod
    def make_stream(self) -> Stream:
        """A stream that runs beside `compute`."""

    @abstractmethod
    def load_kernels(self, names: Sequence[str]) -> None:
        """Compiles kernels of the source; launching one that was not loaded is an error."""


def refusal(nbytes: int, what: str, free_bytes: int) -> CapacityError:
    """The error of an allocation that does not fit."""
    return CapacityError(
        f"the GPU refused {size_text(nbytes)} for {what}; {size_text(free_bytes)} of its memory are free"
    )


def missing() -> str | None:
    """Why no device can be used here, with what to do; None where one can."""
    if find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'expertserve[cuda]' for CUDA 12, 'expertserve[cuda13]' for CUDA 13"
    try:
        from expertserve.ops.cuda.cupy_device import why_unusable
    except ImportError as error:
        return f"CuPy cannot be loaded ({error}): install it again"
    except OSError as error:
        return f"CuPy cannot make its cache ({error}): set CUPY_CACHE_DIR to a folder that can be written"
    return why_unusable()


@cache
def open_device() -> Device:
    """The process's device, for backend and slot stores alike.

    Raises:
        KernelUnavailableError: there is none; says why.
    """
    reason = missing()
    if reason is not None:
        raise KernelUnavailableError(f"--device cuda cannot be used: {reason}")
    from expertserve.ops.cuda.cupy_device import CupyDevice

    return CupyDevice()
