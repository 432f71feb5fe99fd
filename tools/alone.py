"""Whether a measurement had the machine to itself: what other processes, and a virtual machine's host, took."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUIET_CORES = 0.3
"""A figure beside which others kept more cores busy does not count."""


def busy_s() -> float:
    """CPU seconds the whole machine has used, and those a virtual machine's host took."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


def run(command: Sequence[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a process to its end, its output captured; also the cores that others used meanwhile."""
    began, busy = time.perf_counter(), busy_s()
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
    return done, round(max(0.0, busy_s() - busy - used) / (time.perf_counter() - began), 2)
