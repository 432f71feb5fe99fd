"""The command `serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.server.worlds import wait_status

CHECKOUT = Path(__file__).parents[2]


class Serving:
    """A process of `expertserve serve`, with what it says on standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._url: str | None = None
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://[0-9.:]+", line):
                self._url = found[0]
                self._known.set()
        self._known.set()

    @property
    def url(self) -> str:
        self._known.wait(60)
        assert self._url, "".join(self.lines)
        return self._url

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self._reader.join(5)


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Serving]:
    command = [sys.executable, "-m", "expertserve", "serve", str(model), "--device", "cpu", "--port", "0", *options]
    with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as process:
        serving = Serving(process)
        try:
            with httpx.Client(base_url=serving.url) as http:
                wait_status(http, "ready", timeout_s=60)
            yield serving
        finally:
            process.kill()
