"""`expertserve bench` over several configurations, with controls.

Each row is `expertserve bench` in a process of its own with settings of one value each. Beside what was asked for,
every combination of batch, context and draft gets two controls: all experts in slots, and none, left to the page
cache. Outputs are held against the first control, or, where it does not fit, against the row with most slots. A row
whose figures do not count has the reason in their place, and the exit status is 1.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from expertserve import log
from expertserve.bench.disk_probe import try_disk
from expertserve.bench.lab import uses
from expertserve.bench.memory_cap import limited_memory
from expertserve.bench.memory_probe import memory_rate
from expertserve.bench.plan import Sizes, model_sizes
from expertserve.bench.plots import plot_sweep
from expertserve.bench.replay import read_requests
from expertserve.bench.verdict import Report, void_reason
from expertserve.config import Settings, as_flags, environment_without_settings
from expertserve.data import model_path
from expertserve.errors import CapacityError, ConfigError
from expertserve.experts.factory import reads_mapped_files
from expertserve.experts.stats import ExpertStats, PhaseCounters
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.values import ExpertBudget

LISTS = {
    "budgets": "expert_cache",
    "readers": "reader",
    "lookaheads": "lookahead",
    "batches": "batch",
    "contexts": "prompt_tokens",
    "drafts": "draft",
}
_GROUP = ("batches", "contexts", "drafts")  # rows that differ in these compute other things
_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Case:
    """One row to measure: the settings of its process, and what part it has in its group."""

    settings: Settings
    part: str  # row, resident or page cache

    @property
    def group(self) -> tuple[object, ...]:
        return tuple(getattr(self.settings, LISTS[name]) for name in _GROUP)


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a token here: bytes a second of memory and storage, and what of the model a step needs."""

    sizes: Sizes
    memory: float
    disk: float | None

    def roofline(self, report: Report) -> float | None:
        """Decode tokens a second if memory and storage did nothing but deliver what was used, side by side."""
        decode, tokens = report["phases"]["decode"], report["decoded"]
        if not tokens:
            return None
        each = self.sizes.expert_bytes / self.sizes.experts
        dense = self.sizes.token_bytes - self.sizes.working_bytes
        used = dense * decode["steps"] + each * (decode["hits"] + decode["misses"] + decode["forced"])
        read = decode["bytes"] if report["disk_bytes"] is None else report["disk_bytes"]["decode"]
        if read and self.disk is None:
            return None
        return float(tokens / max(used / self.memory, read / self.disk if read and self.disk else 0.0))


def is_sweep(settings: Settings) -> bool:
    """Whether settings name more than one configuration, or ask for what only a sweep gives."""
    return any(getattr(settings, name) for name in LISTS) or any(
        (settings.results_csv, settings.results_json, settings.memory_cap)
    )


def cases(settings: Settings) -> list[Case]:
    """Rows and controls, group by group, a group's resident control first."""
    none: dict[str, Any] = dict.fromkeys(LISTS, ())
    none |= dict.fromkeys(("plot", "memory_cap", "results_csv", "results_json", "stats_json", "trace", "profile"))
    plain = replace(settings, **none)
    found: list[Case] = []
    values = {name: getattr(settings, name) or (getattr(settings, single),) for name, single in LISTS.items()}
    for group in product(*(values[name] for name in _GROUP)):
        chosen: dict[str, Any] = {LISTS[name]: value for name, value in zip(_GROUP, group, strict=True)}
        own = replace(plain, **chosen)
        found.append(Case(replace(own, expert_cache=ExpertBudget("percent", 100), reader="auto"), "resident"))
        if reads_mapped_files(settings.device):
            found.append(Case(replace(own, expert_cache=ExpertBudget("bytes"), reader="auto"), "page cache"))
        for budget, reader, lookahead in product(values["budgets"], values["readers"], values["lookaheads"]):
            row = replace(own, expert_cache=budget, reader=reader, lookahead=lookahead)
            found.append(Case(row, "row"))
    return found


def sweep(settings: Settings, stats: ExpertStats) -> int:
    """Measures every row and prints the table; the exit status is 1 where a row is void."""
    for name, single in LISTS.items():
        if getattr(settings, name) and single in settings.origin:
            log.get_logger(__name__).warning(f"{settings.origin[single]} has no effect: --{name} lists values")
    cap = _cap_bytes(settings)
    machine = _machine(settings)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "routing.trace" if settings.plot else settings.trace
        for case in cases(settings):
            traced = case.part == "resident" and not rows  # routing is the same in every row
            row = _measure(replace(case, settings=replace(case.settings, trace=trace if traced else None)), stats, cap)
            print(_label(row) + ": " + _outcome(row), flush=True)
            rows.append(row)
        used = uses(read_requests(trace)) if settings.plot and trace and trace.exists() else {}
    _judge(rows)
    for row in rows:
        row |= {} if row["void"] or row["refused"] else figures(row["report"], machine)
    print()
    print(table(rows))
    shown = [{name: value for name, value in row.items() if name != "report"} for row in rows]
    result = {
        "model": settings.model,
        "memory_cap_bytes": cap,
        "page_cache": settings.page_cache,
        "memory_bytes_s": machine.memory,
        "disk_bytes_s": machine.disk,
        "void": sum(bool(row["void"]) for row in rows),
        "rows": shown,
    }
    counting = [row for row in rows if row.get("decode_tok_s")]
    if settings.plot is not None and used and counting:
        plot_sweep(settings.plot, Path(settings.model).name, counting, machine.sizes.experts, used)
    if settings.results_csv is not None:
        _write_csv(settings.results_csv, shown)
    if settings.results_json is not None:
        settings.results_json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if result["void"] else 0


