"""Writes the embedded model, expertserve/data/demo.gguf: `make demo-model` runs this.

It is a whole `qwen3moe` of 4 layers and 16 experts with a byte-level tokenizer and a chat template, so that every part
of the program has something to do, and its weights are random, so its answers mean nothing. Output rows of tokens that
are not plain lower-case text are zero, which keeps those answers printable.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from expertserve.data import DEMO_NAME, model_path  # noqa: E402
from expertserve.gguf.file import GGUFFile  # noqa: E402
from tests.gguf_writer import make_tiny_moe  # noqa: E402

_TEXT = re.compile(r"\u0120?[a-z]*|[.,]")  # U+0120 is how a byte-level vocabulary writes a space


def make_demo_model(path: Path) -> None:
    """Writes the model to `path`."""
    make_tiny_moe(
        path,
        layers=4,
        experts=16,
        top_k=4,
        hidden=64,
        ffn=32,
        heads=4,
        head_dim=32,
        vocab=512,
        context=2048,
        types={"dense": "Q8_0", "expert": "Q8_0"},
        seed=7,
        metadata=lambda writer: writer.add_basename("expertserve demo, random weights"),
    )
    file = GGUFFile.open(path)
    head = file.tensors["output.weight"]
    with path.open("r+b") as out:
        for token, text in enumerate(file.metadata["tokenizer.ggml.tokens"]):
            if not _TEXT.fullmatch(text):
                out.seek(head.offset + token * head.row_bytes)
                out.write(bytes(head.row_bytes))


if __name__ == "__main__":
    make_demo_model(model_path(DEMO_NAME))
