"""A device for tests: kernels run under emulation, streams lag behind, memory that was not written is poison.

A stream queues commands and executes them only when somebody waits for it, so that whatever the host changes too early,
or a kernel reads without having waited for its copy, shows as garbage. Uploads poison their target when they are
queued, unless the same stream has yet to copy it to the host. Device memory is host memory, which only
commands may touch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.ops.cuda import device
from expertserve.ops.cuda.device import Command, Download, Launch, Product, Upload, Zero
from expertserve.ops.cuda.source import kernel_names
from tests.cuda.emulator import emulator

POISON = 0xFF  # float32, float16 and float64 read it as NaN


def at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes of an address."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class FakeMemory(device.DeviceMemory):
    def __init__(self, owner: FakeDevice, nbytes: int) -> None:
        room = np.full(nbytes + 256, POISON, np.uint8)
        self._owner, self._array = owner, room
        self.address = room.ctypes.data + -room.ctypes.data % 256
        self.nbytes = nbytes
        owner.allocated[self.address] = nbytes
        owner.peak_bytes = max(owner.peak_bytes, owner.used_bytes)

    def free(self) -> None:
        if self._owner.allocated.pop(self.address, None) is not None:
            self._array[:] = POISON


class FakeEvent(device.Event):
    """Polling helps a little: the third poll finds it done."""

    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream, self._position = stream, position
        self._polls = 0

    def done(self) -> bool:
        self._polls += 1
        if self._polls > 2:
            self.wait()
        return self._stream.executed >= self._position

    def wait(self) -> None:
        self._stream.advance(self._position)


class FakeStream(device.Stream):
    def __init__(self, owner: FakeDevice) -> None:
        self._owner = owner
        self._queue: deque[Callable[[], None]] = deque()
        self._downloads: list[tuple[int, int, int]] = []  # position, address, bytes of those not executed
        self.executed = 0
        self._queued = 0

    def _push(self, action: Callable[[], None]) -> None:
        self._queue.append(action)
        self._queued += 1

    def advance(self, position: int) -> None:
        while self.executed < position:
            action = self._queue.popleft()
            action()
            self.executed += 1

    def run(self, command: Command) -> None:
        if isinstance(command, Upload):
            self._owner.check(command.address, command.source.nbytes)
            if not self._is_awaited(command.address, command.source.nbytes):
                at(command.address, command.source.nbytes)[:] = POISON
        elif isinstance(command, Download):
            self._downloads.append((self._queued, command.address, command.target.nbytes))
        self._push(lambda: self._owner.execute(command))

    def _is_awaited(self, address: int, nbytes: int) -> bool:
        """Whether a copy to the host, queued before, is still to read some of these bytes."""
        self._downloads = [download for download in self._downloads if download[0] >= self.executed]
        return any(start < address + nbytes and address < start + size for _, start, size in self._downloads)

    def prepare(self, commands: Sequence[Command]) -> Callable[[], None]:
        def start() -> None:
            for command in commands:
                self.run(command)

        return start

    def record(self) -> FakeEvent:
        return FakeEvent(self, self._queued)

    def wait(self, event: device.Event) -> None:
        self._push(event.wait)

    def synchronize(self) -> None:
        self._owner.synchronizations += self is self._owner.compute
        self.advance(self._queued)


class FakeDevice(device.Device):
    """`vram_bytes` of memory.

    Attributes:
        allocated: bytes by address.
        peak_bytes: most that was allocated at once.
        pinned_bytes: page-locked host memory ever handed out.
        synchronizations: how often the host waited for the compute stream.
        launches: kernels executed.
    """

    name = "emulated"

    def __init__(self, vram_bytes: int = 8 << 30, *, reads_host_memory: bool = False) -> None:
        self.vram_bytes = vram_bytes
        self.reads_host_memory = reads_host_memory
        self.allocated: dict[int, int] = {}
        self.peak_bytes = self.pinned_bytes = self.synchronizations = self.launches = 0
        self.loaded: set[str] = set()
        self.compute = FakeStream(self)

    @property
    def used_bytes(self) -> int:
        return sum(self.allocated.values())

    def free_bytes(self) -> int:
        return self.vram_bytes - self.used_bytes

    def allocate(self, nbytes: int, what: str) -> FakeMemory:
        if nbytes > self.free_bytes():
            raise device.refusal(nbytes, what, self.free_bytes())
        return FakeMemory(self, nbytes)

    def allocate_pinned(self, nbytes: int, what: str) -> NDArray[np.uint8]:
        self.pinned_bytes += nbytes
        room = np.full(nbytes + 4096, POISON, np.uint8)
        skip = -room.ctypes.data % 4096
        return room[skip : skip + nbytes]

    def make_stream(self) -> FakeStream:
        return FakeStream(self)

    def load_kernels(self, names: Sequence[str]) -> None:
        unknown = set(names) - set(kernel_names())
        assert not unknown, f"the source has no {unknown}"
        self.loaded |= set(names)

    def check(self, address: int, nbytes: int) -> None:
        """Fails where bytes are outside what was allocated."""
        inside = any(start <= address and address + nbytes <= start + size for start, size in self.allocated.items())
        assert inside, f"{nbytes} bytes at {address:#x} are not device memory"

    def execute(self, command: Command) -> None:
        match command:
            case Launch(kernel, grid, args):
                assert kernel in self.loaded, f"{kernel} was not loaded"
                assert max(grid[1:]) < 1 << 16, f"{kernel}: a real device has no grid of {grid}"
                self.launches += 1
                emulator().launch(kernel, grid, *args)
            case Upload(address, source):
                self.check(address, source.nbytes)
                at(address, source.nbytes)[:] = np.ascontiguousarray(source).view(np.uint8).reshape(-1)
            case Download(target, address):
                self.check(address, target.nbytes)
                assert target.flags.c_contiguous
                target[...] = at(address, target.nbytes).view(target.dtype).reshape(target.shape)
            case Zero(address, nbytes):
                self.check(address, nbytes)
                at(address, nbytes)[:] = 0
            case Product():
                self._multiply(command)

    def _multiply(self, p: Product) -> None:
        weight = at(p.weight, 4 * p.n_out * p.n_in).view(np.float32).reshape(p.n_out, p.n_in)
        x = at(p.x, 4 * p.rows * p.n_in).view(np.float32).reshape(p.rows, p.n_in)
        y = at(p.y, 4 * ((p.rows - 1) * p.stride + p.n_out)).view(np.float32)
        for row in range(p.rows):
            y[row * p.stride : row * p.stride + p.n_out] = weight @ x[row]


@contextmanager
def installed(fake: FakeDevice) -> Iterator[FakeDevice]:
    """`--device cuda` is `fake` meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "open_device", lambda: fake)
        patch.setattr(device, "missing", lambda: None)
        yield fake


def array_of(memory: Any, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """What lies on the fake device."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return at(memory, count).view(dtype).reshape(shape)
