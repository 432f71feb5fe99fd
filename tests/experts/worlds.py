"""Small worlds for tests: towers at awkward offsets, a fake disk with delays and faults, lanes over both."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from expertserve.errors import ExpertReadError
from expertserve.experts.batch import SlotBatch
from expertserve.experts.budget import SlotPlan, plan_slots, size_classes
from expertserve.experts.disk import Disk
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.reader import BufferedReader, DirectReader, FileReader
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.spans import ExpertTower
from expertserve.gguf.tensor import TensorInfo
from expertserve.values import ExpertBudget

_uids = itertools.count(1_000_000)
ROLES = ("gate", "up", "down")
Fault = Callable[[int, int, int], int | OSError | None]


class FakeDisk(Disk):
    """Files in memory.

    Attributes:
        fault: called with (file, offset, length); returns an error to raise, bytes to deliver at most, or None.
        delay_s: of every read.
        gate: reads wait until it is set.
        reads: every read as (file, offset, length).
    """

    def __init__(self, files: Sequence[bytes]) -> None:
        self.files = list(files)
        self.fault: Fault = lambda file_index, offset, length: None
        self.delay_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[tuple[int, int, int]] = []
        self.changed = False
        self.closed = False

    @property
    def descriptors(self) -> Sequence[int]:
        return ()

    def read_into(self, file_index: int, buffer: memoryview, offset: int) -> int:
        self.reads.append((file_index, offset, len(buffer)))
        self.gate.wait(20)
        if self.delay_s:
            time.sleep(self.delay_s)
        verdict = self.fault(file_index, offset, len(buffer))
        if isinstance(verdict, OSError):
            raise verdict
        data = self.files[file_index][offset : offset + len(buffer)]
        data = data if verdict is None else data[:verdict]
        buffer[: len(data)] = data
        return len(data)

    def name(self, file_index: int) -> str:
        return f"fake-{file_index}.gguf"

    def check_unchanged(self, file_index: int) -> None:
        if self.changed:
            raise ExpertReadError(f"{self.name(file_index)}: the file changed on disk while loaded; restart")

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """Towers, the files they lie in, and what was computed with them."""

    towers: dict[int, ExpertTower]
    files: list[bytes]
    computed: list[tuple[int, int, int]] = field(default_factory=list)  # (layer, pair, expert)

    def expert_bytes(self, layer: int, expert: int, role: int) -> bytes:
        span = self.towers[layer].span(expert, role)
        return self.files[span.file_index][span.offset : span.offset + span.nbytes]

    def compute(self, ids: NDArray[np.int32]) -> Callable[[SlotBatch], None]:
        """A kernel that checks every byte of every slice it is given and notes the pairs."""
        flat = ids.ravel()

        def kernel(batch: SlotBatch) -> None:
            for group in range(len(batch.group_start) - 1):
                pairs = batch.pairs[batch.group_start[group] : batch.group_start[group + 1]]
                assert len(pairs), "an empty group"
                expert = int(flat[pairs[0]])
                for role, addresses in enumerate(batch.slices):
                    want = self.expert_bytes(batch.layer, expert, role)
                    assert ctypes.string_at(int(addresses[group]), len(want)) == want, (batch.layer, expert, role)
                for pair in pairs:
                    assert flat[pair] == expert, "a pair in another expert's group"
                    self.computed.append((batch.layer, int(pair), expert))

        return kernel

    def run(self, lane: ExpertLane, layer: int, ids: NDArray[np.int32]) -> None:
        """Runs a layer and proves that each pair was computed once with the right bytes."""
        self.computed.clear()
        lane.run_layer(layer, ids, self.compute(ids))
        assert sorted(pair for _, pair, _ in self.computed) == list(range(ids.size))


def make_world(
    layers: int = 3,
    experts: int = 8,
    slices: Sequence[int] = (1536, 1024, 2080),
    *,
    files: int = 2,
    seed: int = 0,
    odd_layers: dict[int, Sequence[int]] | None = None,
    offset_step: int = 32,
) -> World:
    """Towers whose slices lie at multiples of `offset_step` that are no multiples of anything larger."""
    rng = np.random.default_rng(seed)
    ends = [int(rng.integers(1, 9)) * offset_step for _ in range(files)]
    towers = {}
    for layer in range(layers):
        sizes = (odd_layers or {}).get(layer, slices)
        tensors = []
        for role, nbytes in enumerate(sizes):
            file_index = (layer + role) % files
            start = ends[file_index]
            tensors.append(_tensor(f"blk.{layer}.{ROLES[role]}", experts, nbytes, file_index, start))
            ends[file_index] = start + experts * nbytes + int(rng.integers(0, 5)) * offset_step
        towers[layer] = ExpertTower(next(_uids), layer, experts, tuple(tensors), ROLES[: len(sizes)])
    return World(towers, [rng.bytes(end) for end in ends])


def _tensor(name: str, experts: int, nbytes: int, file_index: int, offset: int) -> TensorInfo:
    shape = (experts, 1, nbytes // 4)
    return TensorInfo(name, shape, GGMLQuantizationType.F32, file_index, offset, experts * nbytes)


def plan_world(world: World, slots: int, *, top_k: int = 2, align: int = 1) -> SlotPlan:
    return plan_slots(size_classes(world.towers, align), ExpertBudget("slots", slots), top_k)


@contextmanager
def open_lane(
    world: World,
    slots: int,
    *,
    top_k: int = 2,
    disk: FakeDisk | None = None,
    align: int | None = None,
    stats: ExpertStats | None = None,
    **settings: object,
) -> Iterator[ExpertLane]:
    """A lane over a fake disk; `align` makes its reads direct."""
    disk = disk or FakeDisk(world.files)
    reader: FileReader = BufferedReader(disk) if align is None else DirectReader(disk, align)
    plan = plan_world(world, slots, top_k=top_k, align=reader.align)
    silent = stats or ExpertStats(every=0, emit=lambda line: None)
    lane = ExpertLane.assemble(plan, reader, LaneSettings(**{"threads": 4, **settings}), silent)  # type: ignore[arg-type]
    try:
        yield lane
        for streamer in lane.streamers:
            streamer.cache.check_integrity()
    finally:
        disk.gate.set()
        lane.close()


def write_files(world: World, folder: Path) -> list[Path]:
    """The world's files on a real disk."""
    paths = []
    for index, data in enumerate(world.files):
        path = folder / f"world-{index}.bin"
        path.write_bytes(data)
        paths.append(path)
    return paths


def row(*experts: int) -> NDArray[np.int32]:
    """Ids of one token."""
    return np.array([experts], np.int32)


def threads_left(wanted: int, patience_s: float = 10.0) -> int:
    """Threads of this process; a joined thread stays listed for a moment, so it looks again while there are more."""
    end = time.monotonic() + patience_s
    while (count := len(os.listdir("/proc/self/task"))) > wanted and time.monotonic() < end:
        time.sleep(0.01)
    return count
