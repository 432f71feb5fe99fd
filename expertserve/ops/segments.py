"""Compiled segments by name and by what of the batch's shape they depend on.

Owns which are kept: the least recently used go first. A segment that was never built is looked up by the whole shape;
once built, only by what its description turned out to use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_SEGMENTS = 512

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Rows, KV cells and asked-for outputs of a batch."""

    rows: int
    n_kv: int
    outputs: int


class SegmentCache(Generic[S]):
    """At most MAX_SEGMENTS; `free` is called with each that goes."""

    def __init__(self, free: Callable[[S], None]) -> None:
        self._free = free
        self._segments: OrderedDict[tuple[str, BatchShape], S] = OrderedDict()
        self._uses: dict[str, tuple[bool, bool]] = {}

    def find(self, name: str, shape: BatchShape) -> S | None:
        """The segment for such batches, if it was built."""
        key = self._key(name, shape)
        segment = self._segments.get(key)
        if segment is not None:
            self._segments.move_to_end(key)
        return segment

    def keep(self, name: str, shape: BatchShape, segment: S, *, uses_kv: bool, uses_outputs: bool) -> None:
        """Keeps a segment that was built for `shape`."""
        self._uses[name] = uses_kv, uses_outputs
        self._segments[self._key(name, shape)] = segment
        self._drop(len(self._segments) - MAX_SEGMENTS)

    def clear(self) -> None:
        """Forgets all of them."""
        self._drop(len(self._segments))

    def _key(self, name: str, shape: BatchShape) -> tuple[str, BatchShape]:
        uses_kv, uses_outputs = self._uses.get(name, (True, True))
        return name, BatchShape(shape.rows, shape.n_kv if uses_kv else 0, shape.outputs if uses_outputs else 0)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._free(self._segments.popitem(last=False)[1])
