"""Measures what `expertserve bench` says of a comparison's rows from outside, while it runs.

    python -m tools.watched_sweep MODEL --budgets 10,25,50 ... --results-json FILE

The arguments are those of `expertserve bench`. Every row's process prints a line after each step, as `--stats-every 1`
has it do; here each line gets the time of its arrival and the bytes that the kernel had fetched for that process by
then, from /proc/PID/io. Rate and bytes of decode that follow from these are put beside bench's own, a line a row.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

_STEPS = re.compile(r"\[expert-stream] steps=(\d+) ")


@dataclass(slots=True)
class Process:
    """What was seen of a row's process: (seconds, bytes from storage) when the line of each step arrived."""

    steps: dict[int, tuple[float, int]] = field(default_factory=dict)

    def decode(self, runs: int, tokens: int) -> tuple[float, float]:
        """Median tokens a second and mean bytes a token of the timed runs, which follow an untimed one."""
        each, odd = divmod(max(self.steps), runs + 1)
        if odd or each < tokens:
            raise ValueError(f"{max(self.steps)} steps are not {runs + 1} runs with {tokens} steps of decode")
        ends = [self.steps[each * number] for number in range(2, runs + 2)]
        begins = [self.steps[each * number - tokens] for number in range(2, runs + 2)]
        rates = [tokens / (end[0] - begin[0]) for begin, end in zip(begins, ends, strict=True)]
        nbytes = [end[1] - begin[1] for begin, end in zip(begins, ends, strict=True)]
        return median(rates), sum(nbytes) / (runs * tokens)


def watching(seen: list[Process]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A stand-in for `subprocess.run` that notes when each process says that it has made a step."""

    def run(command: Sequence[str], *, capture_output: bool, timeout: float, **options: Any) -> Any:
        process = Process()
        seen.append(process)
        out: list[str] = []
        lines: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as child:
            end = threading.Timer(timeout, child.kill)
            end.start()
            assert child.stdout is not None and child.stderr is not None
            stdout = child.stdout
            reader = threading.Thread(target=lambda: out.append(stdout.read()))
            reader.start()
            for line in child.stderr:
                if found := _STEPS.match(line):
                    process.steps.setdefault(int(found[1]), (time.perf_counter(), _read_bytes(child.pid)))
                lines.append(line)
            reader.join()
            end.cancel()
        return subprocess.CompletedProcess(command, child.returncode, "".join(out), "".join(lines))

    return run


def _read_bytes(pid: int) -> int:
    found = re.search(r"^read_bytes: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def compared(rows: Sequence[dict[str, Any]], seen: Sequence[Process], runs: int) -> list[dict[str, Any]]:
    """Bench's figures and those from outside, of the rows that count."""
    lines = []
    for row, process in zip(rows, seen, strict=True):
        if row["void"] or row["refused"] or not row["decode_tok_s"]:
            continue
        rate, nbytes = process.decode(runs, row["decode_tokens"] - 1)
        name = row["expert_cache"] if row["part"] == "row" else row["part"]
        figures = {"decode_tok_s": row["decode_tok_s"], "disk_bytes_token": row["disk_bytes_token"]}
        lines.append({"row": name, **figures, "outside_tok_s": rate, "outside_bytes_token": nbytes})
    return lines


def main(arguments: Sequence[str]) -> int:
    from expertserve.cli import main as expertserve

    path = Path(arguments[arguments.index("--results-json") + 1])
    runs = int(arguments[arguments.index("--repetitions") + 1])
    seen: list[Process] = []
    with mock.patch("expertserve.bench.row.subprocess.run", watching(seen)):
        status = expertserve(["bench", *arguments, "--stats-every", "1"])
    result = json.loads(path.read_text())
    result["outside"] = compared(result["rows"], seen, runs)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["outside"]:
        print(json.dumps(line))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
