"""Whether a measured configuration counts: the reasons for which its figures are void.

Owns the rules; each compares two things that were counted apart, so that a dead counter cannot vouch for itself.
A report is the JSON object of `rates.bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from expertserve.bench.page_cache import WARM
from expertserve.bench.sweep_table import label

Report = Mapping[str, Any]
TOLERANCE = 0.03
SLACK_BYTES = 8 << 20  # the interpreter's own pages, and reads begun in one phase and ended in the next


def judge(rows: Sequence[dict[str, Any]]) -> None:
    """Marks the rows that do not count, each against the control of those that compute the same."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["batch"], row["prompt_tokens"], row["draft"]), []).append(row)
    for members in groups.values():
        measured = [row for row in members if row["report"] is not None]
        control = max(measured, key=lambda row: (row["part"] == "resident", row["report"]["slots"]), default=None)
        for row in measured:
            other = None if control is None or row is control else control["report"]
            row["void"] = void_reason(row["report"], other)
            row["compared_with"] = None if other is None or control is None else label(control)


def void_reason(report: Report, control: Report | None) -> str | None:
    """Why the figures must not be used; None where they count.

    Args:
        report: what was measured.
        control: the same work by the configuration that its output is held against.
    """
    return next(_reasons(report, control), None)


def _reasons(report: Report, control: Report | None) -> Iterator[str]:
    yield from _dead_clock(report)
    yield from _refused_experts(report)
    if control is not None:
        yield from _other_output(report, control)
    yield from _bytes_disagree(report)
    if report["page_cache"] == "warm" and report["cached"][1] < WARM:
        left = report["cached"][1]
        yield f"the page cache lost the model: {left:.0%} of it was left at the end; use --page-cache cold"


def _dead_clock(report: Report) -> Iterator[str]:
    phases = report["phases"].values()
    steps = sum(phase["steps"] for phase in phases) - report["draft_steps"]
    if steps != report["forwards"]:
        yield f"steps did not advance: {steps} for {report['forwards']} forwards"
    decode, batch = report["phases"]["decode"], report["batch"]
    tokens_a_step = batch * (1 if report["draft"] == "off" else 1 + report["draft_tokens"])
    if decode["steps"] < ceil(report["decoded"] / tokens_a_step):
        yield f"steps did not advance: {decode['steps']} in decode for {report['decoded']} tokens"
    if report["decoded"] and not decode["hits"] + decode["misses"] + decode["forced"]:
        yield "decode asked for no expert"


def _refused_experts(report: Report) -> Iterator[str]:
    for name, phase in report["phases"].items():
        if phase["exhausted"]:
            yield f"{name} exhausted the slots: {phase['exhausted']} experts were refused"


def _other_output(report: Report, control: Report) -> Iterator[str]:
    if report["tokens_digest"] != control["tokens_digest"]:
        yield "the output differs from the control's: other tokens"
    # Left to itself drafting goes on and off by the clock, and with it the rows of a step and their rounding.
    elif report["draft"] != "mtp" and report["digest"] != control["digest"]:
        yield "the output differs from the control's: other log-probabilities"


def _bytes_disagree(report: Report) -> Iterator[str]:
    disk = report["disk_bytes"]
    if disk is None or report["reader"] in ("forced", "mapped"):  # nothing is asked of the file: the kernel pages it in
        return
    for name in ("prefill", "decode"):
        asked, read = report["phases"][name]["bytes"], disk[name]
        slack = SLACK_BYTES + TOLERANCE * asked
        if read > asked + slack or (report["reader"] == "direct" and read < asked - slack):
            yield f"bytes disagree in {name}: {asked} were asked of the file, the kernel read {read} from storage"
