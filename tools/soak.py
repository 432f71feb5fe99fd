"""Soak: many clients that ask, stall, leave and send rubbish, while reads of experts fail now and then.

    python -m tools.soak --minutes 30 --clients 16

Starts a server of the embedded model as a process of its own (`--serve` is that process: it also breaks the file under
the readers for moments), and watches it from outside: resident memory, descriptors, threads, KV cells, hung requests,
answers that differ from those given in quiet. Prints a line a minute and one JSON object last; exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "What is bread?",
    "What is a river?",
    "Who are you?",
)
SETTINGS = {"model": "demo", "device": "cpu", "expert_cache": "40%", "reader": "buffered", "port": 0, "parallel": 6,
            "ctx": 1024, "stats_every": 0, "max_queue": 40}  # fmt: skip
FAULT_EVERY_S, FAULT_S = 7.0, 0.05
HANGS_AFTER_S = 60.0
NAMED = {400, 404, 405, 408, 413, 415, 429, 500, 503}


def serve() -> int:
    """The server's process: the real one, with a thread that makes reads come short for moments."""
    from expertserve import log
    from expertserve.config import prepare_libraries, resolve
    from expertserve.experts.stats import ExpertStats
    from expertserve.server import app

    prepare_libraries()
    log.configure("text", "info")
    load = app._load

    def load_and_break(*arguments: Any) -> Any:
        model = load(*arguments)
        disk = model.heat.__self__.pool.reader.disk
        threading.Thread(target=_break_reads, args=(disk.descriptors[0],), daemon=True).start()
        return model

    app._load = load_and_break
    return app.serve(resolve(SETTINGS), ExpertStats(every=0))


def _break_reads(descriptor: int) -> None:
    """Puts an empty file in the place of the model's for moments: every read of it comes short."""
    good = os.dup(descriptor)
    with tempfile.TemporaryFile() as empty:
        while True:
            time.sleep(FAULT_EVERY_S)
            os.dup2(empty.fileno(), descriptor)
            time.sleep(FAULT_S)
            os.dup2(good, descriptor)


class Soak:
    """The clients and what they saw."""

    def __init__(self, url: str, minutes: float) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.unnamed: list[str] = []
        self.ends_at = time.monotonic() + 60 * minutes
        self._answers: dict[str, str] = {}

    def learn(self) -> None:
        """What the model answers in quiet, before anything fails."""
        with httpx.Client(base_url=self.url, timeout=HANGS_AFTER_S) as http:
            for question in QUESTIONS:
                while question not in self._answers:
                    response = http.post("/v1/chat/completions", json=self._body(question))
                    if response.status_code == 200:
                        self._answers[question] = response.json()["choices"][0]["message"]["content"]

    def client(self, number: int) -> None:
        choose = random.Random(number)
        kinds = (self._ask, self._ask, self._stream, self._leave, self._stall, self._rubbish)
        while time.monotonic() < self.ends_at:
            kind = choose.choice(kinds)
            try:
                kind(choose)
            except httpx.ReadTimeout:
                self.outcomes["hung"] += 1
            except httpx.HTTPError as error:
                self.outcomes["broken connection"] += 1
                self.unnamed.append(f"{kind.__name__}: {type(error).__name__} {error}")

    @staticmethod
    def _body(question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"messages": messages, "temperature": 0, "max_tokens": 60, **more}

    def _ask(self, choose: random.Random) -> None:
        question = choose.choice(QUESTIONS)
        response = httpx.post(f"{self.url}/v1/chat/completions", json=self._body(question), timeout=HANGS_AFTER_S)
        if response.status_code == 200:
            self._judge(question, response.json()["choices"][0]["message"]["content"])
        else:
            self._error(response)

    def _stream(self, choose: random.Random, pause_s: float = 0.0, stop_after: int | None = None) -> None:
        question = choose.choice(QUESTIONS)
        text, error = "", None
        body = self._body(question, stream=True)
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=HANGS_AFTER_S) as response:
            if response.status_code != 200:
                response.read()
                self._error(response)
                return
            for count, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    error = event.get("error") or error
                    text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if stop_after is not None and count > stop_after:
                    self.outcomes["left"] += 1
                    return
                time.sleep(pause_s)
        if error is None:
            self._judge(question, text)
        elif error["message"]:
            self.outcomes["error event"] += 1

    def _leave(self, choose: random.Random) -> None:
        self._stream(choose, stop_after=choose.randrange(40))

    def _stall(self, choose: random.Random) -> None:
        self._stream(choose, pause_s=0.05)

    def _rubbish(self, choose: random.Random) -> None:
        if choose.random() < 0.5:
            body = choose.choice((b"{", b"\x00" * 999, b'{"messages": [{"role": "robot"}]}', b'{"messages": 5}'))
            headers = {"content-type": "application/json"}
            self._error(httpx.post(f"{self.url}/v1/chat/completions", content=body, headers=headers, timeout=20))
            return
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as raw, contextlib.suppress(OSError):
            raw.sendall(
                choose.choice(
                    (b"GET / HTTP/1.1\r\nHost", b"\x16\x03\x01\x02\x00", b"POST /v1/completions HTTP/1.1\r\n")
                )
            )
            time.sleep(choose.random())
        self.outcomes["rubbish sent"] += 1

    def _judge(self, question: str, text: str) -> None:
        right = text == self._answers[question]
        self.outcomes["right answer" if right else "wrong answer"] += 1
        if not right:
            self.wrong.append(f"{question} -> {text}")

    def _error(self, response: httpx.Response) -> None:
        self.outcomes[f"status {response.status_code}"] += 1
        try:
            named = response.status_code in NAMED and bool(response.json()["error"]["message"])
        except (ValueError, KeyError):
            named = False
        if not named:
            self.unnamed.append(response.text[:200])


