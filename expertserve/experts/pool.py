"""The reader pool: threads that keep the disk at queue depth.

Owns the threads of `reads.c` and the fills that are with them. It does not know slots or residency. What the forward
waits for (urgent) is read before what was guessed (idle), and a guess only while no urgent read is queued or under
way. Invariant: every fill that was submitted comes back exactly once, read or with its error, unless it was cancelled
before any of its reads began; its buffer lives until then.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import CapacityError, ExpertReadError, KernelUnavailableError
from expertserve.experts.disk import Disk
from expertserve.experts.layout import SHIFT_ALIGN
from expertserve.experts.reader import FileReader, SliceReads

_POLL_S = 1.0  # how often a waiting forward comes back, so that a signal is seen
_MOST_RESULTS = 64
_SHORT_READ = -1
_I64 = ctypes.c_int64
_MODES = {"direct": 0, "buffered": 1, "mmap": 2}

_Read = ctypes.CFUNCTYPE(_I64, _I64, _I64, ctypes.c_void_p, _I64, _I64)


class _Source(ctypes.Structure):
    """`struct source` of reads.c."""

    _fields_ = (
        ("mode", _I64),
        ("align", _I64),
        ("shift_align", _I64),
        ("fds", ctypes.c_void_p),
        ("maps", ctypes.c_void_p),
        ("map_bytes", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
    )


class _Result(ctypes.Structure):
    """`struct result` of reads.c."""

    _fields_ = tuple((name, _I64) for name in ("id", "asked", "done", "failed_slice", "error", "advised"))


def _load() -> ctypes.CDLL:
    spec = find_spec("expertserve.experts._reads")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError("the reader threads are not compiled: build them (pip install -e .)")
    library = ctypes.CDLL(spec.origin)
    pool, number, seconds = ctypes.c_void_p, _I64, ctypes.c_double
    for name, result, arguments in (
        ("open", pool, (ctypes.POINTER(_Source), number)),
        ("close", number, (pool, seconds)),
        ("submit", number, (pool, number, number, pool, number, pool)),
        ("promote", None, (pool, number)),
        ("cancel", number, (pool, number)),
        ("collect", number, (pool, seconds, pool, number)),
        ("busy_s", seconds, (pool,)),
        ("pending", number, (pool,)),
    ):
        function = getattr(library, f"reads_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_reads = _load()
_abandoned: list[ReaderPool] = []  # pools with a thread that the disk never let go: what it may write to must stay


class Fill:
    """One expert on its way into a slot; made by the streamer, completed by the pool.

    Attributes:
        key: what the streamer knows it by.
        slot: where it goes.
        settle: what the collector does with it once it is complete; gives back the error of a failed one.
        reads: its slices.
        asked: bytes asked of the file.
        advised: all hints were accepted.
        error: why it failed, or None.
    """

    __slots__ = ("advised", "asked", "buffer", "error", "id", "key", "reads", "settle", "slot")

    def __init__(
        self, key: int, slot: int, reads: SliceReads, settle: Callable[[Fill], ExpertReadError | None]
    ) -> None:
        self.key = key
        self.slot = slot
        self.reads = reads
        self.settle = settle
        self.asked = 0
        self.advised = False
        self.error: BaseException | None = None
        self.id = 0
        self.buffer: memoryview | None = None


class ReaderPool:
    """`threads` readers over one FileReader; one thread submits and collects."""

    def __init__(self, reader: FileReader, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a reader pool needs a thread, not {threads}")
        self.reader = reader
        self._fills: dict[int, Fill] = {}  # submitted and not yet collected, by id
        self._ids = itertools.count(1)
        self._raised: dict[int, BaseException] = {}
        self._results = (_Result * _MOST_RESULTS)()
        self._results_at = ctypes.addressof(self._results)
        self._fds: NDArray[np.int64] = np.array(reader.disk.descriptors, np.int64)
        self._maps = np.ascontiguousarray(reader.maps.T)
        self._hook = _hook(reader.disk, self._raised)
        source = _Source(
            _MODES[reader.mode],
            reader.align,
            SHIFT_ALIGN,
            self._fds.ctypes.data,
            self._maps[:1].ctypes.data,
            self._maps[1:].ctypes.data,
            ctypes.cast(self._hook, ctypes.c_void_p) if self._hook else None,
        )
        self._pool: int | None = _reads.reads_open(ctypes.byref(source), threads)
        if self._pool is None:
            raise CapacityError(f"{threads} reader threads could not be started; lower --io-threads")
        self._busy_s = 0.0

    @property
    def in_flight(self) -> int:
        """Fills submitted and not yet collected."""
        return len(self._fills)

    def submit(self, fill: Fill, buffer: memoryview, *, urgent: bool) -> None:
        """Queues all reads of a fill into a slot's writable buffer."""
        fill.id = next(self._ids)
        fill.buffer = buffer
        self._fills[fill.id] = fill
        reads = fill.reads
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        failed = self._pool and _reads.reads_submit(
            self._pool, fill.id, urgent, reads.address, len(reads.spans), address
        )
        if failed:
            del self._fills[fill.id]
            raise CapacityError(f"an expert's reads could not be queued: {os.strerror(failed)}")

    def promote(self, fill: Fill) -> None:
        """A layer waits for a guess: its reads that have not begun go to the urgent ones."""
        _reads.reads_promote(self._pool, fill.id)

    def cancel(self, fill: Fill) -> bool:
        """Takes a guess back if none of its reads has begun."""
        cancelled = bool(_reads.reads_cancel(self._pool, fill.id))
        if cancelled:
            del self._fills[fill.id]
        return cancelled

    def collect(self, *, wait: bool) -> list[Fill]:
        """Fills that completed since the last call; with `wait`, at least one.

        Raises:
            ExpertReadError: the pool was closed.
        """
        while self._pool is not None:
            count = _reads.reads_collect(self._pool, _POLL_S if wait else 0.0, self._results_at, _MOST_RESULTS)
            if count or not wait:
                return [self._completed(self._results[i]) for i in range(count)]
        raise ExpertReadError("the reader threads are gone; restart")

    def _completed(self, result: _Result) -> Fill:
        fill = self._fills.pop(result.id)
        fill.buffer = None
        fill.asked = result.asked
        fill.advised = result.advised == len(fill.reads.spans)
        if result.error:
            fill.error = self._error(fill, result)
        return fill

    def _error(self, fill: Fill, result: _Result) -> BaseException:
        raised = self._raised.pop(fill.id, None)
        if raised is not None and not isinstance(raised, OSError):
            return raised
        span, name = fill.reads.spans[result.failed_slice], self.reader.disk.name
        if result.error != _SHORT_READ:
            reason = os.strerror(result.error)
        elif self.reader.mode == "mmap":
            reason = f"short read, the file ends at byte {result.done}"
        else:
            reason = f"short read, {result.done} bytes came"
        error = ExpertReadError(
            f"{name(span.file_index)}: reading {span.nbytes} bytes at byte {span.offset} failed: {reason}"
        )
        error.__cause__ = raised
        return error

    @property
    def pending_reads(self) -> int:
        """Reads queued or under way."""
        return 0 if self._pool is None else int(_reads.reads_pending(self._pool))

    @property
    def busy_s(self) -> float:
        """Seconds so far with at least one read under way."""
        if self._pool is not None:
            self._busy_s = float(_reads.reads_busy_s(self._pool))
        return self._busy_s

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops the threads; reads under way end first, queued ones never begin. Idempotent."""
        if self._pool is None:
            return
        self._busy_s = self.busy_s
        pool, self._pool = self._pool, None
        if _reads.reads_close(pool, timeout_s):
            _abandoned.append(self)
            return
        self._fills.clear()
        self.reader.close()


def _hook(disk: Disk, raised: dict[int, BaseException]) -> Any:
    """What the threads call instead of pread where the disk reads by itself; errors are kept in `raised` by fill."""
    if disk.descriptors:
        return None

    def read(fill: int, file_index: int, address: int, nbytes: int, offset: int) -> int:
        try:
            buffer = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            return disk.read_into(file_index, buffer, offset)
        except BaseException as error:  # whatever it is, the one who waits must learn of it
            raised.setdefault(fill, error)
            return -((isinstance(error, OSError) and error.errno) or errno.EIO)

    return _Read(read)
