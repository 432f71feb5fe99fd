"""Holds what `plan` and `trace simulate` predict of decode against what is measured, in alternating runs.

    python -m tools.compare_plan MODEL [--runs 3] [--shares 25,50,75]

Each round, for each share of the experts in slots: a plan, then a run with direct reads and a trace of it, then the
simulation of that trace on this machine's disk; each in a process of its own. Medians are printed as Markdown, every
run as a JSON line on standard error; a run beside which others used over 0.3 cores is left out of its median, and
more rounds follow, twice as many at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tools import alone

SHARES = ("25", "50", "75")
PROMPT, DECODE = 128, 64
KINDS = ("plan", "simulated", "measured")


def last_line(arguments: Sequence[str]) -> dict[str, Any]:
    """What a command of ours prints last, and how many cores others used meanwhile."""
    done, others = alone.run([sys.executable, "-m", "expertserve.cli", *arguments])
    if done.returncode:
        sys.exit(f"error: `expertserve {' '.join(arguments)}` ended with status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"others": others}


def run(model: Path, share: str, trace: Path) -> list[dict[str, Any]]:
    """One run of each kind: decode in tokens a second, the hit rate, milliseconds of waiting a token."""
    here = ["--device", "cpu", "--stats-every", "0", "--profile", "off"]
    plan = last_line(["plan", str(model), "--device", "cpu", "--expert-cache", f"{share}%", "--json"])
    shape = ["--prompt-tokens", str(PROMPT), "--decode-tokens", str(DECODE), "--repetitions", "1"]
    budget = ["--expert-cache", f"{share}%", "--reader", "direct", "--trace", str(trace)]
    real = last_line(["bench", str(model), *here, *budget, *shape])
    decode = real["phases"]["decode"]
    told = last_line(["trace", "simulate", str(trace), "--model", str(model), "--slots", share, "--json"])
    row = told["rows"][0]
    found = (
        (plan["decode_tok_s"], plan["hit_rate"], plan["waiting_ms"], plan["others"]),
        (row["tok_s"], row["hit_rate"], 1000 * row["step"]["waiting"], told["others"]),
        (real["decode_tok_s"], None, 1000 * decode["stalled_s"] / decode["steps"], real["others"]),
    )
    return [
        {"kind": kind, "share": share, "tok_s": tok_s, "hit_rate": hits, "waiting_ms": waiting, "others": others}
        for kind, (tok_s, hits, waiting, others) in zip(KINDS, found, strict=True)
    ]


def of(runs: Sequence[Mapping[str, Any]], kind: str, share: str) -> list[Mapping[str, Any]]:
    """Runs of a kind at a share that were left alone; all of them where none was."""
    mine = [run for run in runs if (run["kind"], run["share"]) == (kind, share)]
    return [run for run in mine if run["others"] <= alone.QUIET_CORES] or mine


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row a share, medians with the least and the most, and the ratios of medians to what was measured."""
    lines = ["| slots | plan | trace simulate | measured tok/s | ratios | waiting ms | hit rate: assumed, replayed |"]
    lines.append("|---" * 7 + "|")
    for share in dict.fromkeys(run["share"] for run in runs):
        kinds = [of(runs, kind, share) for kind in KINDS]
        rates = [[run["tok_s"] for run in mine] for mine in kinds]
        medians = [statistics.median(values) for values in rates]
        waits = ", ".join(f"{statistics.median(run['waiting_ms'] for run in mine):.1f}" for mine in kinds)
        hits = ", ".join(f"{statistics.median(run['hit_rate'] for run in mine):.3f}" for mine in kinds[:2])
        cells = [f"{m:.2f} ({min(v):.2f}, {max(v):.2f})" for m, v in zip(medians, rates, strict=True)]
        ratios = ", ".join(f"{median / medians[2]:.2f}" for median in medians[:2])
        lines.append(f"| {share}% | " + " | ".join([*cells, ratios, waits, hits]) + " |")
    return "\n".join(lines)


def compare(model: Path, runs: int, shares: Sequence[str]) -> list[dict[str, Any]]:
    """Rounds until each median has `runs` quiet runs."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * runs):
            alike = [[run for run in found if (run["kind"], run["share"]) == each] for each in product(KINDS, shares)]
            quiet = [sum(run["others"] <= alone.QUIET_CORES for run in each) for each in alike]
            if number >= runs and min(quiet) >= runs:
                break
            for share in shares:
                for result in run(model, share, Path(folder) / f"{share}.trace"):
                    found.append(result)
                    print(json.dumps(result), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shares", default=",".join(SHARES), help="percent of the experts in slots")
    args = parser.parse_args()
    print(table(compare(args.model, args.runs, args.shares.split(","))))


if __name__ == "__main__":
    main()
