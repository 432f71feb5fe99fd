"""Zeroed anonymous memory: page-aligned, private, in huge pages where the kernel gives them.

A page exists once it is touched. Private memory matters: shared anonymous memory is accounted as a file and gets no
huge pages.
"""

from __future__ import annotations

import mmap

from expertserve.errors import CapacityError
from expertserve.values import size_text

HUGE_PAGES_FROM = 4 << 20


def map_anonymous(nbytes: int, purpose: str, *, huge_pages: bool = True) -> mmap.mmap:
    """Maps `nbytes` (at least 1).

    Raises:
        CapacityError: the memory was refused; the message says for what `purpose`.
    """
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(-1, nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(f"no memory for {purpose}: {size_text(nbytes)} were refused ({error})") from error
    if huge_pages and nbytes >= HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: slower by a few per cent, no less right
    return memory
