"""Trains the demo model, writes its GGUF file and measures both; run again, it goes on where it stopped.

pip install -e . -r tools/train_demo/requirements.txt
python -m tools.train_demo [--work build/demo]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from . import evaluate
from .corpus import Windows, encode, held_out
from .data import END_OF_TEXT, documents, fetch
from .export import export
from .model import Shape
from .plots import plot_loss
from .tokenizer import train_tokenizer
from .train import Plan, train

# Freed tensors stay with the process: without this a tenth of the time goes into mapping and clearing the same pages.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": 8 << 30, "MALLOC_TRIM_THRESHOLD_": 16 << 30, "MALLOC_TOP_PAD_": 1 << 30}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="folder of downloads, checkpoints, results"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=Plan.steps, help="training steps; the shipped model has the default"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if any(name not in os.environ for name in MALLOC):
        environment = {**os.environ, **{name: str(size) for name, size in MALLOC.items()}}
        os.execve(sys.executable, [sys.executable, "-m", "tools.train_demo", *sys.argv[1:]], environment)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    work: Path = args.work
    fetch(work / "corpus")
    found = documents(work / "corpus", args.seed)
    shape, plan, vocabulary = Shape(), Plan(steps=args.steps), work / "tokenizer.json"
    if not vocabulary.exists():
        train_tokenizer((d.text for d in found if not d.held_out), shape.vocab, vocabulary)
    tokenizer = Tokenizer.from_file(str(vocabulary))
    learned = encode(tokenizer, [d for d in found if not d.held_out])
    windows = Windows(learned, tokenizer.token_to_id(END_OF_TEXT), shape.context, plan.batch, args.seed)
    streams = held_out(tokenizer, found)
    print(f"{len(learned)} documents, {sum(map(len, learned))} tokens, {windows.per_epoch} steps an epoch; held out:")
    print({s.source: (len(s.tokens), s.bytes) for s in streams}, flush=True)
    model = train(shape, plan, windows, streams, work, args.seed)
    plot_loss(work / "loss.csv", work / "loss.png")
    export(model, vocabulary, work / "demo.gguf", quantised=True)
    export(model, vocabulary, work / "float.gguf", quantised=False)
    report: dict[str, Any] = {"tokens_learned": plan.steps * plan.batch * shape.context}
    for name, measure in {
        "bits_per_byte_torch": lambda: evaluate.score_float(model, streams),
        "bits_per_byte_float_gguf": lambda: evaluate.score_file(work / "float.gguf", streams, args.threads),
        "bits_per_byte_shipped": lambda: evaluate.score_file(work / "demo.gguf", streams, args.threads),
        "compressors": lambda: evaluate.compressed(found),
        "samples": lambda: evaluate.samples(work / "demo.gguf", args.threads),
        "streaming": lambda: _streaming(work, streams, args.threads),
        "llama_cpp": lambda: evaluate.beside_llama_cpp(
            work / "demo.gguf", evaluate.held_out_windows(streams, shape.context), args.threads
        ),
    }.items():
        report[name] = measure()
        print(name, report[name], flush=True)
        evaluate.write_json(work / "report.json", report)


def _streaming(work: Path, streams: list[Any], threads: int) -> dict[str, Any]:
    """Held-out tokens with a quarter and with all of the experts in slots, and what the recorded routing shows."""
    windows = evaluate.held_out_windows(streams, 1024)
    runs = [
        evaluate.stream(work / "demo.gguf", windows, threads, "25%", work / "routing.trace"),
        evaluate.stream(work / "demo.gguf", windows, threads, "100%"),
    ]
    return {"runs": runs, **evaluate.routing(work / "routing.trace")}


if __name__ == "__main__":
    main()
