"""A server on a real socket in this process, with clients for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from expertserve.server.app import create_app
from expertserve.server.process import ServerProcess
from expertserve.server.state import ServedModel, ServerSettings, ServerState
from tests.server.hash_world import World


@dataclass
class Running:
    """A server that answers, and clients for it."""

    world: World
    url: str
    process: ServerProcess
    thread: threading.Thread
    http: httpx.Client
    client: openai.OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def running(
    world: World, load: Callable[[], ServedModel] | None = None, state: ServerState | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve `world` on a free port until the block is left."""
    key = settings.get("api_keys", ("none",))[0]
    state = state or ServerState(
        ServerSettings(port=0, drain_timeout_s=settings.pop("drain_timeout_s", 0.0), **settings)
    )
    process = ServerProcess(create_app(state), state, load or world.served)
    url = process.bind()
    thread = threading.Thread(target=process.run)
    thread.start()
    http = httpx.Client(base_url=url, timeout=20, headers={"authorization": f"Bearer {key}"})
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)
    try:
        with http, client:
            if load is None:
                wait_status(http, "ready")
            yield Running(world, url, process, thread, http, client)
    finally:
        process.request_stop()
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
        world.engine.stop()  # a world that `load` never handed over runs on


def wait_status(http: httpx.Client, status: str, timeout_s: float = 10.0) -> httpx.Response:
    deadline = time.monotonic() + timeout_s
    while True:
        response = http.get("/health")
        if response.json()["status"] == status:
            return response
        assert time.monotonic() < deadline, response.text
        time.sleep(0.01)
