"""Where the intermediate values of a segment lie: one area that all segments use, since they run one after another.

Owns the placement of values by their lifetimes. Invariant: two values whose lifetimes overlap do not share bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class Value:
    """Bytes that one command writes and later ones read.

    Attributes:
        first, last: the commands that use it, by number.
        address: where it lies; None until it is placed.
    """

    nbytes: int
    first: int
    last: int
    address: int | None = None


def place(values: Sequence[Value]) -> tuple[dict[Value, int], int]:
    """Offsets of values in the area, and the bytes it needs; the first gap that is wide enough is taken."""
    offsets: dict[Value, int] = {}
    area = 0
    for value in sorted(values, key=lambda value: value.first):
        others = [other for other in offsets if other.last >= value.first and value.last >= other.first]
        at = 0
        for other in sorted(others, key=offsets.__getitem__):
            if offsets[other] - at >= value.nbytes:
                break
            at = max(at, _aligned(offsets[other] + other.nbytes))
        offsets[value] = at
        area = max(area, at + _aligned(value.nbytes))
    return offsets, area


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
