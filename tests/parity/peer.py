"""llama.cpp itself, asked in a process of its own for the log-probabilities of the token after a prompt."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp (llama.cpp) is not installed"
)
VOCABULARY = 512

# One thread, since two would wait for each other longer than models of this size take. The bias settles which token
# comes, one with a text of its own, and not what is said of all of them before it.
ASK = """
import json, os, sys
import xllamacpp as peer
paths, context, prompts = json.load(sys.stdin)
for path in paths:
    params = peer.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = path, context, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = peer.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = peer.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = peer.Server(params)
    for tokens in prompts:
        asked = {"prompt": tokens, "n_predict": 1, "n_probs": 512, "temperature": 0, "post_sampling_probs": False,
                 "cache_prompt": False, "logit_bias": [["a", 1000.0]]}
        reply = server.handle_completions(asked)
        best = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        print("=" + json.dumps([[found["id"], found["logprob"]] for found in best]), flush=True)
os._exit(0)
"""


def llama_cpp(paths: Sequence[Path], context: int, prompts: Sequence[list[int]]) -> NDArray[np.float64]:
    """By file and prompt, the log-probabilities of the token after it: [files, prompts, vocab]."""
    asked = json.dumps([[str(path) for path in paths], context, prompts])
    done = subprocess.run([sys.executable, "-c", ASK], input=asked, capture_output=True, text=True, timeout=240)
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith("=")]
    assert len(lines) == len(paths) * len(prompts), done.stderr[-2000:]
    out = np.full((len(lines), VOCABULARY), -np.inf)
    for row, line in zip(out, lines, strict=True):
        ids, values = zip(*json.loads(line), strict=True)
        row[list(ids)] = values
    return out.reshape(len(paths), len(prompts), VOCABULARY)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of logits [.., vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
