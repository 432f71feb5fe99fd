"""`expertserve bench` over several configurations, with controls.

Each row is `expertserve bench` in a process of its own with settings of one value each. Beside what was asked for,
every combination of batch, context and draft gets two controls: all experts in slots, and none, left to the page
cache. Outputs are held against the first control, or, where it does not fit, against the row with most slots. A row
whose figures do not count has the reason in their place, and the exit status is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from expertserve import log
from expertserve.bench.figures import Machine, figures, probe
from expertserve.bench.lab import Uses, uses
from expertserve.bench.plots import plot_sweep, require_drawable
from expertserve.bench.replay import read_requests
from expertserve.bench.results import publish, table
from expertserve.bench.row import Case, measure_row
from expertserve.bench.sweep_table import COLUMNS, label
from expertserve.bench.verdict import judge
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.errors import ConfigError
from expertserve.experts.factory import reads_mapped_files
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
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
_ONLY_HERE = ("plot", "memory_cap", "results_csv", "results_json")


def is_sweep(settings: Settings) -> bool:
    """Whether settings name more than one configuration, or ask for what only a sweep gives."""
    return any(getattr(settings, name) for name in (*LISTS, *_ONLY_HERE))


def cases(settings: Settings) -> list[Case]:
    """Rows and controls, group by group, a group's resident control first."""
    none: dict[str, Any] = dict.fromkeys(LISTS, ())
    none |= dict.fromkeys((*_ONLY_HERE, "stats_json", "trace", "profile"))
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
    """Measures every row and prints the table; the exit status is 1 where a row is void or no picture is drawn."""
    _warn_of_lists(settings)
    if settings.plot is not None:
        require_drawable(settings.plot, "--plot")
    cap = _cap_bytes(settings)
    machine = probe(settings)
    rows, used = _measure_all(settings, stats, cap)
    judge(rows)
    counting = [row for row in rows if not row["void"] and not row["refused"]]
    machine = machine.raised_by([(label(row), row["report"]) for row in counting])
    for row in counting:
        row |= figures(row["report"], machine)
    print(_bounds(machine))
    print()
    print(table(COLUMNS, rows, label))
    try:
        drawn = settings.plot is None or _draw(settings, settings.plot, counting, machine.sizes.experts, used)
    finally:  # a file that cannot be written costs only itself
        void = publish(_result(settings, cap, machine, rows), settings)
    return 0 if drawn and not void else 1


def _warn_of_lists(settings: Settings) -> None:
    for name, single in LISTS.items():
        if getattr(settings, name) and single in settings.origin:
            log.get_logger(__name__).warning(f"{settings.origin[single]} has no effect: --{name} lists values")


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


def _measure_all(settings: Settings, stats: ExpertStats, cap: int | None) -> tuple[list[dict[str, Any]], Uses]:
    """Every row as it was measured, and the use of experts, for a picture."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        trace = settings.trace or (Path(folder) / "routing.trace" if settings.plot else None)
        traced = False
        for case in cases(settings):
            own = replace(case.settings, trace=None if traced else trace)  # routing is the same in every row
            row = measure_row(replace(case, settings=own), stats, cap)
            traced = traced or row["report"] is not None
            outcome = "measured" if row["report"] else "refused" if row["refused"] else "failed"
            print(f"{label(row)}: {outcome}", flush=True)
            rows.append(row)
        return rows, uses(read_requests(trace)) if settings.plot and trace and traced else {}


def _result(settings: Settings, cap: int | None, machine: Machine, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": settings.model,
        "memory_cap_bytes": cap,
        "page_cache": settings.page_cache,
        "memory_bytes_s": machine.memory.bytes_s,
        "memory_bytes_s_by": machine.memory.shown_by,
        "disk_bytes_s": None if machine.disk is None else machine.disk.bytes_s,
        "disk_bytes_s_by": None if machine.disk is None else machine.disk.shown_by,
        "rows": [{name: value for name, value in row.items() if name != "report"} for row in rows],
    }


def _bounds(machine: Machine) -> str:
    rates = [("memory", machine.memory), ("storage", machine.disk)]
    shown = [f"{name} {rate.bytes_s / 1e9:.2f} GB/s (by {rate.shown_by})" for name, rate in rates if rate]
    return "roof: " + ", ".join(shown)


def _draw(settings: Settings, out: Path, rows: Sequence[dict[str, Any]], experts: int, used: Uses) -> bool:
    """Whether there was something to draw."""
    decoding = [row for row in rows if row["decode_tok_s"]]
    if decoding:
        plot_sweep(out, Path(settings.model).name, decoding, experts, used)
    else:
        log.get_logger(__name__).warning(f"--plot {out}: nothing is drawn, no row has a decode speed")
    return bool(decoding)
