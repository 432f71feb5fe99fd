"""configs/ray_serve.py on a local Ray: conversations stay where they are warm, and a replica that dies takes little."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
QUESTIONS = ("Why is the sky blue?", "What is the capital of France?", "What is bread?", "Who are you?")


class Cluster:
    """Two replicas of the embedded model."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._line("http://")

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        return next(line.strip() for line in self._process.stdout if line.startswith(start))

    def kill(self, replica: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(replica + "\n")
        self._process.stdin.flush()
        self._line("killed")

    def ask(self, text: str, *history: dict[str, str], **more: Any) -> httpx.Response:
        messages = [*history, {"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 60, **more}
        return httpx.post(self.url + CHAT, json=body, timeout=60)

    def stream(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The replica, and all events of a long answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 800, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self.url + CHAT, json=body, timeout=60) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
            return response.headers["x-replica"], [json.loads(line[6:]) for line in lines]

    def replicas(self) -> set[str]:
        return {self.ask(f"{random.random()}", max_tokens=1).headers.get("x-replica", "") for _ in range(12)}


@contextmanager
def cluster_of(options: str) -> Iterator[Cluster]:
    command = [sys.executable, "-m", "tests.server.ray_cluster", options]
    paths = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT / "configs"), str(CHECKOUT)])}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=CHECKOUT, env={**os.environ, **paths}, text=True, **pipes) as process:
        try:
            yield Cluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of("--device cpu --threads 1 --parallel 8") as cluster:
        yield cluster


def test_a_conversation_stays_with_its_replica_and_its_prefix_is_there(cluster: Cluster) -> None:
    places = set()
    for number in range(12):
        opening = f"What is the number {number}?"
        first = cluster.ask(opening)
        said = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
        second = cluster.ask("And the next?", {"role": "user", "content": opening}, said)
        assert second.headers["x-replica"] == first.headers["x-replica"]
        assert (
            second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= first.json()["usage"]["prompt_tokens"]
        )
        places.add(first.headers["x-replica"])
    assert len(places) == 2


def test_a_session_says_where_it_belongs(cluster: Cluster) -> None:
    for more in ({"prompt_cache_key": "k1"}, {"prompt_cache_key": "k2"}):
        assert len({cluster.ask(text, max_tokens=1, **more).headers["x-replica"] for text in QUESTIONS * 2}) == 1


def test_errors_and_the_model_list_pass_through(cluster: Cluster) -> None:
    refused = cluster.ask("x", temperature="hot")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "demo"


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "prompt_cache_key": "leaves"}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    running = 1
    while running and time.monotonic() < deadline:
        readings = [httpx.get(f"{cluster.url}/stats").json()["engine"]["requests_running"] for _ in range(8)]
        running = max(readings)
    assert not running


def test_a_killed_replica_loses_only_its_running_streams(cluster: Cluster) -> None:
    expected = {text: cluster.ask(text).json()["choices"][0]["message"]["content"] for text in QUESTIONS}
    assert len(set(expected.values())) == len(expected)
    victim = cluster.ask("stream 0", max_tokens=1).headers["x-replica"]
    over = threading.Event()

    def keep_asking(number: int) -> list[tuple[int, bool]]:
        found = []
        while not over.is_set():
            text = QUESTIONS[number]
            answer = cluster.ask(text)
            right = answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == expected[text]
            found.append((answer.status_code, right))
        return found

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(cluster.stream, f"stream {number}") for number in range(8)]
        asking = [pool.submit(keep_asking, number) for number in range(4)]
        time.sleep(2)
        cluster.kill(victim)
        ended = [stream.result() for stream in streams]
        over.set()
        answers = [answer for asked in asking for answer in asked.result()]
    assert len(answers) > 8 and set(answers) == {(200, True)}
    for replica, events in ended:
        errors = [event["error"] for event in events if "error" in event]
        if replica == victim:
            assert [error["code"] for error in errors] == ["replica_lost"] and errors[0]["message"]
            assert "error" in events[-1] and len(events) > 2
        else:
            assert not errors and events[-1]["choices"][0]["finish_reason"] == "length"
    assert {replica for replica, _ in ended} > {victim}
    deadline = time.monotonic() + 60
    while len(cluster.replicas()) < 2:  # Ray starts another
        assert time.monotonic() < deadline
    assert victim not in cluster.replicas()
