"""How many CPUs this process may use, and how many threads it should compute with.

May use are those in its affinity mask, no more than the CPU quota of its control group; of these each physical core
should have one thread, hyperthread siblings counted once. It does not know what the threads do. At least one, whatever
cannot be read.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_DIR = Path("/sys/devices/system/cpu")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cores(cpus: set[int], cpu_dir: Path) -> int:
    """Distinct cores among `cpus`; a CPU whose topology is unknown counts as a core of its own."""
    cores = set()
    for cpu in cpus:
        siblings = _read(cpu_dir / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return len(cores)


def _quota(proc_cgroup: Path, root: Path) -> float:
    """CPUs' worth of time the tightest control group of this process (v1 or v2) allows; inf without a limit."""
    limit = math.inf
    for line in (_read(proc_cgroup) or "").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        group = base / name.lstrip("/")
        for level in (group, *group.parents):
            if not level.is_relative_to(base):
                break
            limit = min(limit, _level_quota(level, v2=not controllers))
    return limit


def _level_quota(level: Path, *, v2: bool) -> float:
    if v2:
        quota, _, period = (_read(level / "cpu.max") or "max").partition(" ")
    else:
        quota, period = _read(level / "cpu.cfs_quota_us") or "-1", _read(level / "cpu.cfs_period_us") or ""
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else math.inf
    except ValueError:
        return math.inf


def physical_cores(
    *, cpu_dir: Path = _CPU_DIR, proc_cgroup: Path = _PROC_CGROUP, cgroup_root: Path = _CGROUP_ROOT
) -> int:
    """Physical cores this process may use, as its affinity mask and control group limit them."""
    cores = _cores(_affinity(), cpu_dir)
    quota = _quota(proc_cgroup, cgroup_root)
    return max(1, cores if math.isinf(quota) else min(cores, math.floor(quota)))


def usable_cpus(*, proc_cgroup: Path = _PROC_CGROUP, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """CPUs this process may keep busy at once, as its affinity mask and control group limit them; a part is one."""
    quota = _quota(proc_cgroup, cgroup_root)
    cpus = len(_affinity())
    return max(1, cpus if math.isinf(quota) else min(cpus, math.ceil(quota)))
