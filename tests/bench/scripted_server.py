"""A server on a real socket that streams what a script says, healthy or not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def event(text: str = "", **more: Any) -> bytes:
    """One event of a chat or of a completion; both find their text in it."""
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Exchange:
    """One request as the script sees it: what came, and the ways to answer."""

    handler: BaseHTTPRequestHandler
    number: int
    body: Mapping[str, Any]
    released: threading.Event  # set when the test is over

    def begin(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        self.handler.send_response(status)
        self.handler.send_header("content-type", kind)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()

    def write(self, *parts: bytes) -> None:
        for part in parts:
            self.handler.wfile.write(part)
            self.handler.wfile.flush()

    def answer(self, tokens: int = 3, prompt_tokens: int | None = None) -> None:
        """A whole and healthy answer, after a moment that its client is idle."""
        self.released.wait(0.02)
        self.begin()
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        self.write(*(event(f"t{i} ") for i in range(tokens)), LAST)
        self.write(*([event(usage=usage)] if prompt_tokens else []), DONE)


Script = Callable[[Exchange], None]


@dataclass
class Scripted:
    """A running server and what it was asked, in the order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    """Serves `script` on a free port until the block is left."""
    released, lock = threading.Event(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps({"data": [{"id": "scripted"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            if not sent:  # the client gave up
                return
            body = json.loads(sent)
            with lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.keys.append(self.headers["authorization"])
            try:
                script(Exchange(self, number, body, released))
            except OSError:  # the client gave up
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = Scripted(f"http://127.0.0.1:{listener.server_port}")
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            released.set()
            listener.shutdown()
            thread.join(10)
