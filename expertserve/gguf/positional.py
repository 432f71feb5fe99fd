"""Reading at a position without moving a shared file pointer.

Owns the one loop that fills a buffer from a file, with the system's positional read where there is one and a lock
around seek and read elsewhere. Invariant: the number it returns is short only if the file ended.
"""

from __future__ import annotations

import io
import os
import threading

_MAX_READ_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call
_seek_lock = threading.Lock()


def read_at(file: io.FileIO, out: memoryview, offset: int) -> int:
    """Fill `out` (bytes) from `offset` on; returns how many bytes there were. Raises OSError."""
    done = 0
    while done < out.nbytes:
        count = _read_once(file, out[done : done + _MAX_READ_BYTES], offset + done)
        if count == 0:
            break
        done += count
    return done


def seek_and_read(file: io.FileIO, out: memoryview, offset: int) -> int:
    """One read at `offset` on systems that have no positional read into a buffer."""
    with _seek_lock:
        file.seek(offset)
        return file.readinto(out) or 0


if hasattr(os, "preadv"):

    def _read_once(file: io.FileIO, out: memoryview, offset: int) -> int:
        return os.preadv(file.fileno(), [out], offset)

else:
    _read_once = seek_and_read
