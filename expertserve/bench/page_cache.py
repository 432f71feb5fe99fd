"""The page cache of a model's files: dropped, filled and looked at.

Owns what "cold" and "warm" mean here: less than COLD or at least WARM of the files' pages are in memory, as mincore
says.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from expertserve.errors import ConfigError

COLD, WARM = 0.01, 0.99
_PIECE = 16 << 20


def drop(paths: Sequence[Path]) -> None:
    """Asks the kernel to forget the files.

    Raises:
        ConfigError: it did not, as where another process has them mapped.
    """
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError("--page-cache cold: this system cannot drop a file from its cache; use any")
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # a page that is yet to be written stays
    forget(paths)
    if (share := cached_share(paths)) > COLD:
        raise ConfigError(f"--page-cache cold: {share:.0%} of the model stays cached; does another process map it?")


def forget(paths: Sequence[Path]) -> None:
    """Asks the kernel to forget what it can of the files, where it can be asked; whether it did is not looked at."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(paths: Sequence[Path]) -> None:
    """Reads the files once.

    Raises:
        ConfigError: memory does not hold them.
    """
    piece = bytearray(_PIECE)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    if (share := cached_share(paths)) < WARM:
        raise ConfigError(f"--page-cache warm: only {share:.0%} of the model stays cached; use cold")


def cached_share(paths: Sequence[Path]) -> float:
    """Share of the files' pages that are in memory.

    Raises:
        ConfigError: a file is no longer there, or the system does not say.
    """
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    pages = cached = 0
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: the file is no longer there; let it lie while it is measured")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
            count = -(-len(mapping) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * count)()
            at = ctypes.c_char.from_buffer(mapping)
            result = mincore(ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(len(mapping)), found)
            del at
            if result != 0:
                raise ConfigError(
                    f"{path}: the system does not say what of it is cached: {os.strerror(ctypes.get_errno())}"
                )
            pages += count
            cached += sum(byte & 1 for byte in bytes(found))
    return cached / pages
