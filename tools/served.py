"""Our server in a process of its own, for measurements."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tools.alone import ROOT


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """The address and process id of a server that is ready."""
    command = [sys.executable, "-m", "expertserve.cli", "serve", model, "--port", "0", "--stats-every", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://[0-9.]+:\d+", line):
                break
        else:
            sys.exit(f"error: the server did not start:\n{''.join(said)}")
        rest = threading.Thread(target=process.stderr.read)
        rest.start()
        try:
            while httpx.get(f"{found[0]}/ready").status_code != 200:
                time.sleep(0.2)
            yield found[0], process.pid
        finally:
            process.terminate()
            process.wait(60)
            rest.join()