def _cap_bytes(settings: Settings) -> int | None:
    """The limit in bytes; what is cached before a process starts is not charged to it, so the cache must be cold."""
    cap = settings.memory_cap
    if cap is None:
        return None
    if settings.page_cache != "cold":
        raise ConfigError("--memory-cap holds what is read under it, not what is cached before: add --page-cache cold")
    if cap.kind == "bytes":
        return int(cap.amount)
    with closing(GGUFFile.open(model_path(settings.model))) as file:
        return int(sum(path.stat().st_size for path in file.paths) * cap.amount / 100)


def _machine(settings: Settings) -> Machine:
    with closing(GGUFFile.open(model_path(settings.model))) as file:
        model = load_model(file)
        trial = try_disk(model, settings.io_threads)
        disk = None if trial is None else max(trial.costs.bandwidth, trial.first_bandwidth)
        return Machine(model_sizes(model), memory_rate(settings.threads), disk)


def _measure(case: Case, stats: ExpertStats, cap: int | None = None) -> dict[str, Any]:
    """Runs a row's process; its report, or why there is none."""
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
    return row | _failure(done)


def _failure(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Why a process gave no report: no memory for its first step, or a failure, which voids the row."""
    lines = done.stderr.splitlines()
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    began = any(line.startswith("[expert-stream] steps=") and " steps=0 " not in line for line in lines)
    if done.returncode == CapacityError.exit_code and said and not began:
        return {"refused": said}
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return {"void": f"its process ended with {ended}: {said or (lines or ['without a word'])[-1]}"}


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    """Marks the rows that do not count, each against its group's control."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["batch"], row["prompt_tokens"], row["draft"]), []).append(row)
    for members in groups.values():
        measured = [row for row in members if row["report"] is not None]
        control = max(measured, key=lambda row: (row["part"] == "resident", row["report"]["slots"]), default=None)
        for row in measured:
            other = None if control is None or row is control else control["report"]
            row["void"] = void_reason(row["report"], other)
            row["compared_with"] = None if other is None or control is None else _label(control)


def figures(report: Report, machine: Machine) -> dict[str, Any]:
    """What is shown of a row that counts."""
    prefill, decode, tokens = report["phases"]["prefill"], report["phases"]["decode"], report["decoded"]
    disk, rates = report["disk_bytes"], report["decode_tok_s_runs"]
    token_ms = 1000 / tokens if tokens else 0.0
    roofline = machine.roofline(report)
    speed = median(rates) if rates else None
    return {
        "slots": report["slots"],
        "read_mode": report["reader"],
        "decode_tok_s": speed,
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
        "of_roofline": speed / roofline if speed and roofline else None,
        "peak_bytes": report["peak_bytes"],
    }


def _hit_rate(phase: Mapping[str, Any]) -> float | None:
    asked = phase["hits"] + phase["misses"]
    return phase["hits"] / asked if asked else None


def _label(row: Mapping[str, Any]) -> str:
    parts = [row["part"]] if row["part"] != "row" else [row["expert_cache"], row["reader"], f"ahead {row['lookahead']}"]
    return " ".join([*parts, f"batch {row['batch']}", f"prompt {row['prompt_tokens']}", f"draft {row['draft']}"])


def _outcome(row: Mapping[str, Any]) -> str:
    if row["report"] is None:
        return "refused" if row["refused"] else "failed"
    return "measured"


_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("tok/s", "decode_tok_s", 1, ".2f"),
    ("least", "decode_tok_s_least", 1, ".2f"),
    ("most", "decode_tok_s_most", 1, ".2f"),
    ("prefill", "prefill_tok_s", 1, ".1f"),
    ("TTFT ms", "first_token_ms", 1, ".0f"),
    ("p50 ms", "interval_p50_ms", 1, ".1f"),
    ("p99 ms", "interval_p99_ms", 1, ".1f"),
    ("hits pre", "prefill_hit_rate", 100, ".0f"),
    ("dec %", "decode_hit_rate", 100, ".1f"),
    ("file MB/tok", "file_bytes_token", 1e-6, ".1f"),
    ("disk", "disk_bytes_token", 1e-6, ".1f"),
    ("stall ms", "stall_ms_token", 1, ".1f"),
    ("comp ms", "compute_ms_token", 1, ".1f"),
    ("roof", "roofline_tok_s", 1, ".1f"),
    ("ratio", "of_roofline", 1, ".2f"),
    ("peak MiB", "peak_bytes", 1 / (1 << 20), ".0f"),
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for people; one without figures says why."""
    labels = [_label(row) for row in rows]
    cells = [[_cell(row, *column[1:]) for column in _COLUMNS] for row in rows]
    widths = [max(len(column[0]), *(len(each[i]) for each in cells)) for i, column in enumerate(_COLUMNS)]
    first = max(map(len, labels))
    heads = "  ".join(column[0].rjust(width) for column, width in zip(_COLUMNS, widths, strict=True))
    lines = [f"{'':{first}}  {heads}"]
    for row, label, each in zip(rows, labels, cells, strict=True):
        says = f"VOID: {row['void']}" if row["void"] else f"did not fit: {row['refused']}" if row["refused"] else None
        shown = says or "  ".join(cell.rjust(width) for cell, width in zip(each, widths, strict=True))
        lines.append(f"{label:{first}}  {shown}")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str, factor: float, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value * factor, form)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
