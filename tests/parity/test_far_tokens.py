"""Windows, chunks, long RoPE and long states, which prompts of 24 tokens do not reach, are llama.cpp's too."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.test_batching import prompt
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE
from tests.parity.peer import llama_cpp, log_softmax, needs_peer

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not ORACLE.is_dir(), reason="needs the oracle fixtures beside the checkout"),
    needs_peer,
]
TOLERANCE = 0.02  # of a log-probability: products of half-precision weights round their input, each in its own order


def ours(path: Path, context: int, tokens: list[int]) -> NDArray[np.float64]:
    """Log-probabilities of the token after `tokens` by our CPU backend, the prompt in chunks."""
    rows = min(512, len(tokens))
    with open_forward(path, kv_type="f32", flash=False, max_rows=rows, cells=context) as forward:
        for start in range(0, len(tokens), rows):
            batch = make_batch(tokens[start : start + rows], start, n_kv=context, all_outputs=False)
            logits = forward(batch)[-1].copy()
    return log_softmax(logits)


@pytest.mark.parametrize(
    ("family", "length", "context"),
    [("gemma4-moe", 200, 512), ("granitehybrid", 200, 512), ("phimoe", 40, 512), ("phimoe", 40, 8192)],
)
def test_log_probabilities_after_a_longer_prompt_are_llama_cpp_s(family: str, length: int, context: int) -> None:
    path, tokens = ORACLE / family / "model-f16.gguf", prompt(7, length)
    assert np.abs(ours(path, context, tokens) - llama_cpp([path], context, [tokens])[0, 0]).max() < TOLERANCE


@pytest.mark.slow
def test_chunks_and_temperature_past_8192_tokens_are_llama_cpp_s(tmp_path: Path) -> None:
    """In a file that says a context of 16384 instead of 4096."""
    key, path, tokens = b"llama4.context_length", tmp_path / "long.gguf", prompt(7, 8230)
    data = bytearray((ORACLE / "llama4" / "model-f16.gguf").read_bytes())
    at = data.index(key) + len(key) + 4  # past the value's type
    assert struct.unpack_from("<I", data, at) == (4096,)
    struct.pack_into("<I", data, at, 16384)
    path.write_bytes(data)
    assert np.abs(ours(path, 8448, tokens) - llama_cpp([path], 8448, [tokens])[0, 0]).max() < TOLERANCE
