"""Soak: many clients that ask, stall, leave and send rubbish, while reads of experts fail and memory is short.

    python -m tools.soak --minutes 30 --clients 32 [--memory-group /sys/fs/cgroup/memory/NAME]

Starts a server of the embedded model as a process of its own (`--serve` is that process: it also breaks the file under
the readers for moments), with fewer KV cells and slots than the clients want, in a control group if one is named; and
watches it from outside: resident memory, descriptors, threads, KV cells, hung requests, answers that differ from those
given in quiet. Between 8 and all of the clients are active at a time. Prints a line a minute and one JSON object last;
exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from expertserve.data import model_path

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "What is bread?",
    "What is a river?",
    "Who are you?",
)
SETTINGS = {"device": "cpu", "reader": "buffered", "port": 0, "parallel": 16, "stats_every": 0,
            "max_queue": 40}  # fmt: skip
LEAST_CLIENTS, WAVE_S = 8, 300.0  # clients that are always active; how long the others take to come and go
FAULT_EVERY_S, FAULT_S = 7.0, 0.05
HANGS_AFTER_S = 60.0
SPARE_BYTES = 24 << 20  # that the control group leaves beside what the server occupies when it is ready
NAMED = {400, 404, 405, 408, 413, 415, 429, 500, 503}


def serve(folder: Path) -> int:
    """The server's process: the real one, with a thread that makes reads come short for moments.

    `settings.json` in the folder is read; `report.json` says which threads there are, and at the end which experts
    are still pinned and whether cells and slots are in order.
    """
    from expertserve import log
    from expertserve.config import prepare_libraries, resolve
    from expertserve.experts.stats import ExpertStats
    from expertserve.server import app

    prepare_libraries()
    log.configure("text", "info")
    load = app._load
    report = folder / "report.json"

    def load_and_break(*arguments: Any) -> Any:
        model = load(*arguments)
        lane: Any = model.heat.__self__  # type: ignore[attr-defined]
        broken = (lane.pool.reader.disk.descriptors[0], report)
        threading.Thread(target=_break_reads, args=broken, name="faults", daemon=True).start()

        def close() -> None:
            model.engine.stop()  # type: ignore[attr-defined]
            model.engine.check_integrity()  # type: ignore[attr-defined]
            for streamer in lane.streamers:
                streamer.cache.check_integrity()
            pins = sum(int(streamer.cache.pins.sum()) for streamer in lane.streamers)
            report.write_text(json.dumps({**json.loads(report.read_text()), "pins": pins}))
            model.close()

        return dataclasses.replace(model, close=close)

    app._load = load_and_break
    settings = json.loads((folder / "settings.json").read_text())
    return app.serve(resolve(settings), ExpertStats(every=0))


def _break_reads(descriptor: int, report: Path) -> None:
    """Puts an empty file in the place of the model's for moments: every read of it comes short."""
    good = os.dup(descriptor)
    with tempfile.TemporaryFile() as empty:
        while True:
            names = Counter(re.sub(r"[-_ 0-9].*", "", thread.name) for thread in threading.enumerate())
            report.write_text(json.dumps({"python threads": names}))
            time.sleep(FAULT_EVERY_S)
            os.dup2(empty.fileno(), descriptor)
            time.sleep(FAULT_S)
            os.dup2(good, descriptor)


class Soak:
    """The clients and what they saw."""

    def __init__(self, url: str, minutes: float, clients: int) -> None:
        self.url = url
        self._clients = clients
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
            if number >= self._active():
                time.sleep(0.5)
                continue
            kind = choose.choice(kinds)
            try:
                kind(choose)
            except httpx.ReadTimeout:
                self.outcomes["hung"] += 1
            except httpx.HTTPError as error:
                self.outcomes["broken connection"] += 1
                self.unnamed.append(f"{kind.__name__}: {type(error).__name__} {error}")

    def _active(self) -> float:
        """How many clients ask at this moment: from the least to all of them and back."""
        share = abs(self.ends_at - time.monotonic()) % WAVE_S / WAVE_S
        return LEAST_CLIENTS + (self._clients - LEAST_CLIENTS) * (1 - abs(2 * share - 1))

    @staticmethod
    def _body(question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"messages": messages, "temperature": 0, "max_tokens": 60, **more}

    def _ask(self, choose: random.Random) -> None:
        question = choose.choice(QUESTIONS)
        body = self._body(question, n=choose.choice((1, 4)))
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=HANGS_AFTER_S)
        if response.status_code == 200:
            for choice in response.json()["choices"]:
                self._judge(question, choice["message"]["content"])
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
    numbers = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "RssAnon", "Threads")}  # type: ignore[index]
    return {
        "rss_kib": numbers["VmRSS"],
        "anonymous_kib": numbers["RssAnon"],
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


def start(folder: Path, group: Path | None) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "tools.soak", "--serve", str(folder)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    url = None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"http://[0-9.:]+", line):
            url = found[0]
            break
    assert url is not None, "the server did not start: " + "".join(lines)
    threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.2)
    if group is not None:  # only now: a server that plans with so little refuses to start
        limit = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
        limit.write_text(str(1024 * measure(process.pid)["anonymous_kib"] + SPARE_BYTES))
    return process, url


