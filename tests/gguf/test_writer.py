"""The tiny models that tests are made of: deterministic, of every family, and real enough for llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.tensor import COMPUTED_TYPES, TensorType
from tests.gguf_writer import CHATML, make_tiny_moe, normal, quantize

FAMILIES = {
    "qwen3moe": {"head_dim": 32},
    "qwen2moe": {},
    "olmoe": {"tied": False, "split": 3},
    "llama": {"tokenizer": "spm", "tied": True},
}
# The quantisers of the first search for seconds; the gguf package cannot dequantise the last.
UNCHECKED = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0"}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make_tiny_moe(tmp_path / "a.gguf").read_bytes()
    assert make_tiny_moe(tmp_path / "b.gguf").read_bytes() == first
    assert make_tiny_moe(tmp_path / "c.gguf", seed=1).read_bytes() != first


@pytest.mark.parametrize("type_", sorted(t for t in COMPUTED_TYPES if t.name not in UNCHECKED))
def test_quantised_weights_are_near_the_weights(type_: TensorType) -> None:
    weights = normal(0, "w", (4, 512), 1.0)
    stored = quantize(weights, type_)
    if type_ in (TensorType.F16, TensorType.F32):
        stored = stored.view(np.float16 if type_ == TensorType.F16 else np.float32)
    restored = gguf.quants.dequantize(stored, type_)
    error = np.linalg.norm(restored - weights) / np.linalg.norm(weights)
    assert error < (0.8 if type_.name in ("TQ1_0", "TQ2_0") else 0.3)


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp (llama.cpp) is not installed")
def test_every_family_loads_and_generates_in_llama_cpp(tmp_path: Path) -> None:
    paths = [str(make_tiny_moe(tmp_path / f"{arch}.gguf", arch=arch, **kw)) for arch, kw in FAMILIES.items()]
    done = subprocess.run([sys.executable, "-c", GENERATE, *paths], capture_output=True, text=True, timeout=120)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [path for path, _ in results] == paths, done.stderr[-2000:]
    assert [generated for _, generated in results] == [8] * len(paths)


# In a process of its own, which ends without the server's teardown.
GENERATE = """
import json, os, sys
import xllamacpp
for path in sys.argv[1:]:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = path, 128, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    reply = xllamacpp.Server(params).handle_completions(
        {"prompt": "the rain", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    )
    print(json.dumps([path, reply["usage"]["completion_tokens"]]), flush=True)
os._exit(0)
"""


def test_the_tokenizer_covers_every_byte(tiny_moe: Path) -> None:
    with GGUFFile.open(tiny_moe) as file:
        tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
        assert len(tokens) == len(types) == len(set(tokens)) == file.tensors["token_embd.weight"].shape[0]
        assert all(len(token) == 1 for token in tokens[:256])
        for merge in file.metadata["tokenizer.ggml.merges"]:
            assert "".join(merge.split(" ")) in tokens
        assert file.metadata["tokenizer.chat_template"] == CHATML
        assert types[file.metadata["tokenizer.ggml.eos_token_id"]] == gguf.TokenType.CONTROL


def test_a_piece_vocabulary_has_bytes_and_falling_scores(tmp_path: Path) -> None:
    with GGUFFile.open(make_tiny_moe(tmp_path / "m.gguf", arch="llama", tokenizer="spm", vocab=2000)) as file:
        tokens, scores = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.scores"]
        assert len(tokens) == len(scores) == len(set(tokens)) == 2000
        assert tokens[3] == "<0x00>" and tokens[258] == "<0xFF>"
        assert scores[259:] == sorted(scores[259:], reverse=True)


@pytest.mark.parametrize(
    "arguments",
    [{"arch": "gemma"}, {"arch": "olmoe", "head_dim": 32}, {"vocab": 200}, {"split": 26}, {"tokenizer": "wordpiece"}],
)
def test_a_model_that_cannot_be_is_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        make_tiny_moe(tmp_path / "m.gguf", **arguments)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 256"):
        quantize(normal(0, "w", (2, 64), 1.0), TensorType.Q4_K)
