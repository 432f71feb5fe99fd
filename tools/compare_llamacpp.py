"""Measures expertserve beside llama.cpp on one GGUF: same machine, file, threads and token ids, in alternating runs.

    python -m tools.compare_llamacpp MODEL [--runs 5] [--threads 2] [--decode 48]

Each run is a process of its own that loads the file (already in the page cache), answers a 128-token prompt (start to
first token), then times a 512-token prefill and greedy decode. llama.cpp is the package xllamacpp, in its mapped mode
and in its default mode, which repacks weights into memory of its own. Medians and ratios are printed as Markdown, every
run as a JSON line on standard error; a figure beside which others used over 0.3 cores is left out of its median,
and more runs follow, twice as many at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.alone import QUIET_CORES, ROOT, busy_s
from tools.llamacpp import LlamaCpp

ENGINES = ("expertserve", "llama.cpp mapped", "llama.cpp repacked")
FIGURES = {
    "decode": "decode tok/s",
    "prefill": "prefill of 512, tok/s",
    "start": "start to first token of 128, s",
    "anon": "peak anonymous memory, MiB",
}


def prompt(count: int, seed: int) -> list[int]:
    """Token ids that any engine can be fed with."""
    import numpy as np

    return [int(i) for i in np.random.default_rng(seed).integers(300, 30000, count)]


class PeakAnonymous(threading.Thread):
    """Samples this process's anonymous resident memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_kib = 0

    def run(self) -> None:
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_kib = max(self.peak_kib, int(line.split()[1]))
            time.sleep(0.02)


@contextmanager
def watched(figures: dict[str, Any], name: str) -> Iterator[None]:
    """Notes how many cores other processes used meanwhile."""
    began, busy, own = time.perf_counter(), busy_s(), time.process_time()
    yield
    wall = time.perf_counter() - began
    figures[f"{name}_other_cores"] = round(max(0.0, busy_s() - busy - (time.process_time() - own)) / wall, 2)


def started(began: float) -> dict[str, Any]:
    """Seconds since this process was asked for, and how many cores others used meanwhile."""
    start = time.time() - began
    others = busy_s() - float(os.environ["COMPARE_BUSY"]) - time.process_time()
    return {"start": start, "start_other_cores": round(max(0.0, others) / start, 2)}


def run_expertserve(args: argparse.Namespace, began: float) -> dict[str, Any]:
    from expertserve.config import prepare_libraries, resolve

    prepare_libraries()
    from expertserve.engine.load import load_model
    from expertserve.engine.request import FinishEvent, SamplingParams
    from expertserve.engine.waiting import events
    from expertserve.experts.stats import ExpertStats

    settings = resolve(
        {
            "model": args.model,
            "device": "cpu",
            "threads": str(args.threads),
            "ctx": "2048",
            "parallel": "1",
            "stats_every": "0",
        }
    )
    model = load_model(settings, ExpertStats(every=0, emit=lambda line: None))

    def answer(ids: list[int], count: int) -> FinishEvent:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        event = list(events(model.engine, ids, params))[-1]
        assert isinstance(event, FinishEvent)
        return event

    answer(prompt(128, 1), 1)
    figures = started(began)
    with watched(figures, "prefill"):
        figures["prefill"] = 512 / answer(prompt(512, 2), 1).timings.prompt_ms * 1000
    with watched(figures, "decode"):
        done = answer(prompt(512, 2), args.decode + 1)
        figures["decode"] = args.decode / done.timings.decode_ms * 1000
    return figures


def run_llama_cpp(args: argparse.Namespace, began: float, repack: bool) -> dict[str, Any]:
    llama = LlamaCpp(args.model, threads=args.threads, repack=repack)
    llama.answer(prompt(128, 1), 1)
    figures = started(began)
    with watched(figures, "prefill"):
        figures["prefill"] = llama.answer(prompt(512, 2), 1)["prefill"]
    with watched(figures, "decode"):
        figures["decode"] = llama.answer(prompt(512, 2), args.decode + 1, cached=True)["decode"]
    return figures


def worker(args: argparse.Namespace) -> None:
    began = float(os.environ["COMPARE_BEGAN"])
    memory = PeakAnonymous()
    memory.start()
    if args.worker == "expertserve":
        figures = run_expertserve(args, began)
    else:
        figures = run_llama_cpp(args, began, args.worker.endswith("repacked"))
    figures["anon"] = memory.peak_kib / 1024
    print("FIGURES " + json.dumps(figures), flush=True)
    os._exit(0)  # neither engine's teardown is measured


def measure(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    python = args.peer_python if engine.startswith("llama.cpp") else sys.executable
    command = [python, "-m", "tools.compare_llamacpp", os.path.abspath(args.model)]
    command += ["--threads", str(args.threads), "--decode", str(args.decode), "--worker", engine]
    environment = {**os.environ, "COMPARE_BEGAN": repr(time.time()), "COMPARE_BUSY": repr(busy_s())}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            figures: dict[str, Any] = json.loads(line.removeprefix("FIGURES "))
            print(json.dumps({"engine": engine, **figures}), file=sys.stderr, flush=True)
            return figures
    sys.exit(f"{engine} gave no figures:\n{done.stderr[-2000:]}")


def quiet(runs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Those in which others left the machine alone while the figure was measured."""
    return [run for run in runs if run.get(f"{name}_other_cores", 0.0) <= QUIET_CORES]


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| figure | " + " | ".join(runs) + " | ratio to mapped | to repacked |", "|---" * (len(runs) + 3) + "|"]
    for name, title in FIGURES.items():
        medians = [statistics.median(run[name] for run in quiet(runs[engine], name) or runs[engine]) for engine in runs]
        ratios = [f"{medians[0] / other:.2f}" for other in medians[1:]]
        lines.append(f"| {title} | " + " | ".join(f"{m:.2f}" for m in medians) + " | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, default=48)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has xllamacpp and numpy")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
    engines = args.engines.split(",")
    with open(args.model, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for number in range(2 * args.runs):
        if number >= args.runs and all(len(quiet(of, name)) >= args.runs for of in runs.values() for name in FIGURES):
            break
        for engine in engines:
            runs[engine].append(measure(args, engine))
    if len(engines) == len(ENGINES):
        print(table(runs))


if __name__ == "__main__":
    main()
