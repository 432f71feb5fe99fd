"""Measures expertserve beside llama.cpp under a limit on memory: same file, prompt and token ids, in alternating runs.

    python -m tools.compare_capped MODEL [--caps 25,50,75] [--runs 3]

A run is a process in a memory cgroup that holds all it uses, the page cache of what it reads among it, limited to a
share of the file's size; the file is dropped from the cache first. Both read the same 512 tokens and decode the same
48, llama.cpp's own greedy ones. llama.cpp is mapped, as its other modes do not run, from a copy of the file on a loop
device of its own with 128 KiB of read-ahead, its best; ours is as it comes, without a profile. Medians are printed as
Markdown, every run as a JSON line on standard error; runs beside which others used over 0.3 cores are left out, and
more follow, twice as many at most. It needs root on Linux. The exit status is 1 where a run does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from expertserve.bench.memory_cap import limited_memory
from expertserve.bench.page_cache import drop
from expertserve.errors import CapacityError, ConfigError
from tools import alone
from tools.compare_llamacpp import prompt

CAPS = ("25", "50", "75")
PROMPT, DECODE, CTX = 512, 48, 2048
READ_AHEAD_KIB = 128
ENGINES = ("expertserve", "llama.cpp")
_ROOM = 1.03  # of the copy's file system, beside 300 MB


def missing() -> str | None:
    """What this machine lacks for the comparison; None where it can be made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "it needs root on Linux, for control groups and a loop device"
    if absent := [name for name in ("losetup", "mkfs.ext4", "mount") if shutil.which(name) is None]:
        return f"it needs {', '.join(absent)}, for a loop device"
    try:
        with limited_memory(1 << 30):
            return None
    except ConfigError as error:
        return str(error)


