"""`expertserve bench --serve`: what clients of a server see, whatever the server does."""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from expertserve.bench import load as load_module
from expertserve.bench import load_figures
from expertserve.bench.load import Clients, Prompts, load
from expertserve.bench.load_client import Answer, Message
from expertserve.bench.load_figures import Limits, figures
from expertserve.config import Settings, resolve
from expertserve.data import model_path
from tests.bench.scripted_server import DONE, LAST, Exchange, event, scripted
from tests.server.served_process import serving

FIRST = 3  # requests that find out what the server understands, and one that warms it up
Capture = pytest.CaptureFixture[str]


def settings(url: str, **given: str) -> Settings:
    return resolve({"serve": url, "concurrency": "1", "prompt_tokens": "20", **given}, command="bench")


def rows(capsys: Capture, url: str, **given: str) -> list[dict[str, Any]]:
    status = load(settings(url, **given))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    found: list[dict[str, Any]] = result["rows"]
    assert status == bool(result["void"]) and result["void"] == sum(row["void"] is not None for row in found)
    return found


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "expertserve.cli", "bench", *arguments], capture_output=True, text=True, timeout=120
    )


def counter(url: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_real_server_counts_the_tokens_that_its_load_reports(endpoint: str, tmp_path: Path) -> None:
    kept, lines = tmp_path / "load.json", tmp_path / "load.csv"
    with serving(model_path("demo"), "--stats-every", "0") as server:
        flags = ["--prompt-tokens", "60", "--decode-tokens", "12", "--requests", "6"]
        flags += ["--results-json", str(kept), "--results-csv", str(lines)]
        done = command("--serve", f"{server.url}/v1/", "--endpoint", endpoint, "--concurrency", "1,3", *flags)
        generated = counter(server.url, "expertserve_completion_tokens_total")
    assert done.returncode == 0 and "[expert-stream]" not in done.stderr and "HTTP Request" not in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(kept.read_text()) and result["void"] == 0
    with lines.open() as file:
        assert [line["output_tok_s"] for line in csv.DictReader(file)] == [
            str(row["output_tok_s"]) for row in result["rows"]
        ]
    assert result["model"] == "demo" and result["endpoint"] == endpoint
    assert [row["concurrency"] for row in result["rows"]] == [1, 3]
    assert [row["most_at_once"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert (row["requests"], row["completed"], row["errors"]) == (6, 6, {})
        assert row["output_tokens"] == 12 and 45 <= row["prompt_tokens"] <= 75
        assert 0 < row["interval_p50_ms"] <= row["interval_p99_ms"] <= row["answer_p99_ms"]
        assert row["output_tok_s"] == pytest.approx(6 * 12 / row["seconds"], rel=0.01)
        assert row["tokens_an_event"] >= 1 and 0 <= row["cached"] < 0.5 and row["counted_by_events"] == 0
    assert generated == 8 + 8 + 12 + 2 * 6 * 12


@contextmanager
def llama_cpp(model: Path) -> Iterator[str]:
    """The address of llama.cpp's server."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.llamacpp", "serve", str(model), "--parallel", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp (llama.cpp) is not installed")
def test_a_peers_server_counts_the_tokens_that_its_load_reports(capsys: Capture) -> None:
    with llama_cpp(model_path("demo")) as url:
        (row,) = rows(capsys, url, concurrency="2", requests="6", prompt_tokens="60", decode_tokens="12")
        generated = counter(url, "llamacpp:tokens_predicted_total")
    assert (row["void"], row["completed"], row["errors"], row["output_tokens"]) == (None, 6, {}, 12)
    assert 45 <= row["prompt_tokens"] <= 75 and row["most_at_once"] == 2
    assert generated == 8 + 8 + 12 + 6 * 12


def test_chats_at_a_real_server_grow() -> None:
    with serving(model_path("demo"), "--stats-every", "0") as server:
        flags = ["--rate", "20", "--turns", "3", "--think-time", "0.01", "--requests", "6", "--decode-tokens", "8"]
        done = command("--serve", server.url, "--arrival", "chat", "--prompt-tokens", "30", *flags)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (row["rate"], row["requests"], row["completed"], row["errors"]) == (20, 6, 6, {})
    assert row["prompt_tokens"] > 45  # of the second turn, which has the first before it


def test_a_turn_has_all_that_was_said_before(capsys: Capture) -> None:
    with scripted(lambda exchange: exchange.answer()) as server:
        (row,) = rows(
            capsys, server.url, arrival="chat", rate="50", turns="3", think_time="0.001", requests="5"
        )  # fmt: skip
        asked = [body["messages"] for body in server.bodies[FIRST:]]
    assert row["completed"] == 5
    assert sorted(map(len, asked)) == [1, 1, 3, 3, 5]
    for messages in asked:
        assert all(message == {"role": "assistant", "content": "t0 t1 t2 "} for message in messages[1::2])
        before = messages[:-2]
        assert not before or before in asked
    openings = [messages[0]["content"] for messages in asked if len(messages) == 1]
    assert len(set(openings)) == 2


def test_so_many_requests_are_under_way_and_no_prompt_comes_twice(capsys: Capture) -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    full = threading.Event()

    def script(exchange: Exchange) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            if under_way == 4:
                full.set()
        if exchange.number >= FIRST:
            full.wait(20)
        with lock:
            under_way -= 1
        exchange.answer()

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, concurrency="4", requests="12")
        prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert full.is_set() and most == 4 and row["completed"] == 12
    assert len(set(prompts)) == len(prompts) == FIRST + 12


def test_times_are_those_of_the_server(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin()
        time.sleep(0.2)
        for _ in range(4):
            exchange.write(event("word "))
            time.sleep(0.05)
        exchange.write(LAST, DONE)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="3")
        (late,) = rows(capsys, server.url, requests="2", slo_ttft="150")
        (slow,) = rows(capsys, server.url, requests="2", slo_itl="20")
    assert row["first_token_p50_ms"] >= 200 and 40 <= row["interval_p50_ms"] < row["first_token_p50_ms"]
    assert row["answer_p50_ms"] >= 400 and row["output_tokens"] == 4 and row["prompt_tokens"] is None
    assert late["completed"] == slow["completed"] == 2
    assert late["met_limits"] == slow["met_limits"] == late["goodput_requests_s"] == 0


def test_the_figures_of_answers_made_by_hand() -> None:
    quick = Answer(10.0, [10.1, 10.2, 10.4], "abc", prompt_tokens=50, output_tokens=3, ended=10.5)
    slow = Answer(11.0, [12.5, 12.6, 12.7], "abc", prompt_tokens=70, output_tokens=5, ended=13.0)
    quick.cached_tokens = 30
    lost = Answer(10.2, [10.3, 13.9], "a", output_tokens=1, ended=14.0, error="cut off", detail="gone")
    row = figures([quick, slow, lost], 4.0, Limits(first_token_ms=500, interval_ms=200))
    assert (row["requests"], row["completed"], row["errors"]) == (3, 2, {"cut off": 1})
    assert row["error_details"] == {"cut off": "gone"}
    assert row["most_at_once"] == 2
    assert (row["output_tok_s"], row["requests_s"], row["goodput_requests_s"]) == (2.0, 0.5, 0.25)
    assert row["met_limits"] == pytest.approx(1 / 3, abs=1e-4)
    assert (row["prompt_tokens"], row["output_tokens"]) == (60, 4)
    assert row["first_token_p50_ms"] == row["first_token_mean_ms"] == 800
    assert row["interval_p50_ms"] == 100 and row["interval_mean_ms"] == 125
    assert (row["cached"], row["tokens_an_event"]) == (0.6, round(8 / 6, 4))
    assert row["first_token_p99_ms"] == 1486 and row["interval_p99_ms"] == 197
    assert slow.mean_interval_ms == pytest.approx(50)  # five tokens in three events


def test_a_level_without_a_whole_answer_has_no_times() -> None:
    row = figures([Answer(0.0, ended=1.0, error="HTTP 500")], 1.0, Limits(1, 1))
    assert row["first_token_p50_ms"] is row["interval_p99_ms"] is row["output_tokens"] is None
    assert row["output_tok_s"] == row["met_limits"] == 0


def hang_up(exchange: Exchange) -> None:
    """Ends the connection as a process that is killed does."""
    exchange.begin()
    exchange.write(event("a "))
    connection = exchange.handler.connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def say(
    *parts: bytes, status: int = 200, kind: str = "text/event-stream", **headers: str
) -> Callable[[Exchange], None]:
    def script(exchange: Exchange) -> None:
        exchange.begin(status, kind, **headers)
        exchange.write(*parts)

    return script


def endless(part: bytes) -> Callable[[Exchange], None]:
    def script(exchange: Exchange) -> None:
        exchange.begin()
        while not exchange.released.is_set():
            exchange.write(part)

    return script


FAULTS: dict[str, tuple[str, Callable[[Exchange], None]]] = {
    "busy": ("HTTP 429", say(b'{"error": {"message": "later"}}', status=429, kind="application/json")),
    "broken": ("HTTP 503", say(b"\xff\xfe" * 9000, status=503)),
    "no stream": ("not understood", say(b"<html>hello</html>", kind="text/html")),
    "no JSON": ("not understood", say(event("a"), b"data: {rubbish\n\n")),
    "no object": ("not understood", say(b"data: [1, 2]\n\n")),
    "too deep": ("not understood", say(b"data: " + b"[" * 200_000 + b"\n\n")),
    "choices of numbers": ("not understood", say(b'data: {"choices": [7]}\n\n')),
    "choices of an object": ("not understood", say(b'data: {"choices": {"a": 1}}\n\n')),
    "delta of text": ("not understood", say(b'data: {"choices": [{"delta": "x"}]}\n\n')),
    "bytes": ("cut off", say(bytes(range(256)) * 50)),
    "line without end": ("not understood", endless(b"x" * (1 << 16))),
    "text without end": ("not understood", endless(event("a "))),
    "error event": ("error event", say(event("a"), b'data: {"error": {"message": "no memory"}}\n\n')),
    "end in the middle": ("cut off", say(event("a "))),
    "less than announced": ("cut off", say(event("a "), content_length="100000")),
    "hang-up": ("cut off", hang_up),
    "more than asked": ("not understood", say(event("a", usage={"completion_tokens": 7}), LAST, DONE)),
    "no text": ("no token", say(LAST, DONE)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_counted_by_its_kind_beside_whole_answers(fault: str, capsys: Capture) -> None:
    kind, break_down = FAULTS[fault]

    def script(exchange: Exchange) -> None:
        good = exchange.number < FIRST or exchange.number % 2
        exchange.answer() if good else break_down(exchange)

    with scripted(script) as server:
        assert load(settings(server.url, requests="5", decode_tokens="6")) == 0
        shown = capsys.readouterr().out
    (row,) = json.loads(shown.splitlines()[-1])["rows"]
    assert (row["completed"], row["errors"]) == (3, {kind: 2})
    assert f"concurrency 1: 2 x {kind} (" in shown


def test_what_is_no_http_at_all_is_cut_off(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.answer() if exchange.number <= FIRST else exchange.write(b"\x00rubbish\r\n\r\n" * 10)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="3")
    assert (row["completed"], row["errors"]) == (1, {"cut off": 2})


@pytest.mark.parametrize("sends", [b"", b": still here\n\n" + event("")], ids=["silence", "life signs"])
def test_a_server_that_hangs_is_given_up(sends: bytes, capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.number <= FIRST:
            exchange.answer()
            return
        exchange.begin()
        while not exchange.released.wait(0.05):
            exchange.write(sends)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, concurrency="2", requests="3", token_timeout="4")
    assert (row["completed"], row["errors"]) == (1, {"time-out": 2})


def test_an_answer_may_take_longer_than_the_wait_for_one_token(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin()
        for _ in range(6 if exchange.number >= FIRST else 1):
            exchange.write(event("word "))
            time.sleep(0.5)
        exchange.write(LAST, DONE)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="1", token_timeout="2")
    assert row["completed"] == 1 and row["answer_p50_ms"] > 2000


def test_a_server_that_dies_voids_its_row_and_ends_the_measurement(capsys: Capture) -> None:
    with serving(model_path("demo"), "--stats-every", "0") as server:

        def kill() -> None:
            while counter(server.url, "expertserve_completion_tokens_total") < 8 + 8 + 16 + 100:
                time.sleep(0.02)
            server.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        (row,) = rows(capsys, server.url, concurrency="3,4", requests="400", decode_tokens="16")
        killer.join()
    assert row["concurrency"] == 3 and re.fullmatch("the server does not answer any more: .+ not tried", row["void"])
    assert 0 < row["completed"] < 400 and row["completed"] + sum(row["errors"].values()) == 400
    assert row["errors"].keys() <= {"cut off", "no connection"} and "no connection" in row["errors"]


@pytest.mark.parametrize("unknown", [(), ("ignore_eos",), ("ignore_eos", "stream_options")])
def test_fields_that_a_server_does_not_know_are_left_out(unknown: tuple[str, ...], capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        if any(name in exchange.body for name in unknown):
            exchange.begin(400, "application/json")
        else:
            exchange.answer()

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="2")
        last = server.bodies[-1]
    assert row["completed"] == 2
    assert {"ignore_eos", "stream_options"} - last.keys() == set(unknown)


@pytest.mark.parametrize(("a_word", "around"), [(1, 0), (3, 40)])
def test_words_come_to_the_tokens_asked_for_where_the_server_counts(a_word: int, around: int, capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        words = len(exchange.body["messages"][0]["content"].split())
        exchange.answer(prompt_tokens=around + a_word * words)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="2", prompt_tokens="400")
    assert row["prompt_tokens"] == 400


def test_a_key_is_sent_and_a_server_without_one_is_not_sent_any(capsys: Capture) -> None:
    with scripted(lambda exchange: exchange.answer()) as server:
        rows(capsys, server.url, requests="1", server_key="secret")
        assert set(server.keys) == {"Bearer secret"}
        server.keys.clear()
        rows(capsys, server.url, requests="1")
        assert set(server.keys) == {None}


def test_a_level_without_a_whole_answer_is_void(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.answer() if exchange.number < FIRST else exchange.begin(500)

    with scripted(script) as server:
        found = rows(capsys, server.url, requests="2", concurrency="1,2")
    assert [row["errors"] for row in found] == [{"HTTP 500": 2}, {"HTTP 500": 2}]
    assert all(row["void"] == "no answer came whole: 2 x HTTP 500 ()" for row in found)


def test_answers_in_one_piece_are_void(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin()
        usage = {"prompt_tokens": 9, "completion_tokens": exchange.body["max_tokens"]}
        exchange.write(event("all of it", usage=usage), LAST, DONE)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="2")
        assert row["void"] == "each answer came as one piece: this server does not stream"
    with scripted(lambda exchange: exchange.answer(tokens=1)) as server:
        (row,) = rows(capsys, server.url, requests="2", decode_tokens="1")
        assert row["void"] is None and row["interval_p50_ms"] is None


def test_a_client_without_a_moment_to_spare_is_void(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = event("word ") * 20_000
    monkeypatch.setattr(load_figures, "_BUSY", 0.1)  # of a core, of which others may want most

    def script(exchange: Exchange) -> None:
        if exchange.number < FIRST:
            exchange.answer()
            return
        exchange.begin()
        exchange.write(flood, LAST, DONE)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, requests="8", decode_tokens="20000", concurrency="4")
    assert row["completed"] == 8 and 0.1 < row["client_cpu"] <= 1
    assert re.fullmatch(r"the load generator was the limit: it used \d+% of a core", row["void"])


def test_what_a_server_does_not_say_or_do_stands_beside_its_figures(capsys: Capture) -> None:
    def lines(shown: str) -> list[str]:
        return [line.partition(": ")[2] for line in shown.splitlines() if line.startswith("concurrency 1: ")][1:]

    with scripted(lambda exchange: exchange.answer(tokens=3)) as server:
        assert load(settings(server.url, requests="2", decode_tokens="3")) == 0
        assert lines(capsys.readouterr().out) == ["tokens are counted by events: the server sends no usage"]
        load(settings(server.url, requests="2", decode_tokens="9"))
        assert "the server ended answers itself, at 3 of 9 tokens" in lines(capsys.readouterr().out)
    usage = {"prompt_tokens": 20, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 5}}
    with scripted(say(event("a"), event("b"), event(usage=usage), LAST, DONE)) as server:
        assert load(settings(server.url, requests="2", decode_tokens="8")) == 0
        shown = capsys.readouterr().out
    assert lines(shown) == ["4.0 tokens an event: ITL is the time between events"]
    (row,) = json.loads(shown.splitlines()[-1])["rows"]
    assert (row["output_tokens"], row["cached"], row["counted_by_events"]) == (8, 0.25, 0)


INTERRUPTIBLE = """
import signal, sys
from expertserve.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner was started under
sys.exit(main())
"""


def test_ctrl_c_leaves_what_was_measured_and_one_line() -> None:
    reached = threading.Event()

    def script(exchange: Exchange) -> None:
        if exchange.number < FIRST + 2:
            exchange.answer()
            return
        reached.set()
        exchange.begin()
        exchange.released.wait(60)

    with scripted(script) as server:
        flags = ["--serve", server.url, "--requests", "2", "--concurrency", "1,2,3"]
        with subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "bench", *flags], stdout=-1, stderr=-1, text=True
        ) as process:
            assert reached.wait(60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    done, interrupted = json.loads(out.splitlines()[-1])["rows"]
    assert (done["completed"], done["void"]) == (2, None)
    assert interrupted == {"concurrency": 2, "void": "interrupted"}


def test_a_chat_that_gets_no_answer_says_no_more(capsys: Capture) -> None:
    def script(exchange: Exchange) -> None:
        exchange.answer() if exchange.number <= FIRST else exchange.begin(503)

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, arrival="chat", turns="5", requests="5", think_time="0.001")
    assert (row["requests"], row["completed"], row["errors"]) == (2, 1, {"HTTP 503": 1})


class Asked:
    """In the place of a server: answers at once and remembers."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def ask(self, messages: list[Message], max_tokens: int) -> Answer:
        self.lengths.append(len(messages))
        return Answer(0.0, [1.0], "text")


def test_chats_start_and_pause_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real_sleep(0)

    def drawn(**given: str) -> np.ndarray:
        pauses.clear()
        clients = Clients(asked, Prompts(Random(), 4), settings("http://x", arrival="chat", **given))  # type: ignore[arg-type]
        assert len(asyncio.run(clients.chat(5.0))) == 3000
        return np.array(pauses)

    real_sleep, asked = asyncio.sleep, Asked()
    monkeypatch.setattr(load_module.asyncio, "sleep", sleep)
    between = drawn(requests="3000", turns="1")
    assert len(between) == 2999 and set(asked.lengths) == {1}
    # Exponential, as of a Poisson process: mean and deviation are 1/rate, and a share of 1/e exceeds it; 6 sigma.
    assert between.mean() == pytest.approx(0.2, rel=0.11) and between.std() == pytest.approx(0.2, rel=0.16)
    assert (between > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.053)
    thinking = drawn(requests="3000", turns="1000", think_time="7")
    assert len(thinking) == 2999 and thinking.mean() == pytest.approx(7, rel=0.11)
    assert sorted(asked.lengths[-3000:]) == [length for length in range(1, 2000, 2) for _ in range(3)]


def test_chats_start_whether_or_not_earlier_ones_are_done(capsys: Capture) -> None:
    five = threading.Barrier(5)

    def script(exchange: Exchange) -> None:
        if exchange.number >= FIRST:
            five.wait(30)
        exchange.answer()

    with scripted(script) as server:
        (row,) = rows(capsys, server.url, arrival="chat", rate="50", turns="1", requests="5")
    assert (row["completed"], row["most_at_once"]) == (5, 5)


def test_a_server_that_answers_no_first_request_is_one_line() -> None:
    with scripted(FAULTS["busy"][1]) as server:
        done = command("--serve", server.url)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"error: http://\S+ does not answer a first request: HTTP 429: [^\n]*later[^\n]*\n", done.stderr
    )


def test_nobody_there_is_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        done = command("--serve", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"error: http://\S+/v1/models: [^\n]*is a server there\?\n", done.stderr)


def test_a_server_that_wants_a_key_is_one_line_that_says_how_to_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"HTTP 401: --server-key or EXPERTSERVE_SERVER_KEY gives the API key: [^\n]+\n"
    with serving(model_path("demo"), "--stats-every", "0", "--api-key", "secret") as server:
        flags = ["--serve", server.url, "--requests", "1", "--concurrency", "1"]
        listed, asked = command(*flags), command("demo", *flags)
        monkeypatch.setenv("EXPERTSERVE_SERVER_KEY", "secret")
        let_in = command(*flags)
    assert listed.returncode == asked.returncode == 1
    assert re.fullmatch(rf"error: \S+/v1/models: {said}", listed.stderr)
    assert re.fullmatch(rf"error: \S+ does not answer a first request: {said}", asked.stderr)
    assert let_in.returncode == 0 and let_in.stderr == ""


def test_a_name_that_the_server_does_not_serve_is_one_line() -> None:
    with serving(model_path("demo"), "--stats-every", "0") as server:
        done = command("nothing-of-that-name", "--serve", server.url)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"error: \S+ does not answer a first request: HTTP 404: [^\n{]*nothing-of-that-name[^\n]*\n", done.stderr
    )


def test_an_address_of_something_else_is_one_line() -> None:
    with serving(model_path("demo"), "--stats-every", "0") as server:
        done = command("--serve", f"{server.url}/elsewhere")
        assert re.fullmatch(r"error: \S+/elsewhere/v1/models: HTTP 404: [^\n]+; is this OpenAI's API\?\n", done.stderr)


def test_without_the_client_library_one_line_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['httpx'] = None; from expertserve.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "--serve", "http://127.0.0.1:1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "error: --serve needs httpx: pip install 'expertserve[bench]'\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--serve", "ftp://host"], "--serve 'ftp://host': should be the address of a server"),
        (["--serve", "8080"], "--serve '8080': should be"),
        (["--serve", "http://host:port"], "should be the address"),
        (["--concurrency", "1,0"], "should be numbers from 1 to 4096"),
        (["--concurrency", "two"], "should be numbers from 1 to 4096"),
        (["--rate", "0"], "should be numbers a second"),
        (["--rate", "nan"], "should be numbers a second"),
        (["--requests", "0"], "--requests '0'"),
        (["--slo-itl", "0"], "--slo-itl '0'"),
        (["--arrival", "poisson"], "--arrival 'poisson'"),
        (["--server-key", "sec\nret"], "--server-key: should be one line of printable ASCII"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(flags: list[str], said: str) -> None:
    done = command("demo", *flags)
    assert done.returncode == 2 and re.fullmatch(r"error: [^\n]+\n", done.stderr) and said in done.stderr


def test_levels_may_be_numbers_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "load.toml"
    for text, levels in (("rate = 0.5", (0.5,)), ("rate = [0.5, 2]", (0.5, 2.0)), ("concurrency = [1, 16]", (1, 16))):
        file.write_text(text)
        resolved = resolve({"serve": "http://x", "config": str(file)}, command="bench")
        assert getattr(resolved, text.split()[0]) == levels


def test_a_flag_without_effect_is_said() -> None:
    def lines(**given: str) -> str:
        return "\n".join(resolve(given, command="bench").inert("bench"))

    url = "http://127.0.0.1:1"
    assert (
        lines(model="demo", requests="3") == "--requests has no effect: `bench` does not use it, `bench --serve` does"
    )
    assert lines(serve=url, threads="3") == "--threads has no effect: `bench --serve` does not use it"
    assert lines(serve=url, turns="3") == "--turns has no effect: --arrival is not chat"
    assert "--concurrency has no effect" in lines(serve=url, arrival="chat", concurrency="3")
    assert lines(serve=url, arrival="chat", rate="3", prompt_tokens="9", results_json="x.json", model="m") == ""
