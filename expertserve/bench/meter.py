"""What is read before and after a run: the streamer's counters, the kernel's, and the engine's count of forwards.

Owns the reading, no judgement. The three come from different places on purpose: where they disagree, a figure is void.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter, process_time

from expertserve.experts.stats import ExpertStats, PhaseCounters


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one moment.

    Attributes:
        phases: of the streamer, by phase.
        forwards: that the engine has run, drafts not among them.
        draft_steps: forwards of a draft layer.
        disk_bytes: that the kernel has fetched from storage for this process; None where it does not say.
        others_s: seconds of processors that others than this process have had; None where the kernel does not say.
        at_s: when, in seconds of a monotonic clock.
    """

    phases: dict[str, PhaseCounters]
    forwards: int
    draft_steps: int
    disk_bytes: int | None
    others_s: float | None
    at_s: float


class Meter:
    """Reads the counters of this process; `forwards` is the engine's count."""

    def __init__(self, stats: ExpertStats, forwards: Callable[[], int] = lambda: 0) -> None:
        self._stats = stats
        self._forwards = forwards

    def read(self) -> Reading:
        phases = {name: copy(counters) for name, counters in self._stats.phases.items()}
        return Reading(
            phases, self._forwards(), self._stats.draft_steps, disk_bytes(), seconds_of_others(), perf_counter()
        )


def difference(after: PhaseCounters, before: PhaseCounters) -> PhaseCounters:
    """What was counted in between."""
    names = [field.name for field in fields(PhaseCounters)]
    return PhaseCounters(**{name: getattr(after, name) - getattr(before, name) for name in names})


def disk_bytes() -> int | None:
    """Bytes that storage delivered to this process, by /proc/self/io."""
    return _number("/proc/self/io", "read_bytes:")


def seconds_of_others() -> float | None:
    """Processor time of all other processes, and what the host of a virtual machine took, by /proc/stat."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, stolen = ticks
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK") - process_time()


def peak_memory() -> int | None:
    """Most bytes that were resident at once in this process, mapped files among them."""
    peak = _number("/proc/self/status", "VmHWM:")
    return None if peak is None else peak * 1024


def _number(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
