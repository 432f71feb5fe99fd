"""What prompts longer than the fixtures' 24 tokens reach (windows, chunks, long RoPE, long states) is llama.cpp's too.

llama.cpp itself is asked, in a process of its own, for the log-probabilities of the token after a prompt.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.test_batching import prompt
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not ORACLE.is_dir(), reason="needs the oracle fixtures beside the checkout"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp (llama.cpp) is not installed"),
]
VOCABULARY = 512
TOLERANCE = 0.02  # of a log-probability: products of half-precision weights round their input, each in its own order

ASK = """
import json, os, sys
import xllamacpp as peer
path, context, tokens = json.load(sys.stdin)
params = peer.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = path, context, 1, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.cache_type_k = params.cache_type_v = peer.ggml_type.GGML_TYPE_F32
params.flash_attn_type = peer.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
asked = {"prompt": tokens, "n_predict": 1, "n_probs": 512, "temperature": 0, "post_sampling_probs": False}
reply = peer.Server(params).handle_completions(asked)
best = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("=" + json.dumps([[found["id"], found["logprob"]] for found in best]), flush=True)
os._exit(0)
"""


def llama_cpp(path: Path, context: int, tokens: list[int]) -> NDArray[np.float64]:
    """Log-probabilities of the token after `tokens`, by id."""
    asked = json.dumps([str(path), context, tokens])
    done = subprocess.run([sys.executable, "-c", ASK], input=asked, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=")]
    assert lines, done.stderr[-2000:]
    out = np.full(VOCABULARY, -np.inf)
    for token, value in json.loads(lines[0][1:]):
        out[token] = value
    return out


def ours(path: Path, context: int, tokens: list[int]) -> NDArray[np.float64]:
    """The same of our CPU backend, the prompt in chunks."""
    rows = min(512, len(tokens))
    with open_forward(path, kv_type="f32", flash=False, max_rows=rows, cells=context) as forward:
        for start in range(0, len(tokens), rows):
            batch = make_batch(tokens[start : start + rows], start, n_kv=context, all_outputs=False)
            logits = forward(batch)[-1].astype(np.float64)
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@pytest.mark.parametrize(
    ("family", "length", "context"),
    [("gemma4-moe", 200, 512), ("granitehybrid", 200, 512), ("phimoe", 40, 512), ("phimoe", 40, 8192)],
)
def test_log_probabilities_after_a_longer_prompt_are_llama_cpp_s(family: str, length: int, context: int) -> None:
    path, tokens = ORACLE / family / "model-f16.gguf", prompt(7, length)
    assert np.abs(ours(path, context, tokens) - llama_cpp(path, context, tokens)).max() < TOLERANCE


@pytest.mark.slow
def test_chunks_and_temperature_past_8192_tokens_are_llama_cpp_s(tmp_path: Path) -> None:
    """In a file that says a context of 16384 instead of 4096."""
    key, path, tokens = b"llama4.context_length", tmp_path / "long.gguf", prompt(7, 8230)
    data = bytearray((ORACLE / "llama4" / "model-f16.gguf").read_bytes())
    at = data.index(key) + len(key) + 4  # past the value's type
    assert struct.unpack_from("<I", data, at) == (4096,)
    struct.pack_into("<I", data, at, 16384)
    path.write_bytes(data)
    assert np.abs(ours(path, 8448, tokens) - llama_cpp(path, 8448, tokens)).max() < TOLERANCE
