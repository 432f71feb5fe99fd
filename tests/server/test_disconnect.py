"""A client that goes away frees its sequences within one step."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from expertserve.models.batch import Batch
from tests.server.hash_world import MODEL, World
from tests.server.worlds import Running, running

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Gate:
    """Lets steps through one by one once it is shut, and counts them."""

    def __init__(self) -> None:
        self.steps = 0
        self._open = threading.Event()
        self._permits = threading.Semaphore(0)
        self._open.set()

    def __call__(self, batch: Batch) -> None:
        self.steps += 1
        if not self._open.is_set():
            self._permits.acquire(timeout=10)

    def shut(self) -> None:
        self._open.clear()

    def let_through(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.release()


def gated(server: Running) -> Gate:
    gate = Gate()
    server.world.fault(gate)
    return gate


def ends_within_a_step(server: Running, gate: Gate, cancelled_before: float, sequences: int) -> None:
    """The step under way when the client left may end; no other may run."""
    time.sleep(0.1)  # the disconnect is on its way while the step is held
    steps = gate.steps
    gate.let_through(50)
    server.world.wait_for("cancelled", cancelled_before + sequences)
    server.world.wait_for("requests_running", 0)
    assert gate.steps == steps


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_cancels_it(server: Running, n: int) -> None:
    before = server.world.engine.snapshot()["cancelled"]
    gate = gated(server)
    body = {"prompt": "x", "stream": True, "n": n, **LONG}
    with (
        httpx.Client(base_url=server.url, timeout=20) as client,
        client.stream("POST", "/v1/completions", json=body) as s,
    ):
        lines = s.iter_lines()
        for _ in range(10):
            next(lines)
        gate.shut()
        wait_for_step(gate)
    ends_within_a_step(server, gate, before, n)


def wait_for_step(gate: Gate) -> None:
    """Until a step is held at the gate."""
    steps, deadline = -1, time.monotonic() + 5
    while steps != gate.steps:
        assert time.monotonic() < deadline
        steps = gate.steps
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_an_answer_that_is_not_streamed_cancels_it(server: Running, path: str) -> None:
    before = server.world.engine.snapshot()["cancelled"]
    gate = gated(server)
    subject: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    with httpx.Client(base_url=server.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        gate.shut()
        gate.let_through(3)
        client.post(path, json={**subject, **LONG})
    ends_within_a_step(server, gate, before, 1)


def test_closing_the_clients_stream_cancels_it(server: Running) -> None:
    before = server.world.engine.snapshot()["cancelled"]
    gate = gated(server)
    extra: Any = {"ignore_eos": True}
    stream = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, max_tokens=400, extra_body=extra
    )
    for _ in range(5):
        next(stream)
    gate.shut()
    wait_for_step(gate)
    stream.close()
    ends_within_a_step(server, gate, before, 1)


def test_leaving_in_the_queue_never_computes(server: Running) -> None:
    """Eight run, the ninth waits and goes."""
    gate = gated(server)
    before = server.world.engine.snapshot()["cancelled"]
    with httpx.Client(base_url=server.url, timeout=0.5) as client:
        with pytest.raises(httpx.ReadTimeout):
            gate.shut()
            client.post("/v1/completions", json={"prompt": "x", "n": 12, **LONG})
    ends_within_a_step(server, gate, before, 12)


def test_a_client_that_stays_is_not_disturbed_by_one_that_goes(server: Running) -> None:
    server.world.slow(0.005)
    with httpx.Client(base_url=server.url, timeout=20) as leaver:
        with leaver.stream("POST", "/v1/completions", json={"prompt": "going", "stream": True, **LONG}) as response:
            next(response.iter_lines())
            done: list[str] = []
            body: Any = {"model": MODEL, "prompt": "staying", "max_tokens": 30, "temperature": 0}
            stayer = threading.Thread(
                target=lambda: done.append(server.client.completions.create(**body).choices[0].text)
            )
            stayer.start()
            time.sleep(0.05)
    stayer.join(10)
    assert done == [server.world.expect("staying", max_tokens=30).text]


def test_silence_is_filled_so_that_proxies_keep_the_connection() -> None:
    world = World()
    with running(world, keep_alive_s=0.05) as server:
        gate = gated(server)
        gate.shut()
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 2}
        ) as response:
            lines = response.iter_lines()
            silent = [next(lines) for _ in range(6)]
            gate.let_through(50)
            rest = [line for line in lines if line]
        assert silent == [": keep-alive", ""] * 3
        assert rest[-1] == "data: [DONE]" and rest[0].startswith("data: {")
