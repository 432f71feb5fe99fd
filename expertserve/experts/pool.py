"""The reader pool: threads that keep the disk at queue depth.

Owns threads, queues and the order of reads: what the forward waits for (urgent) before what was guessed (idle), and a
guess only while no urgent read is queued or under way. It does not know slots or residency. Invariant: every fill
that was submitted comes back exactly once, read or with its error, unless it was cancelled before any of its reads
began.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from expertserve.errors import ExpertReadError
from expertserve.experts.reader import FileReader
from expertserve.gguf.spans import Span

_POLL_S = 1.0  # how often a waiting forward looks whether anyone is still reading


class SliceJob(NamedTuple):
    """One read of a fill."""

    span: Span
    region: memoryview


class Fill:
    """One expert on its way into a slot; made by the streamer, completed by the pool.

    Attributes:
        key: what the streamer knows it by.
        slot: where it goes.
        settle: what the collector does with it once it is complete; gives back the error of a failed one.
        urgent: a layer waits for it.
        shifts: where in its region each slice begins, by role.
        asked: bytes asked of the file.
        advised: all hints were accepted.
        error: why it failed, or None.
    """

    __slots__ = ("advised", "asked", "error", "key", "remaining", "settle", "shifts", "slot", "urgent")

    def __init__(self, key: int, slot: int, slices: int, settle: Callable[[Fill], ExpertReadError | None]) -> None:
        self.key = key
        self.slot = slot
        self.settle = settle
        self.urgent = True
        self.remaining = slices
        self.shifts = [0] * slices
        self.asked = 0
        self.advised = True
        self.error: BaseException | None = None


_Queued = tuple[Fill, int, SliceJob]


class ReaderPool:
    """`threads` readers over one FileReader; one thread submits and collects."""

    def __init__(self, reader: FileReader, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a reader pool needs a thread, not {threads}")
        self.reader = reader
        self.in_flight = 0  # fills submitted and not yet collected
        self._urgent: deque[_Queued] = deque()
        self._idle: deque[_Queued] = deque()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each job, more do no harm
        self._done: queue.SimpleQueue[Fill] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._urgent_open = 0  # urgent reads queued or under way
        self._idle_running = 0
        self._idle_limit = max(1, threads // 2)  # so that demand finds free threads
        self._reading = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._wanted = threads
        self._spawn()

    # -- the forward's side ----------------------------------------------------------------------------------------

    def submit(self, fill: Fill, jobs: Sequence[SliceJob], *, urgent: bool) -> None:
        """Queues all reads of a fill."""
        fill.urgent = urgent
        self.in_flight += 1
        with self._lock:
            if urgent:
                self._urgent_open += len(jobs)
            (self._urgent if urgent else self._idle).extend((fill, i, job) for i, job in enumerate(jobs))
        for _ in jobs:
            self._tokens.put(None)

    def promote(self, fill: Fill) -> None:
        """A layer waits for a guess: its reads that have not begun go to the urgent ones."""
        with self._lock:
            if fill.urgent:
                return
            fill.urgent = True
            mine = [queued for queued in self._idle if queued[0] is fill]
            for queued in mine:
                self._idle.remove(queued)
            self._urgent.extend(mine)
            self._urgent_open += len(mine)
        for _ in mine:
            self._tokens.put(None)

    def cancel(self, fill: Fill) -> bool:
        """Takes a guess back if none of its reads has begun."""
        with self._lock:
            mine = [queued for queued in self._idle if queued[0] is fill]
            if len(mine) != len(fill.shifts):
                return False
            for queued in mine:
                self._idle.remove(queued)
        self.in_flight -= 1
        return True

    def collect(self, *, wait: bool) -> list[Fill]:
        """Fills that completed since the last call; with `wait`, at least one."""
        fills: list[Fill] = []
        if wait and self._done.empty():
            fills.append(self._wait())
        while not self._done.empty():
            fills.append(self._done.get())
        self.in_flight -= len(fills)
        return fills

    def _wait(self) -> Fill:
        while True:
            try:
                return self._done.get(timeout=_POLL_S)
            except queue.Empty:
                if self._closing or not any(thread.is_alive() for thread in self._threads):
                    raise ExpertReadError("the reader threads are gone; restart") from None

    @property
    def pending_reads(self) -> int:
        """Reads queued or under way."""
        with self._lock:
            return len(self._urgent) + len(self._idle) + self._reading

    @property
    def busy_s(self) -> float:
        """Seconds so far with at least one read under way."""
        with self._lock:
            return self._busy_s + (perf_counter() - self._busy_since if self._reading else 0.0)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops the threads; reads under way end first, queued ones never begin."""
        self._closing = True
        with self._lock:
            self._urgent.clear()
            self._idle.clear()
        for _ in self._threads:
            self._tokens.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self.reader.close()

    # -- the readers' side -----------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        for i in range(self._wanted):
            thread = threading.Thread(target=self._work, name=f"expert-reader-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            self._tokens.get()
            while (taken := self._next()) is not None:
                self._read(*taken)
                del taken  # a slot's buffer must not live on in a thread that waits
            if self._closing:
                return

    def _next(self) -> tuple[_Queued, bool] | None:
        """Takes the next read there is, and whether it is a guess."""
        with self._lock:
            if self._urgent:
                queued, guessed = self._urgent.popleft(), False
            elif self._idle and self._urgent_open == 0 and self._idle_running < self._idle_limit:
                queued, guessed = self._idle.popleft(), True
                self._idle_running += 1
            else:
                return None
            self._reading += 1
            if self._reading == 1:
                self._busy_since = perf_counter()
            return queued, guessed

    def _read(self, queued: _Queued, guessed: bool) -> None:
        fill, index, job = queued
        result, error = None, None
        try:
            if fill.error is None:
                result = self.reader.read(job.span, job.region)
        except BaseException as caught:  # whatever it is, the one who waits must learn of it
            error = caught
        with self._lock:
            if result is not None:
                fill.shifts[index] = result.shift
                fill.asked += result.asked
                fill.advised &= result.advised
            elif fill.error is None:
                fill.error = error
            fill.remaining -= 1
            done = fill.remaining == 0
            wake = self._end_read(guessed)
        if done:
            self._done.put(fill)
        for _ in range(wake):
            self._tokens.put(None)

    def _end_read(self, guessed: bool) -> int:
        """Books a read's end; returns how many other threads may now begin a guess."""
        self._reading -= 1
        if self._reading == 0:
            self._busy_s += perf_counter() - self._busy_since
        if guessed:
            self._idle_running -= 1
            return 0  # this thread itself takes the next one
        self._urgent_open -= 1
        return min(len(self._idle), self._idle_limit) if self._urgent_open == 0 else 0
