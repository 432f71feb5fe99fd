"""The same parity through the door users come in by: a server, `/v1/completions`, token ids, echo, logprobs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.oracle import FIXTURES, ORACLE, Reference, assert_greedy, outliers, reference, relative_errors

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FIXTURES, reason="needs the oracle fixtures beside the checkout"),
]


@contextmanager
def server(model: Path, *flags: str) -> Iterator[str]:
    """A real server on a free port; yields its URL once it is ready, and sees it end well."""
    command = [
        sys.executable,
        "-m",
        "expertserve.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--ctx",
        "512",
        "--stats-every",
        "0",
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = None
    try:
        for line in process.stderr:
            if found := re.search(r"http://[\d.]+:\d+", line):
                url = found[0]
                break
        assert url is not None, "the server did not say where it listens"
        wait_until_ready(url)
        yield url
    finally:
        process.terminate()
        with process:
            try:
                rest = process.communicate(timeout=60)[1]
            finally:
                process.kill()  # nothing where it has ended
    assert process.returncode == 0
    assert len(re.findall(r"^\[expert-stream\] steps=\d+", rest, re.MULTILINE)) == 1


def wait_until_ready(url: str) -> None:
    """Polls /health until the model is loaded."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except urllib.error.HTTPError as error:
            with error:
                assert json.load(error)["status"] == "loading"
        time.sleep(0.1)
    raise AssertionError("the model did not load within a minute")


def ask(url: str, **body: Any) -> dict[str, Any]:
    """POSTs a completion request and returns its first choice."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]


def log_probabilities(choice: dict[str, Any], vocab: int) -> np.ndarray:
    """[T - 1, vocab]: what the API says of each position's next token."""
    rows = choice["logprobs"]["top_logprobs"]
    table = np.full((len(rows) - 1, vocab), np.nan)
    for i, row in enumerate(rows[1:]):
        for name, value in row.items():
            table[i, int(name.removeprefix("token_id:"))] = value
    return table


def centred(table: np.ndarray) -> np.ndarray:
    """Logits up to the constant that a softmax cannot see."""
    return np.asarray(table - table.mean(axis=1, keepdims=True))


def check_prompt(url: str, ref: Reference, factor: float) -> None:
    vocab = ref.exact.shape[1]
    choice = ask(
        url,
        prompt=ref.tokens.tolist(),
        echo=True,
        logprobs=vocab,
        max_tokens=0,
        temperature=0,
        return_tokens_as_token_ids=True,
    )
    exact, peer = centred(ref.exact[:-1].astype(np.float64)), centred(ref.peer[:-1].astype(np.float64))
    ours = relative_errors(centred(log_probabilities(choice, vocab)), exact)
    peers = relative_errors(peer, exact)
    assert np.median(ours) <= factor * np.median(peers)
    assert outliers(ours) <= outliers(peers) + 1


FEW_FORMATS = ("qwen3moe-k256/model-q4_k.gguf", "qwen3moe-k256/model-mxfp4.gguf")


@pytest.mark.parametrize(
    "fixture",
    [
        pytest.param(name, marks=pytest.mark.slow) if "k256" in name and name not in FEW_FORMATS else name
        for name in FIXTURES
    ],
)
def test_completions_with_echo_are_as_close_as_llama_cpp(fixture: str) -> None:
    ref = reference(fixture)
    with server(ORACLE / fixture, "--kv-type", "f32", "--flash-attn", "off") as url:
        check_prompt(url, ref, 1.1)
        choice = ask(
            url,
            prompt=ref.tokens.tolist(),
            logprobs=2,
            max_tokens=16,
            temperature=0,
            ignore_eos=True,
            return_tokens_as_token_ids=True,
        )
        tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
        best = [sorted(likely.values(), reverse=True) for likely in choice["logprobs"]["top_logprobs"]]
        assert_greedy(tokens, [first - second for first, second, *_ in best], ref)
