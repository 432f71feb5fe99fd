"""Loads our server and llama.cpp's, one after the other, with `expertserve bench --serve`: same model, same requests.

    python -m tools.compare_servers MODEL [--concurrency 1,2,4,8] [--requests 16]

Both with their defaults, as many threads and room for 8 sequences; llama.cpp with its weights repacked, its default.
First so many requests under way all the time, a row a number, then conversations that start at random moments. The
rows are printed as Markdown, with the cores that other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import alone
from tools.served import served

PLACES, CTX = 8, 8192
CHAT_REQUESTS, CHAT_RATE, TURNS, THINK_S = 12, 0.3, 3, 2
SLO_ITL_MS = 100
_SHAPE = ["--prompt-tokens", "128", "--decode-tokens", "32", "--slo-itl", str(SLO_ITL_MS)]


@contextmanager
def expertserve(model: Path, threads: int, python: str) -> Iterator[tuple[str, int]]:
    """The address and process id of our server; `python` is llama.cpp's and not used."""
    places = ["--device", "cpu", "--threads", str(threads), "--ctx", str(CTX), "--parallel", str(PLACES)]
    with served(str(model), *places) as found:
        yield found


@contextmanager
def llama_cpp(model: Path, threads: int, python: str) -> Iterator[tuple[str, int]]:
    """The address and process id of llama.cpp's server."""
    command = [python, "-m", "tools.llamacpp", "serve", str(model), "--threads", str(threads), "--repack"]
    command += ["--parallel", str(PLACES), "--ctx", str(CTX)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=alone.ROOT, text=True, **pipes) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                sys.exit("error: llama.cpp's server did not start")
            yield address, process.pid
        finally:
            process.kill()


SERVERS = {"expertserve": expertserve, "llama.cpp": llama_cpp}


def used_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(address: str, pid: int, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one load, with the cores that others than client and server used meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        began, before = time.perf_counter(), used_s(pid)
        command = [sys.executable, "-m", "expertserve.cli", "bench", "--serve", address, *_SHAPE, *arguments]
        done, others = alone.run([*command, "--results-json", str(path)])
        if not path.exists():
            sys.exit(f"error: `{' '.join(command)}` ended with status {done.returncode}\n{done.stderr}")
        others -= (used_s(pid) - before) / (time.perf_counter() - began)
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [row | {"others": round(max(0.0, others), 2)} for row in rows]


def measure(model: Path, threads: int, python: str, concurrency: str, requests: int) -> dict[str, list[dict[str, Any]]]:
    """Rows by server."""
    chat = ["--arrival", "chat", "--rate", str(CHAT_RATE), "--turns", str(TURNS), "--think-time", str(THINK_S)]
    found = {}
    for name, server in SERVERS.items():
        with server(model, threads, python) as (address, pid):
            rows = load(address, pid, ["--concurrency", concurrency, "--requests", str(requests)])
            rows += load(address, pid, [*chat, "--requests", str(CHAT_REQUESTS)])
        for row in rows:
            print(json.dumps({"server": name, **row}), file=sys.stderr, flush=True)
        found[name] = rows
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, the servers' rows beside each other."""
    heads = ["under way", "server", "tok/s", "TTFT p50, p99 ms", "ITL p50, p99 ms"]
    heads += ["answers/s", "good ones/s", "prompt cached", "others"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for alike in zip(*found.values(), strict=True):
        for name, row in zip(found, alike, strict=True):
            what = f"chats, {row['rate']:g} a second" if "rate" in row else str(row["concurrency"])
            if row["void"]:
                lines.append(f"| {what} | {name} | VOID: {row['void']} |" + " |" * (len(heads) - 3))
                continue
            cells = [
                what,
                name,
                f"{row['output_tok_s']:.1f}",
                f"{row['first_token_p50_ms']:.0f}, {row['first_token_p99_ms']:.0f}",
                f"{row['interval_p50_ms']:.1f}, {row['interval_p99_ms']:.1f}",
                f"{row['requests_s']:.2f}",
                f"{row['goodput_requests_s']:.2f}",
                "-" if row["cached"] is None else f"{row['cached']:.0%}",
                f"{row['others']:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--requests", type=int, default=16, help="of each row")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has xllamacpp")
    args = parser.parse_args()
    found = measure(args.model.resolve(), args.threads, args.peer_python, args.concurrency, args.requests)
    print(table(found))
    return int(any(row["void"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