def soak(minutes: float, clients: int, settings: dict[str, Any], group: Path | None) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings["model"] = str(_uncached_copy(folder))
        (folder / "settings.json").write_text(json.dumps(settings))
        process, url = start(folder, group)
        trial, samples, alive = run_clients(process.pid, url, minutes, clients)
        with httpx.Client(base_url=url) as http:
            engine, stream = settled(http), http.get("/stats").json()["stream"]
            metrics = http.get("/metrics").text
        after = measure(process.pid)
        process.terminate()
        status = process.wait(60)
        report = json.loads((folder / "report.json").read_text())
    ended = sum(
        float(value) for value in re.findall(r"^expertserve_choices_finished_total\{.*\} ([0-9.]+)", metrics, re.M)
    )
    counted = engine["finished"] + engine["cancelled"] + engine["errors"]
    faults = {
        "wrong answers": len(trial.wrong),
        "hung requests": trial.outcomes["hung"] + alive,
        "errors without a name": len(trial.unnamed),
        "sequences or cells left": engine["requests_running"] + engine["requests_queued"] + engine["kv_cells_used"],
        "sequences that the metrics miss": abs(ended - counted),
        "experts refused for lack of a slot": stream["exhausted"],
        "pins left": report.get("pins", "no report"),
        "exit status": status,
    }
    result = {"minutes": minutes, "clients": clients, "settings": settings, "outcomes": dict(trial.outcomes),
              "faults": faults, "samples": samples, "after": after, "report": report, "engine": engine,
              "stream": {name: stream[name] for name in ("steps", "hits", "misses", "evictions", "fills", "bytes")},
              }  # fmt: skip
    print("\n".join([*trial.wrong[:5], *trial.unnamed[:5]]), file=sys.stderr)
    print(json.dumps(result))
    return int(any(faults.values()))


def _uncached_copy(folder: Path) -> Path:
    """The embedded model in a file of its own, none of it in the page cache: whoever reads it pays for the pages."""
    copy = folder / "demo.gguf"
    copy.write_bytes(model_path("demo").read_bytes())
    with copy.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return copy


def run_clients(pid: int, url: str, minutes: float, clients: int) -> tuple[Soak, list[dict[str, int]], int]:
    """All clients until the time is over; with a sample of the server's process a minute, and how many hang."""
    trial = Soak(url, minutes, clients)
    trial.learn()
    threads = [threading.Thread(target=trial.client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    samples = []
    while time.monotonic() < trial.ends_at:
        time.sleep(min(60.0, max(0.1, trial.ends_at - time.monotonic())))
        samples.append(measure(pid))
        print(samples[-1], dict(trial.outcomes), file=sys.stderr, flush=True)
    for thread in threads:
        thread.join(2 * HANGS_AFTER_S)
    return trial, samples, sum(thread.is_alive() for thread in threads)


def main() -> int:
    parser = argparse.ArgumentParser(description="soak the server")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--ctx", type=int, default=256, help="KV cells, fewer than sixteen answers want")
    parser.add_argument("--expert-cache", default="10%")
    parser.add_argument("--memory-group", type=Path, help="the folder of a control group that the server joins")
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="be the server")
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    settings = {**SETTINGS, "ctx": options.ctx, "expert_cache": options.expert_cache}
    return soak(options.minutes, options.clients, settings, options.memory_group)


if __name__ == "__main__":
    sys.exit(main())
