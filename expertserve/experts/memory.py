"""How much memory there is for slots: the machine's, and that of every control group around the process.

Owns the reading of /proc and /sys; decides nothing. File cache that the kernel can drop counts as available, because
slots replace it. Invariant: the answer is never more than any limit in force.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from expertserve.values import MIB, size_text

LEAST_RESERVE_BYTES = 384 * MIB  # the interpreter, kernel work buffers, a burst of requests
_RESERVE_SHARE = 0.04
_UNLIMITED = 1 << 60  # version 1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Attributes:
    nbytes: what a new allocation may take without anything being killed or swapped.
    limited_by: what sets it, for the user.
    """

    nbytes: int
    limited_by: str

    @property
    def reserve_bytes(self) -> int:
        """What to leave alone of it."""
        return max(LEAST_RESERVE_BYTES, int(self.nbytes * _RESERVE_SHARE))


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The least of what the machine and the control groups have left; `root` is where /proc and /sys are."""
    found = [AvailableMemory(_machine_bytes(root), "the machine's memory")]
    for group, limit, used, file_cache in _groups(root):
        if limit < _UNLIMITED:
            left = max(0, limit - max(0, used - file_cache))
            found.append(AvailableMemory(left, f"the control group's limit of {size_text(limit)} ({group})"))
    return min(found, key=lambda memory: memory.nbytes)


def resident_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process occupies; 0 where the system does not say."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _machine_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30  # nothing is known: a budget that small machines bear


def _groups(root: Path) -> list[tuple[str, int, int, int]]:
    """(name, limit, used, droppable file cache) of each memory group around this process, innermost first."""
    groups = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            files = ("memory.max", "memory.current", ("inactive_file", "active_file"))
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            files = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            groups += _walk_up(mount, path.strip("/"), *files)
    return groups


def _walk_up(
    mount: Path, path: str, limit_file: str, used_file: str, cache_fields: tuple[str, str]
) -> list[tuple[str, int, int, int]]:
    """The group and its parents; a container sees its own group as the root of the mount."""
    found = []
    parts = path.split("/") if path else []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None:
            continue
        stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        file_cache = sum(int(stat.get(name, "0")) for name in cache_fields)
        found.append(("/" + "/".join(parts[:depth]), limit, used, file_cache))
    return found


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return _UNLIMITED if text == "max" else int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
