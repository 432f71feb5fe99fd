"""What the counters of a row say: its speeds, where a token's time goes, and what memory and storage allow at most.

Owns the roofline. The rates that bound it are the larger of a probe's before the rows and of what a row reached: a
probe is a moment, in which a disk that idled or a busy host may deliver less than it does later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import harmonic_mean, median
from typing import Any

from expertserve.bench.disk_probe import probe_disk
from expertserve.bench.memory_probe import memory_rate
from expertserve.bench.plan import Sizes, model_sizes
from expertserve.bench.verdict import SLACK_BYTES, Report
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, and what showed them: `probe`, or the row that reached them."""

    bytes_s: float
    shown_by: str

    def or_more(self, bytes_s: float, shown_by: str) -> Bandwidth:
        return Bandwidth(bytes_s, shown_by) if bytes_s > self.bytes_s else self


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a token here: rates of memory and storage, and what of the model a step needs."""

    sizes: Sizes
    memory: Bandwidth
    disk: Bandwidth | None

    def raised_by(self, rows: Sequence[tuple[str, Report]]) -> Machine:
        """With the rates that labelled rows have reached, where those are larger."""
        memory, disk = self.memory, self.disk
        for label, report in rows:
            decode = report["phases"]["decode"]
            computing_s = decode["wall_s"] - decode["stalled_s"] - decode["lane_s"]
            if computing_s > 0:
                memory = memory.or_more(self._used(report) / computing_s, label)
            for name, phase in report["phases"].items():
                reading_s, read = phase["reading_s"] or phase["wall_s"], _read(report, name)
                if read > SLACK_BYTES and reading_s > 0:
                    disk = (disk or Bandwidth(0.0, "probe")).or_more(read / reading_s, label)
        return replace(self, memory=memory, disk=disk)

    def roofline(self, report: Report) -> float | None:
        """Decode tokens a second if memory and storage did nothing but deliver what was used, side by side."""
        if not report["decoded"]:
            return None
        read = _read(report, "decode")
        if read and self.disk is None:
            return None
        reading_s = read / self.disk.bytes_s if read and self.disk else 0.0
        return float(report["decoded"] / max(self._used(report) / self.memory.bytes_s, reading_s))

    def _used(self, report: Report) -> float:
        """Bytes of weights that decode computed with."""
        decode = report["phases"]["decode"]
        each = self.sizes.expert_bytes / self.sizes.experts
        dense = self.sizes.token_bytes - self.sizes.working_bytes
        return float(dense * decode["steps"] + each * (decode["hits"] + decode["misses"] + decode["forced"]))


def _read(report: Report, phase: str) -> int:
    """Bytes from storage in a phase: the kernel's count, or where it has none what was asked of the file."""
    return int((report["disk_bytes"] or {}).get(phase, report["phases"][phase]["bytes"]))


def probe(settings: Settings) -> Machine:
    """Times memory, and reads of the model's experts."""
    with closing(GGUFFile.open(model_path(settings.model))) as file:
        model = load_model(file)
        sizes = model_sizes(model)
        with probe_disk(model, settings.io_threads) as probe:
            rate = probe.rate
    disk = None if rate is None else Bandwidth(max(rate.fastest, rate.first), "probe")
    return Machine(sizes, Bandwidth(memory_rate(settings.threads), "probe"), disk)


def figures(report: Report, machine: Machine) -> dict[str, Any]:
    """What is shown of a row that counts."""
    prefill, decode, tokens = report["phases"]["prefill"], report["phases"]["decode"], report["decoded"]
    disk, rates = report["disk_bytes"], report["decode_tok_s_runs"]
    token_ms = 1000 / tokens if tokens else 0.0
    roofline = machine.roofline(report)
    return {
        "slots": report["slots"],
        "read_mode": report["reader"],
        "decode_tok_s": median(rates) if rates else None,
        "decode_tok_s_least": min(rates, default=None),
        "decode_tok_s_most": max(rates, default=None),
        "prefill_tok_s": median(report["prefill_tok_s_runs"]),
        "first_token_ms": median(report["first_token_ms_runs"]),
        "interval_p50_ms": report["interval_p50_ms"],
        "interval_p99_ms": report["interval_p99_ms"],
        "prefill_hit_rate": _hit_rate(prefill),
        "decode_hit_rate": _hit_rate(decode),
        "file_bytes_token": decode["bytes"] / tokens if tokens else None,
        "disk_bytes_token": disk["decode"] / tokens if disk and tokens else None,
        "stall_ms_token": decode["stalled_s"] * token_ms,
        "expert_ms_token": decode["expert_s"] * token_ms,
        "lane_ms_token": decode["lane_s"] * token_ms,
        "compute_ms_token": max(0.0, decode["wall_s"] - decode["stalled_s"] - decode["lane_s"]) * token_ms,
        "roofline_tok_s": roofline,
        "of_roofline": harmonic_mean(rates) / roofline if rates and roofline else None,  # all runs, as the roofline is
        "peak_bytes": report["peak_bytes"],
        "other_cores": report["other_cores"],
    }


def _hit_rate(phase: Mapping[str, Any]) -> float | None:
    asked = phase["hits"] + phase["misses"]
    return phase["hits"] / asked if asked else None
