"""Where an expert's slices lie inside a slot.

Owns the arithmetic of regions: each role (gate, up, down, ...) has one, with head and tail room so that the aligned
range of the file that encloses the slice can be read straight into it. Invariant: regions do not overlap, start
aligned and lie inside the slot; slots are whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096
KERNEL_ALIGN = 64  # a slice starts on a cache line unless a direct read shifts it
SHIFT_ALIGN = 32  # what kernels need of a slice's address: a direct read may shift it by a multiple of this


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Layout of every slot of one size class.

    Attributes:
        slice_bytes: bytes of one expert's slice, by role.
        offsets: start of each role's region in the slot.
        region_bytes: length of each region, room included.
        slot_bytes: length of a slot, a multiple of the page.
    """

    slice_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    region_bytes: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def plan(cls, slice_bytes: Sequence[int], align: int) -> SlotLayout:
        """Lays out slices for reads at multiples of `align` (1 where reads need no alignment)."""
        grain = max(align, KERNEL_ALIGN)
        offsets, regions, end = [], [], 0
        for nbytes in slice_bytes:
            region = round_up(nbytes + align - 1, grain)
            offsets.append(end)
            regions.append(region)
            end += region
        return cls(tuple(slice_bytes), tuple(offsets), tuple(regions), round_up(end, PAGE_BYTES))

    @property
    def expert_bytes(self) -> int:
        return sum(self.slice_bytes)
