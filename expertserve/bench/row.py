"""One row of a comparison: the settings of its process, the process, and its report or why there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from expertserve.bench.memory_cap import limited_memory
from expertserve.config import Settings, as_flags, environment_without_settings
from expertserve.errors import CapacityError
from expertserve.experts.stats import ExpertStats, PhaseCounters
from expertserve.values import size_text

_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure: the settings of one process, and what part it has in its group."""

    settings: Settings
    part: str  # row, resident or page cache


def measure_row(case: Case, stats: ExpertStats, cap: int | None = None) -> dict[str, Any]:
    """Runs a row's process, limited to `cap` bytes of memory; what it counted is added to `stats`."""
    settings = case.settings
    row: dict[str, Any] = {
        "part": case.part,
        "expert_cache": str(settings.expert_cache),
        "reader": settings.reader,
        "lookahead": settings.lookahead,
        "draft": settings.draft,
        "batch": settings.batch,
        "prompt_tokens": settings.prompt_tokens,
        "decode_tokens": settings.decode_tokens,
        "void": None,
        "refused": None,
        "report": None,
    }
    command = [sys.executable, "-m", "expertserve.cli", "bench", settings.model, *as_flags(settings, "bench")]
    try:
        with limited_memory(cap) if cap else nullcontext() as group:
            done = subprocess.run(
                command,
                env=environment_without_settings(),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                preexec_fn=None if group is None else group.enter,
            )
            peak = None if group is None else group.peak_bytes()
    except subprocess.TimeoutExpired:
        return row | {"void": f"its process did not end within {_TIMEOUT_S} s"}
    if done.returncode == 0:
        report = json.loads(done.stdout.splitlines()[-1])
        for name, counters in report["phases"].items():
            stats.phases[name].add(PhaseCounters(**counters))
        return row | {"report": report if peak is None else report | {"peak_bytes": peak}}
    return row | _failure(
        done, "" if cap is None else f" (it held {size_text(peak or 0)} of the {size_text(cap)} of --memory-cap)"
    )


def _failure(done: subprocess.CompletedProcess[str], under: str) -> dict[str, str]:
    """Why a process gave no report: no memory for its first step, or a failure, which voids the row."""
    lines = done.stderr.splitlines()
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    began = any(line.startswith("[expert-stream] steps=") and " steps=0 " not in line for line in lines)
    if done.returncode == CapacityError.exit_code and said and not began:
        return {"refused": said}
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    last = next((line for line in reversed(lines) if not line.startswith("[expert-stream]")), "without a word")
    return {"void": f"its process ended with {ended}: {said or last}{under}"}
