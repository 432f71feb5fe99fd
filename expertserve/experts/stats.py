"""The statistics of expert streaming: plain counters by phase, written by the one thread that runs the forward.

Owns the counters, the two machine-readable stderr lines and the snapshot behind `--stats-json` and `/metrics`;
measures nothing itself. Invariants: `fills == misses + lookahead_reads + preloads - failed_misses` and a hit moves no
byte. Lines go to file descriptor 2 in one write, so that they survive a replaced `sys.stderr` and cannot be torn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from expertserve.values import GIB

PHASES = ("prefill", "decode", "outside")


@dataclass(slots=True)
class PhaseCounters:
    """What happened in the steps of one phase; `outside` holds what happened between steps (preloads).

    Attributes:
        steps: forwards that ended.
        rows: rows they computed.
        hits: distinct experts a layer asked for that were resident, or already being read by look-ahead.
        misses: distinct experts a layer asked for that had to be read.
        lifted: the part of `hits` that came up from the host tier.
        kept: the part of `evictions` that went down into the host tier.
        evictions: resident experts that gave up their slot.
        fills: experts read in full, for whatever reason.
        lookahead_reads: fills asked for by look-ahead.
        preloads: fills asked for by a preload.
        bytes: bytes asked of the file.
        exhausted: experts refused because every slot was pinned.
        advised: experts whose page-aligned read-ahead hints were all accepted.
        forced: experts served unstreamed because a test switch asked for it.
        failed: experts whose read failed.
        failed_misses: the part of `failed` a layer was waiting for.
        lookahead_used: look-ahead reads a layer asked for later.
        lookahead_late: the part of `lookahead_used` still being read when it was asked for.
        lookahead_wasted: look-ahead reads evicted or expired unused.
        computes: calls of the expert kernel.
        wall_s: seconds inside steps.
        stalled_s: seconds the forward waited for reads with nothing to compute.
        reading_s: seconds with at least one read under way.
        expert_s: seconds inside the expert kernel.
        lane_s: seconds of the lane's own bookkeeping.
    """

    steps: int = 0
    rows: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    fills: int = 0
    lookahead_reads: int = 0
    preloads: int = 0
    bytes: int = 0
    exhausted: int = 0
    advised: int = 0
    forced: int = 0
    failed: int = 0
    failed_misses: int = 0
    drafted: int = 0
    accepted: int = 0
    lifted: int = 0
    kept: int = 0
    lookahead_used: int = 0
    lookahead_late: int = 0
    lookahead_wasted: int = 0
    computes: int = 0
    wall_s: float = 0.0
    stalled_s: float = 0.0
    reading_s: float = 0.0
    expert_s: float = 0.0
    lane_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """Seconds of the steps that were neither waiting for reads nor bookkeeping of the lane."""
        return max(0.0, self.wall_s - self.stalled_s - self.lane_s)

    @property
    def roofline_ratio(self) -> float:
        """Wall time over the larger of reading and computing; 1.0 is perfect overlap, 0.0 nothing ran."""
        bound = max(self.reading_s, self.computing_s)
        return self.wall_s / bound if bound > 0 else 0.0

    def add(self, other: PhaseCounters) -> None:
        for field in fields(PhaseCounters):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def write_line(line: str) -> None:
    """Writes one line to the real stderr; a closed stderr must not take the process down."""
    data = (line + "\n").encode()
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return


def format_totals(total: PhaseCounters, read_mode: str) -> str:
    """The statistics line; the first eight fields are a fixed format, more may follow at the end."""
    return (
        f"[expert-stream] steps={total.steps} hits={total.hits} misses={total.misses} evictions={total.evictions} "
        f"fills={total.fills} bytes={total.bytes} exhausted={total.exhausted} advised={total.advised} "
        f"forced={total.forced} lookahead={total.lookahead_reads} preloads={total.preloads} failed={total.failed} "
        f"mode={read_mode} drafted={total.drafted} accepted={total.accepted} lifted={total.lifted} kept={total.kept}"
    )


class ExpertStats:
    """Counters of every lane of one process (target and draft may share one object).

    Attributes:
        current: counters of the phase in force; the forward's thread adds to it directly.
        read_mode: read mode in force, `none` until something streams.
        about: constants of the run for the snapshot (slots, slot_bytes, resident_bytes, ...).
    """

    def __init__(self, *, every: int = 16, emit: Callable[[str], None] = write_line) -> None:
        self.phases = {name: PhaseCounters() for name in PHASES}
        self.current = self.phases["outside"]
        self.read_mode = "none"
        self.about: dict[str, Any] = {}
        self.draft_steps = 0
        self.silenced = False
        self._every = every
        self._emit = emit

    def enter_phase(self, decode_rows: int, prefill_rows: int) -> None:
        """A step begins; a batch with any prompt row counts as prefill."""
        phase = self.phases["prefill" if prefill_rows else "decode"]
        phase.rows += decode_rows + prefill_rows
        self.current = phase

    def leave_phase(self, *, draft: bool) -> None:
        """A step ended: count it, and print the periodic line when it is due."""
        self.current.steps += 1
        self.current = self.phases["outside"]
        self.draft_steps += draft
        if self._every and not self.silenced and self.steps % self._every == 0:
            self._emit(self.line())

    def count_drafts(self, drafted: int, accepted: int, verdict: str) -> None:
        """So many tokens were drafted and taken in a step of decode; `verdict` says whether drafting is on, and why."""
        self.phases["decode"].drafted += drafted
        self.phases["decode"].accepted += accepted
        self.about["draft"] = verdict

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases.values())

    def total(self) -> PhaseCounters:
        total = PhaseCounters()
        for phase in self.phases.values():
            total.add(phase)
        return total

    def line(self) -> str:
        return format_totals(self.total(), self.read_mode)

    def announce(self, *, slots: int, slot_bytes: int, resident_bytes: int, **more: Any) -> None:
        """Prints the ON line of a lane and keeps its constants for the snapshot."""
        self.about.update(slots=slots, slot_bytes=slot_bytes, resident_bytes=resident_bytes, **more)
        extra = "".join(f" {name}={value}" for name, value in more.items())
        self._emit(
            f"[expert-stream] ON slots={slots} slot_bytes={slot_bytes} resident={resident_bytes / GIB:.2f} GiB{extra}"
        )

    def snapshot(self) -> dict[str, Any]:
        """Every number, for JSON and metrics; safe to call from any thread."""
        phases = {}
        for name, counters in self.phases.items():
            phases[name] = asdict(counters) | {
                "computing_s": counters.computing_s,
                "roofline_ratio": counters.roofline_ratio,
            }
        total = self.total()
        return {
            **asdict(total),
            "read_mode": self.read_mode,
            "draft_steps": self.draft_steps,
            "roofline_ratio": self.phases["decode"].roofline_ratio,
            "about": dict(self.about),
            "phases": phases,
        }


def merged(many: Iterable[ExpertStats]) -> tuple[PhaseCounters, str]:
    """Totals over several statistics, with the read modes seen."""
    total, modes = PhaseCounters(), []
    for stats in many:
        total.add(stats.total())
        if stats.read_mode not in modes:
            modes.append(stats.read_mode)
    return total, "+".join(modes) or "none"
