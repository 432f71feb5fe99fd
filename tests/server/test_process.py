"""The life of a server: loading, ready, failed, draining, ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertserve.errors import ConfigError, GGUFError
from expertserve.server.app import create_app
from expertserve.server.process import ServerProcess
from expertserve.server.state import ServedModel, ServerSettings, ServerState
from tests.server.hash_world import World
from tests.server.worlds import Running, running, wait_status

CHECKOUT = Path(__file__).parents[2]
STREAM: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 30, "ignore_eos": True, "temperature": 0}


def test_requests_get_503_until_the_model_is_loaded() -> None:
    loaded = threading.Event()
    world = World()

    def load() -> ServedModel:
        loaded.wait(10)
        return world.served()

    with running(world, load) as server:
        response = wait_status(server.http, "loading")
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        for response in (server.post("/v1/completions", prompt="x"), server.http.get("/v1/models")):
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["code"] == "model_loading"
        assert 'expertserve_status{status="loading"} 1.0' in server.http.get("/metrics").text
        loaded.set()
        assert wait_status(server.http, "ready").status_code == 200
        assert server.post("/v1/completions", prompt="x").status_code == 200


def failing_load() -> ServedModel:
    raise GGUFError("model.gguf: truncated at byte 7")


def test_a_failed_load_shows_in_health_where_the_server_stays() -> None:
    with running(World(), failing_load, exit_on_failed_load=False) as server:
        response = wait_status(server.http, "failed")
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "model.gguf: truncated at byte 7"
        refused = server.post("/v1/completions", prompt="x")
        assert refused.status_code == 500 and "truncated" in refused.json()["error"]["message"]


def test_a_failed_load_ends_the_server_with_its_error() -> None:
    state = ServerState(ServerSettings(port=0))
    process = ServerProcess(create_app(state), state, failing_load)
    process.bind()
    with pytest.raises(GGUFError, match="truncated at byte 7"):
        process.run()


def test_an_unexpected_exception_of_the_load_is_a_failure_too() -> None:
    def load() -> ServedModel:
        raise ZeroDivisionError("oops")

    with running(World(), load, exit_on_failed_load=False) as server:
        assert "ZeroDivisionError: oops" in wait_status(server.http, "failed").json()["error"]["message"]


def test_an_engine_that_failed_shows_in_health_and_refuses() -> None:
    world = World()
    with running(world) as server:

        def fault(batch: object) -> None:
            raise RuntimeError("a bug")

        world.fault(fault)
        response = server.post("/v1/completions", prompt="x")
        assert response.status_code == 500 and "a bug" in response.json()["error"]["message"]
        assert wait_status(server.http, "failed").status_code == 500
        assert server.post("/v1/completions", prompt="x").status_code == 500


def test_a_taken_port_is_one_line_with_what_to_do() -> None:
    with running(World()) as server:
        port = int(server.url.rpartition(":")[2])
        state = ServerState(ServerSettings(port=port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*--port"):
            ServerProcess(create_app(state), state, failing_load).bind()


@pytest.mark.parametrize(("host", "keys", "warns"), [("0.0.0.0", (), 1), ("0.0.0.0", ("k",), 0), ("127.0.0.1", (), 0)])
def test_an_open_address_without_a_key_is_warned_of(
    host: str, keys: tuple[str, ...], warns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ServerState(ServerSettings(host=host, port=0, api_keys=keys))
    process = ServerProcess(create_app(state), state, failing_load)
    process.bind()
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("set an API key") == warns
    with pytest.raises(GGUFError):
        process.run()


def stop_when_running(server: Running, count: int) -> None:
    server.world.wait_for("requests_running", count)
    server.process.request_stop()


def test_an_idle_server_ends_at_once() -> None:
    with running(World(), drain_timeout_s=60) as server:
        server.http.get("/health")  # a connection that is kept alive must not hold the server
        server.process.request_stop()
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_what_outlasts_the_drain_timeout_hears_an_error() -> None:
    world = World()
    with running(world, drain_timeout_s=0.2) as server:
        world.slow(0.03)
        whole: list[httpx.Response] = []
        body = {**STREAM, "max_tokens": 480}
        waiting = threading.Thread(
            target=lambda: whole.append(server.post("/v1/completions", **{**body, "stream": False}))
        )
        waiting.start()
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            stop_when_running(server, 2)
            rest = [line for line in response.iter_lines() if line]
        waiting.join(10)
        assert len(rest) > 1 and json.loads(rest[-1][6:])["error"]["code"] == "server_draining"
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "server_draining"
        server.thread.join(10)
        assert not server.thread.is_alive() and world.engine.snapshot()["cancelled"] == 2


def test_a_client_that_reads_nothing_does_not_hold_the_shutdown() -> None:
    world = World()
    with running(world, drain_timeout_s=0.2) as server:
        body = json.dumps({**STREAM, "max_tokens": 400, "logprobs": 257}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            world.wait_for("finished", 1, timeout_s=20)
            time.sleep(0.3)
            assert "expertserve_requests_running 1.0" in server.http.get("/metrics").text, "the client held nothing up"
            server.process.request_stop()
            server.thread.join(10)
            assert not server.thread.is_alive()


@contextmanager
def process_of(step_s: float, load_s: float = 0) -> Iterator[tuple[Any, httpx.Client]]:
    """A server of its own; a busy machine may take seconds to start it."""
    command = [sys.executable, "-m", "tests.server.serve_hash", str(step_s), str(load_s), "60"]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with httpx.Client(base_url=process.stdout.readline().strip(), timeout=20) as http:
                wait_status(http, "loading" if load_s else "ready")
                yield process, http
        finally:
            process.kill()


def ended(process: Any, within_s: float) -> None:
    """With status 0, after `run` returned."""
    out, err = process.communicate(timeout=within_s)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "ended", out
    assert "Traceback" not in err, err


def test_a_signal_lets_running_requests_end_and_accepts_no_more() -> None:
    with process_of(step_s=0.05) as (process, http):
        with http.stream("POST", "/v1/completions", json={**STREAM, "max_tokens": 60}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=http.base_url) as late:
                deadline = time.monotonic() + 2
                with pytest.raises(httpx.ConnectError):
                    while time.monotonic() < deadline:
                        # A connection that waited in the backlog as the listener closed is reset, not refused.
                        with suppress(httpx.ReadError, httpx.RemoteProtocolError):
                            late.get("/health", headers={"connection": "close"})
            rest = [line for line in lines if line]
        assert len(rest) > 10
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        ended(process, 10)


def test_the_second_signal_ends_at_once() -> None:
    with process_of(step_s=0.05) as (process, http):
        with http.stream("POST", "/v1/completions", json={**STREAM, "max_tokens": 480}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            ended(process, 10)
            assert "server_draining" in [line for line in lines if line][-1]


def test_a_signal_while_loading_ends_the_server() -> None:
    with process_of(step_s=0, load_s=60) as (process, _):
        process.send_signal(signal.SIGTERM)
        ended(process, 10)


def test_metrics_count_what_happened() -> None:
    with running(World()) as server:
        for _ in range(2):
            server.post("/v1/completions", prompt="abc", max_tokens=4, logit_bias={"65": 100})
        server.post("/v1/completions", prompt=5)
        lines = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
        assert float(lines['expertserve_http_requests_total{path="/v1/completions",status="200"}']) == 2
        assert float(lines['expertserve_http_requests_total{path="/v1/completions",status="400"}']) == 1
        assert float(lines['expertserve_choices_finished_total{reason="length"}']) == 2
        assert float(lines["expertserve_prompt_tokens_total"]) == 8
        assert float(lines["expertserve_cached_tokens_total"]) == 3
        assert float(lines["expertserve_completion_tokens_total"]) == 8
        assert float(lines["expertserve_time_to_first_token_seconds_count"]) == 2
        assert float(lines["expertserve_inter_token_seconds_count"]) == 6
        assert float(lines["expertserve_requests_running"]) == 0
        assert float(lines["expertserve_engine_generated_tokens"]) == 8
        assert float(lines["expertserve_stream_slots"]) == 3
        assert float(lines['expertserve_stream_hits{phase="decode"}']) == 7


def test_unknown_paths_do_not_make_metrics_grow(server: Running) -> None:
    for number in range(3):
        server.http.get(f"/nothing/{number}")
    assert "nothing" not in server.http.get("/metrics").text
