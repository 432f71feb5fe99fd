"""Many users: what is refused when there is too much, and that it is served afterwards."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from expertserve.config import resolve
from expertserve.errors import ConfigError
from expertserve.server.guard import MAX_HEADER_BYTES
from expertserve.server.reload import Reloader, keys_of, server_settings
from expertserve.server.state import ServerState
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


def test_a_stream_that_has_not_begun_fails_with_a_status() -> None:
    with running(World(), queue_timeout_s=0.5) as server, ThreadPoolExecutor(1) as pool:
        server.world.slow(0.1)
        all_places = pool.submit(server.post, TEXT, prompt="x", n=8, max_tokens=15, ignore_eos=True)
        server.world.wait_for("requests_running", 8)
        assert error_of(server.post(TEXT, prompt="x", stream=True), 408)["code"] == "queue_timeout"
        assert all_places.result().status_code == 200


def test_a_stream_that_waits_long_begins_with_comments_so_that_nothing_on_the_way_gives_up() -> None:
    with running(World(), keep_alive_s=0.02) as server, ThreadPoolExecutor(1) as pool:
        gate = hold(server)
        begun = threading.Event()

        def lines() -> list[str]:
            with server.http.stream("POST", TEXT, json={"prompt": "x", "max_tokens": 1, "stream": True}) as response:
                begun.set()
                return [line for line in response.iter_lines() if line]

        answer = pool.submit(lines)
        assert begun.wait(10) and not gate.is_set()
        gate.set()
        found = answer.result()
        assert found[0].startswith(":") and found[-1] == "data: [DONE]"


LONG: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 150, "ignore_eos": True, "logprobs": 257}


@contextmanager
def reading_nothing(server: Running) -> Iterator[socket.socket]:
    """A client whose answer fills every buffer on its way."""
    body = json.dumps(LONG).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        key = b"authorization: Bearer k\r\n"
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (key, len(body)))
        client.sendall(body)
        yield client


def test_a_client_that_takes_nothing_is_cut_off_and_leaves_nothing_behind() -> None:
    world = World()
    with running(world, stall_timeout_s=0.5, api_keys=("k",), key_limit=1) as server:
        before = len(os.listdir("/proc/self/fd"))
        with reading_nothing(server) as client:
            world.wait_for_under_way(1)
            beside = httpx.post(server.url + TEXT, json={"prompt": "y"}, headers={"authorization": "Bearer k"})
            assert error_of(beside, 429)["code"] == "key_limit"
            deadline = time.monotonic() + 20
            while "expertserve_requests_running 1.0" in server.http.get("/metrics").text:
                assert time.monotonic() < deadline, "the client still holds its answer"
                time.sleep(0.05)
            assert world.engine.snapshot()["kv_cells_used"] == 0
            assert server.post(TEXT, prompt="y", max_tokens=2).status_code == 200
            with suppress(ConnectionResetError):
                while got := client.recv(65536):
                    assert b"[DONE]" not in got
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_client_that_takes_little_at_a_time_is_not_cut_off() -> None:
    with running(World(), stall_timeout_s=2, api_keys=("k",)) as server, reading_nothing(server) as client:
        began, answer = time.monotonic(), b""
        while b"data: [DONE]" not in answer[-100:]:
            time.sleep(0.02)
            got = client.recv(40_000)
            assert got, "cut off"
            answer += got
        assert time.monotonic() - began > 2.5


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES, 8 * MAX_HEADER_BYTES])
def test_headers_are_bounded_and_the_answer_says_so(server: Running, length: int) -> None:
    response = server.http.get("/health", headers={"x-long": "x" * length})
    if length <= MAX_HEADER_BYTES:
        assert error_of(response, 431)["code"] == "headers_too_large"
    else:
        assert response.status_code == 400 and f"over {2 * MAX_HEADER_BYTES} bytes" in response.text
    assert server.http.get("/health", headers={"x-long": "x" * (MAX_HEADER_BYTES // 2)}).status_code == 200


def test_settings_read_again_count_for_the_next_request_and_bad_ones_change_nothing(tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "config.toml"
    keys.write_text("old\n")
    config.write_text("max_body = 2000\n")
    settings = resolve({"model": "demo", "config": str(config), "api_key_file": str(keys), "port": 0})
    state = ServerState(server_settings(settings))
    reload = Reloader(settings, state)
    with running(World(), state=state) as server:
        long = {"prompt": "x" * 3000, "max_tokens": 0}

        def status(key: str, **body: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(server.url + TEXT, json={**long, **body}, headers=headers).status_code

        assert (status("old"), status("new")) == (413, 401)
        keys.write_text("new\n")
        config.write_text("max_body = 4000\nparallel = 9\n")
        reload()
        assert (status("old"), status("new", prompt="x")) == (401, 200)
        assert state.settings.max_body_bytes == 4000 and state.settings.max_sequences == 4 + 64
        for bad_keys, bad_config in ((b"", ""), (b"\xff", ""), (b"new", "x = 1"), (b"new", "max_queue = 'long'")):
            keys.write_bytes(bad_keys)
            config.write_text(f"max_body = 8000\n{bad_config}\n")
            reload()
            assert state.settings.max_body_bytes == 4000 and status("new", prompt="x") == 200


def test_keys_of_a_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffzero\n# of the team\nfirst\n\n second  # of Eve\r\nthi#rd\n", encoding="utf-8")
    assert keys_of(file) == ["zero", "first", "second", "thi#rd"]
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        keys_of(file)


PAGE = "https://chat.example"


def preflight(server: Running, origin: str = PAGE) -> str | None:
    """The origin that a browser is told it may ask from; it asks without a key."""
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    return httpx.options(server.url + TEXT, headers=asked).headers.get("access-control-allow-origin")


@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_pages_from_elsewhere_may_only_where_asked(origins: tuple[str, ...]) -> None:
    with running(World(), cors_origins=origins) as server:
        assert preflight(server) == (PAGE if origins else None)
        assert preflight(server, "https://other.example") is None


def test_a_page_from_elsewhere_reads_why_it_was_refused() -> None:
    with running(World(), cors_origins=(PAGE,), api_keys=("secret",)) as server:
        assert preflight(server) == PAGE
        refused = httpx.post(server.url + TEXT, json={"prompt": "x"}, headers={"origin": PAGE})
        assert error_of(refused, 401) and refused.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_origins_are_read_again(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    settings = resolve({"model": "demo", "config": str(config), "port": 0})
    state = ServerState(server_settings(settings))
    with running(World(), state=state) as server:
        reload = Reloader(settings, state)
        for origin, allowed in (("https://Chat.example:443/", PAGE), ("*", "*"), ("https://other.example", None)):
            config.write_text(f"cors_origin = ['{origin}']\n")
            reload()
            assert preflight(server) == allowed
