"""Many users: what is refused when there is too much, and that it is served afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from expertserve.errors import ConfigError
from expertserve.server.app import _keys_of
from tests.server.hash_world import MODEL, World
from tests.server.test_errors import error_of
from tests.server.worlds import Running, running

TEXT = "/v1/completions"


def hold(server: Running) -> threading.Event:
    """Every step waits until the event is set."""
    gate = threading.Event()
    server.world.fault(lambda batch: gate.wait(20) and None)
    return gate


def test_a_full_queue_is_429_with_retry_after_and_free_again() -> None:
    world = World()
    with running(world, max_sequences=3) as server, ThreadPoolExecutor(3) as pool:
        gate = hold(server)
        waiting = [pool.submit(server.post, TEXT, prompt="x", max_tokens=2) for _ in range(3)]
        world.wait_for_under_way(3)  # held in a step, or waiting for its end
        refused = server.post(TEXT, prompt="x", max_tokens=2)
        assert error_of(refused, 429)["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
        with pytest.raises(openai.RateLimitError):
            server.client.completions.create(model=MODEL, prompt="x")
        error_of(server.post(TEXT, prompt="x", stream=True), 429)
        gate.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 3
        assert server.post(TEXT, prompt="x", max_tokens=2).status_code == 200
        assert server.post(TEXT, prompt="x", n=5, max_tokens=2).status_code == 200
        assert 'expertserve_requests_refused_total{limit="queue_full"} 3.0' in server.http.get("/metrics").text


def test_a_key_has_its_limit_and_the_others_do_not_suffer() -> None:
    world = World()
    with running(world, api_keys=("one", "two"), key_limit=1) as server, ThreadPoolExecutor(1) as pool:
        gate = hold(server)
        first = pool.submit(server.post, TEXT, prompt="x", max_tokens=2)
        world.wait_for("requests_running", 1)
        refused = server.post(TEXT, prompt="x", max_tokens=2)
        assert error_of(refused, 429)["code"] == "key_limit" and "retry-after" in refused.headers
        assert server.http.get("/v1/models").status_code == 200
        threading.Timer(0.2, gate.set).start()
        other = httpx.post(server.url + TEXT, json={"prompt": "x", "max_tokens": 2}, headers={"x-api-key": "two"})
        assert other.status_code == first.result().status_code == 200
        assert server.post(TEXT, prompt="x", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"queue_timeout_s": 0.05}, "queue_timeout"), ({"request_timeout_s": 0.05}, "request_timeout")],
)
def test_time_outs_are_408_and_the_server_lives_on(limits: dict[str, float], code: str) -> None:
    world = World()
    with running(world, **limits) as server:
        world.slow(0.1)
        body: Any = {"prompt": "x", "n": 9, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert error_of(server.post(TEXT, **body), 408)["code"] == code
        world.heal()
        world.wait_for("requests_running", 0)
        assert server.post(TEXT, prompt="x", max_tokens=0).status_code == 200


def test_keys_of_a_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n second  # of Eve\n")
    assert _keys_of(file) == ["first", "second"]
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        _keys_of(file)


@pytest.mark.parametrize("origins", [(), ("https://chat.example",)])
def test_pages_from_elsewhere_may_only_where_asked(origins: tuple[str, ...]) -> None:
    with running(World(), cors_origins=origins) as server:
        asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        allowed = server.http.options(TEXT, headers=asked).headers.get("access-control-allow-origin")
        assert allowed == (origins[0] if origins else None)
