"""The command `serve` on real files: numbers through the public API, and how the process ends."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.served_process import serving

CHECKOUT = Path(__file__).parents[2]


def test_a_chat_on_a_real_model_then_sigterm_with_one_final_line(tiny_moe: Path) -> None:
    with serving(tiny_moe, "--alias", "tiny-test") as server:
        messages: Any = [{"role": "user", "content": "hello"}]
        ask: Any = {"model": "tiny-test", "messages": messages, "temperature": 0, "max_tokens": 12}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**ask).choices[0].message.content
            stream = client.chat.completions.create(stream=True, **ask)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"^expertserve_stream_steps\{phase=\"decode\"\} [1-9]", metrics, re.M)
        server.stop()
    assert server.process.returncode == 0, "".join(server.lines)
    finals = [line for line in server.lines if line.startswith("[expert-stream] steps=")]
    assert finals and finals[-1] == server.lines[-1]
    assert not any("Traceback" in line for line in server.lines)


def test_the_disks_limit_is_measured_where_experts_are_read_while_serving(tiny_moe: Path) -> None:
    for budget, read in (("8", True), ("100%", False)):
        with serving(tiny_moe, "--expert-cache", budget) as server:
            limit = httpx.get(f"{server.url}/stats").json()["stream"]["about"]["disk_limit_bytes_s"]
            metrics = httpx.get(f"{server.url}/metrics").text
        assert (limit is not None and limit > 0) == read
        assert ("expertserve_stream_disk_limit_bytes_s " in metrics) == read


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_sighup_has_the_keys_read_again(tiny_moe: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with serving(tiny_moe, "--api-key-file", str(keys)) as server:

        def allowed(key: str) -> bool:
            return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code == 200

        assert allowed("old") and not allowed("new")
        keys.write_text("new\n")
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while not allowed("new"):
            assert time.monotonic() < deadline, "".join(server.lines)
        assert not allowed("old")
        for _ in range(300):
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.003)
        assert allowed("new")
        server.stop()
    assert server.process.returncode == 0 and not any("Traceback" in line for line in server.lines)


@pytest.mark.shared
def test_logprobs_over_http_are_llama_cpps(oracle_dir: Path) -> None:
    folder = oracle_dir / "qwen3moe"
    reference = np.load(folder / "ref.npz")
    ids = reference["tokens_short"].tolist()
    logits = reference["lcpp_logits_f16_short"].astype(np.float64)
    vocab = logits.shape[1]
    with serving(folder / "model-f16.gguf", "--kv-type", "f32", "--flash-attn", "off") as server:
        body = {
            "prompt": ids,
            "echo": True,
            "logprobs": vocab,
            "max_tokens": 1,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
        }
        lists = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    assert lists["tokens"][: len(ids)] == [f"token_id:{id}" for id in ids]
    got = np.array([[top[f"token_id:{id}"] for id in range(vocab)] for top in lists["top_logprobs"][1:]])
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    error = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) < 2e-4, error
    assert lists["tokens"][-1] == f"token_id:{int(logits[-1].argmax())}"
