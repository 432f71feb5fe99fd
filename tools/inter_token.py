"""How much prompts that arrive beside them slow down answers that are being streamed.

    python -m tools.inter_token MODEL [--seconds 20] [--streams 2] [options of `expertserve serve`]

Starts a server of MODEL and measures over HTTP, one after the other: the prefill capacity (distinct prompts of random
tokens, as many at once as have a place, one token of answer); then, twice in turn, the times between tokens of running
streams alone, and beside such prompts that arrive at random moments (Poisson) at half of that capacity. Prints one JSON
object: percentiles in milliseconds, and the ratio of the bar, p99 beside prompts over p99 alone.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tools.served import served

TOKENS = (300, 4000)  # ids that every vocabulary has and that are no special tokens
ANSWER = 400  # tokens of one running answer; another follows it
PLACES = 2  # for prompts beside the streams


def random_prompt(choose: random.Random, length: int) -> list[int]:
    return [choose.randrange(*TOKENS) for _ in range(length)]


def lines_of(address: tuple[str, int], body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of a streamed answer as they arrive; read plainly, so that the client takes little of the machine."""
    data = json.dumps({**body, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        yield from connection.makefile("rb")


class Measure:
    """Asks one server."""

    def __init__(self, address: tuple[str, int], prompt_tokens: int, streams: int) -> None:
        self._address = address
        self._length = prompt_tokens
        self._streams = streams
        self._choose = random.Random(0)
        self._prompts: list[threading.Thread] = []
        self.first_token_s: list[float] = []
        self.refused = 0

    def capacity(self, seconds: float) -> float:
        """Prompt tokens a second when nothing else runs."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._prompts = [thread for thread in self._prompts if thread.is_alive()]
            if len(self._prompts) < PLACES:
                self._send_prompt()
            time.sleep(0.001)
        self._wait_for_prompts()
        taken, self.first_token_s = len(self.first_token_s), []
        return taken * self._length / (time.perf_counter() - began)

    def gaps(self, seconds: float, prompts_per_s: float = 0.0) -> list[float]:
        """Seconds between tokens of the streams, while prompts arrive."""
        gaps: list[float] = []
        ends_at = time.perf_counter() + seconds
        streams = [threading.Thread(target=self._stream, args=(n, ends_at, gaps)) for n in range(self._streams)]
        for thread in streams:
            thread.start()
        while prompts_per_s and time.perf_counter() < ends_at:
            time.sleep(self._choose.expovariate(prompts_per_s))
            self._send_prompt()
        for thread in streams:
            thread.join()
        self._wait_for_prompts()
        return gaps

    def _stream(self, number: int, ends_at: float, gaps: list[float]) -> None:
        """Answers one after the other; log-probabilities are asked for because each token then is an event."""
        prompt = random_prompt(random.Random(number), 16)
        while time.perf_counter() < ends_at:
            last = None
            for line in lines_of(self._address, {"prompt": prompt, "max_tokens": ANSWER, "logprobs": 0}):
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > ends_at:
                    break

    def _send_prompt(self) -> None:
        prompt = random_prompt(self._choose, self._length)
        self._prompts.append(threading.Thread(target=self._ask, args=(prompt,)))
        self._prompts[-1].start()

    def _ask(self, prompt: list[int]) -> None:
        began = time.perf_counter()
        lines = list(lines_of(self._address, {"prompt": prompt, "max_tokens": 1}))
        if b" 200 " in lines[0]:
            self.first_token_s.append(time.perf_counter() - began)
        else:
            self.refused += 1

    def _wait_for_prompts(self) -> None:
        for thread in self._prompts:
            thread.join()
        self._prompts = []


def milliseconds(seconds: list[float]) -> dict[str, float]:
    found = np.percentile(seconds, [50, 90, 99]) * 1e3 if seconds else np.full(3, np.nan)
    return dict(zip(("p50", "p90", "p99"), np.round(found, 2).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="times between tokens of streams, alone and beside prompts")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    options, serve = parser.parse_known_args()
    places = ["--parallel", str(options.streams + PLACES)]
    with served(options.model, *places, *serve) as (url, _):
        host, port = url.removeprefix("http://").rsplit(":")
        measure = Measure((host, int(port)), options.prompt_tokens, options.streams)
        measure.gaps(options.seconds / 4)
        capacity = measure.capacity(options.seconds)
        rate = capacity / 2 / options.prompt_tokens
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(2):
            alone += measure.gaps(options.seconds)
            beside += measure.gaps(options.seconds, rate)
    result = {
        "model": options.model,
        "serve": serve,
        "capacity_tok_s": round(capacity, 1),
        "prompts_per_s": round(rate, 3),
        "alone_ms": milliseconds(alone),
        "beside_ms": milliseconds(beside),
        "first_token_ms": milliseconds(measure.first_token_s),
        "prompts": len(measure.first_token_s),
        "refused": measure.refused,
        "p99_ratio": round(float(np.percentile(beside, 99) / np.percentile(alone, 99)), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