def measure(pid: int) -> dict[str, int]:
    """Of the server's process: resident KiB, open descriptors, threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
    return {
        "rss_kib": numbers["VmRSS"],
        "threads": numbers["Threads"],
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def settled(http: httpx.Client) -> dict[str, Any]:
    """The server's reading once nothing runs; the last one after a while where something still does."""
    for _ in range(100):
        reading: dict[str, Any] = http.get("/stats").json()["engine"]
        if not reading["requests_running"] and not reading["requests_queued"] and not reading["kv_cells_used"]:
            break
        time.sleep(0.1)
    return reading


def start() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-m", "tools.soak", "--serve"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = None
    for line in process.stderr:
        if found := re.search(r"http://[0-9.:]+", line):
            url = found[0]
            break
    assert url is not None, "the server did not start"
    threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.2)
    return process, url


def soak(minutes: float, clients: int) -> int:
    process, url = start()
    trial = Soak(url, minutes)
    trial.learn()
    threads = [threading.Thread(target=trial.client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    samples = []
    while time.monotonic() < trial.ends_at:
        time.sleep(min(60.0, max(0.1, trial.ends_at - time.monotonic())))
        samples.append(measure(process.pid))
        print(samples[-1], dict(trial.outcomes), file=sys.stderr, flush=True)
    for thread in threads:
        thread.join(2 * HANGS_AFTER_S)
    with httpx.Client(base_url=url) as http:
        engine = settled(http)
        metrics = http.get("/metrics").text
    after = measure(process.pid)
    process.terminate()
    status = process.wait(60)
    ended = sum(
        float(value) for value in re.findall(r"^expertserve_choices_finished_total\{.*\} ([0-9.]+)", metrics, re.M)
    )
    counted = engine["finished"] + engine["cancelled"] + engine["errors"]
    faults = {
        "wrong answers": len(trial.wrong),
        "hung requests": trial.outcomes["hung"] + sum(thread.is_alive() for thread in threads),
        "errors without a name": len(trial.unnamed),
        "sequences or cells left": engine["requests_running"] + engine["requests_queued"] + engine["kv_cells_used"],
        "sequences that the metrics miss": abs(ended - counted),
        "exit status": status,
    }
    result = {"minutes": minutes, "clients": clients, "outcomes": dict(trial.outcomes), "faults": faults,
              "samples": samples, "after": after, "preemptions": engine["preemptions"]}  # fmt: skip
    print("\n".join([*trial.wrong[:5], *trial.unnamed[:5]]), file=sys.stderr)
    print(json.dumps(result))
    return int(any(faults.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description="soak the server")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help="be the server")
    options = parser.parse_args()
    return serve() if options.serve else soak(options.minutes, options.clients)


if __name__ == "__main__":
    sys.exit(main())
