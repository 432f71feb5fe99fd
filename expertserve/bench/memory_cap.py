"""A limit on the memory that one process and what it starts may use, page cache of what it reads among it.

Owns a control group made beside those there are, of version 1 or 2, and removes it. Where groups may not be made it
says so; a limit that does not bind is never pretended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from expertserve.errors import ConfigError

_V1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2 = ("memory.max", "memory.peak")
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a limit."""

    folder: Path
    peak_file: str

    def enter(self) -> None:
        """Moves the calling process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """Most bytes the group held at once; None where its kernel does not say."""
        try:
            return int((self.folder / self.peak_file).read_text())
        except (OSError, ValueError):
            return None


@contextmanager
def limited_memory(nbytes: int, root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """A group limited to `nbytes`; `root` is where /proc and /sys are.

    Raises:
        ConfigError: no group can be made here.
    """
    group = _make(nbytes, root)
    try:
        yield group
    finally:
        _remove(group.folder)


def _make(nbytes: int, root: Path) -> MemoryGroup:
    refused = "no memory controller"
    for parent, (limit_file, peak_file) in _parents(root):
        folder = parent / f"expertserve-bench-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            refused = f"{folder}: {error.strerror}"
            continue
        try:
            with open(folder / limit_file, "r+") as file:  # a group without the controller has no such file
                file.write(str(nbytes))
            return MemoryGroup(folder, peak_file)
        except OSError as error:
            refused = f"{folder / limit_file}: {error.strerror}"
            _remove(folder)
    raise ConfigError(f"--memory-cap: no control group can be made ({refused}); run as root, or where groups are yours")


def _parents(root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders in which a group could be made: in this process's own, or, as version 2 demands, beside it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory" / path.strip("/"), _V1
        elif number == "0":
            own = root / "sys/fs/cgroup" / path.strip("/")
            yield (own.parent if path.strip("/") else own), _V2


def _remove(folder: Path) -> None:
    """A group can be removed a moment after its last process has gone."""
    ends = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends:
        with suppress(FileNotFoundError):
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.05)
                continue
        return