@contextmanager
def on_loop_device(model: Path, folder: Path) -> Iterator[Path]:
    """A copy of the file on a loop device with READ_AHEAD_KIB of read-ahead; the real disk's settings stay."""

    def run(*command: str) -> str:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with ExitStack() as undo, open(image, "wb") as file:
        undo.callback(image.unlink)
        os.posix_fallocate(file.fileno(), 0, int(model.stat().st_size * _ROOM + 300e6) // 4096 * 4096)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0", str(image))
        device = run("losetup", "--find", "--show", "--direct-io=on", str(image))
        undo.callback(run, "losetup", "--detach", device)
        run("mount", "-o", "noatime", device, str(mounted))
        undo.callback(run, "umount", str(mounted))
        copy = mounted / model.name
        shutil.copyfile(model, copy)
        queue = Path("/sys/block", Path(device).name, "queue/read_ahead_kb")
        queue.write_text(str(READ_AHEAD_KIB))
        yield copy


def run_of(command: Sequence[str], model: Path, cap: int | None) -> dict[str, Any]:
    """The last line of a process limited to `cap` bytes, or why it refused; and the cores that others used."""
    drop([model])
    with ExitStack() as stack:
        group = stack.enter_context(limited_memory(cap)) if cap else None
        done, others = alone.run(command, preexec_fn=group.enter if group else None)
        peak = group.peak_bytes() if group else None
    if done.returncode == CapacityError.exit_code and (said := re.search(r"^error: (.*)$", done.stderr, re.MULTILINE)):
        return {"refused": said[1], "others": others}
    if done.returncode:
        sys.exit(f"error: `{' '.join(command)}` ended with status {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"others": others, "peak_bytes": peak}


def run_expertserve(model: Path, cap: int | None, threads: int, feed: Path) -> dict[str, Any]:
    options = {"--device": "cpu", "--threads": threads, "--ctx": CTX, "--profile": "off", "--stats-every": 0}
    flags = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "expertserve.cli", "bench", str(model), "--feed", str(feed), *flags]
    told = run_of([*command, "--page-cache", "cold"], model, cap)
    if "refused" in told:
        return told
    decode = told["phases"]["decode"]
    nbytes = told["disk_bytes"] or {"decode": None}
    return {
        "prefill": told["prefill_tok_s"],
        "decode": told["decode_tok_s"],
        "slots": told["slots"],
        "digest": told["digest"],
        "counts": decode["steps"] == DECODE and decode["exhausted"] == decode["forced"] == 0,
        "disk_bytes": nbytes["decode"],
        "peak_bytes": told["peak_bytes"],
        "others": told["others"],
    }


def run_llama_cpp(copy: Path, cap: int | None, threads: int, feed: Path, python: str) -> dict[str, Any]:
    command = [python, "-m", "tools.llamacpp", "answer", str(copy), "--prompt", str(feed), "--decode", str(DECODE)]
    told = run_of([*command, "--threads", str(threads), "--ctx", str(CTX)], copy, cap)
    return {
        "prefill": told["prefill"],
        "decode": told["decode"],
        "tokens": told["tokens"],
        "disk_bytes": told["read_bytes"][1],
        "peak_bytes": told["peak_bytes"],
        "others": told["others"],
    }


def quiet(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["others"] <= alone.QUIET_CORES]


def why_none(runs: Sequence[Mapping[str, Any]], control: Mapping[str, Any]) -> str | None:
    """Why there are no figures of expertserve under a limit; None where they count."""
    if refused := next((run["refused"] for run in runs if "refused" in run), None):
        return f"did not fit: {refused}"
    if not all(run["counts"] for run in runs):
        return "VOID: a run did not advance a step a token, or refused an expert"
    if any(run["digest"] != control["digest"] for run in runs):
        return "VOID: another output than without a limit"
    return None


def table(found: Mapping[str, Mapping[str, list[dict[str, Any]]]], control: Mapping[str, Any]) -> str:
    """Markdown, a row a cap, medians with the least and the most; below it why a row has no figures of ours."""
    figures = {"decode": ("decode tok/s", 1.0), "prefill": ("prefill of 512", 1.0)}
    figures |= {"disk_bytes": ("MB read a token", 1e-6 / DECODE), "peak_bytes": ("peak MiB", 2.0**-20)}
    heads = ["cap", "slots", *(f"{name}: ours, llama.cpp" for name, _ in figures.values()), "ratio: decode, prefill"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    remarks = []
    for cap, engines in found.items():
        ours, peer = (quiet(runs) or runs for runs in engines.values())
        none = why_none(engines[ENGINES[0]], control)
        if none:
            remarks.append(f"- {cap}%: {none}")
            ours = []
        cells, ratios = [f"{cap}%", str(ours[0]["slots"]) if ours else "-"], []
        for figure, (_, factor) in figures.items():
            values = [[factor * (run[figure] or 0) for run in runs] for runs in (ours, peer)]
            cells.append(", ".join(f"{median(of):.2f} ({min(of):.2f}-{max(of):.2f})" if of else "-" for of in values))
            if ours and figure in ("decode", "prefill"):
                ratios.append(f"{median(values[0]) / median(values[1]):.2f}")
        lines.append("| " + " | ".join([*cells, ", ".join(ratios) or "-"]) + " |")
    return "\n".join([*lines, *(["", *remarks] if remarks else [])])


def compare(model: Path, caps: Sequence[str], runs: int, threads: int, python: str) -> str:
    """The table."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {cap: {name: [] for name in ENGINES} for cap in caps}
    with tempfile.TemporaryDirectory(dir=model.parent) as name, on_loop_device(model, Path(name)) as copy:
        feed = Path(name) / "feed.json"
        ids = prompt(PROMPT, 2)
        feed.write_text(json.dumps({"prompt": ids}))
        answer = run_llama_cpp(copy, None, threads, feed, python)["tokens"]
        feed.write_text(json.dumps({"prompt": ids, "decode": answer[:DECODE]}))
        control = run_expertserve(model, None, threads, feed)
        for number in range(2 * runs):
            if number >= runs and all(len(quiet(of)) >= runs for each in found.values() for of in each.values()):
                break
            for cap, engines in found.items():
                limit = model.stat().st_size * int(cap) // 100
                both = run_expertserve(model, limit, threads, feed), run_llama_cpp(copy, limit, threads, feed, python)
                if both[1].pop("tokens") != answer:
                    sys.exit(f"error: llama.cpp gave another answer at {cap}% than without a limit")
                for engine, result in zip(ENGINES, both, strict=True):
                    engines[engine].append(result)
                    print(json.dumps({"cap": cap, "engine": engine, **result}), file=sys.stderr, flush=True)
    return table(found, control)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--caps", default=",".join(CAPS), help="limits, in percent of the file's size")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has xllamacpp")
    args = parser.parse_args()
    if lacking := missing():
        parser.error(lacking)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the loop device is taken down
    text = compare(args.model.resolve(), args.caps.split(","), args.runs, args.threads, args.peer_python)
    print(text)
    return int("VOID" in text)


if __name__ == "__main__":
    sys.exit(main())
