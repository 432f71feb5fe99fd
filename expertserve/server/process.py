"""A server's life in its process: bind, load, answer, drain, end.

Owns the listening socket, the loading thread, the signals and the order of the shutdown. SIGHUP has the settings read
again. The socket is bound before
the model loads, so that /health answers all the time. The first SIGINT or SIGTERM stops accepting and lets running
requests end, for at most the drain timeout; the second ends at once. Both are a normal end of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import uvicorn
from fastapi import FastAPI

from expertserve import log
from expertserve.errors import ConfigError, ExpertServeError
from expertserve.server.connection import MAX_HEAD_BYTES, Connection
from expertserve.server.errors import UnavailableError
from expertserve.server.generation import Generations
from expertserve.server.state import ServedModel, ServerState

# How long clients get to read the error that ends their stream when the drain timeout is over.
_LAST_WORDS_S = 1.0
# An engine that does not end within this hangs on a dead device; the process ends without it.
_CLOSE_TIMEOUT_S = 10.0
_log = log.get_logger(__name__)


def _nothing() -> None:
    """Default of ServerProcess.reload."""


class ServerProcess:
    """One server: `bind`, then `run`, which returns when it was stopped."""

    def __init__(
        self, app: FastAPI, state: ServerState, load: Callable[[], ServedModel], reload: Callable[[], None] = _nothing
    ) -> None:
        self._settings = state.settings
        self._reload = reload
        self._state = state
        self._load = load
        self._lock = threading.Lock()
        self._ended = False
        self._socket: socket.socket | None = None
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=65,
            http=partial(Connection, stall_timeout_s=self._settings.stall_timeout_s),  # type: ignore[arg-type]
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
        )
        self._http = _HttpServer(config, state, app.state.generations)

    def bind(self) -> str:
        """Take the port; returns the URL.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._socket = _bind(self._settings.host, self._settings.port)
        host, port = self._socket.getsockname()[:2]
        if not self._settings.api_keys and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _log.warning("anyone who can reach this address can use the server: set an API key", host=host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def request_stop(self) -> None:
        """From any thread or signal handler: drain on the first call, end at once on the next."""
        self._http.request_stop()

    def run(self) -> None:
        """Load and answer until stopped.

        Raises:
            ExpertServeError: loading failed and the settings say that this ends the server.
        """
        assert self._socket is not None, "bind comes before run"
        loader = threading.Thread(target=self._load_model, name="load", daemon=True)
        try:
            with _reloading(self._reload) as ask, _signals(self.request_stop, ask):
                loader.start()
                self._http.run(sockets=[self._socket])
                self._close_model()
        finally:
            self._socket.close()
        if self._settings.exit_on_failed_load and not self._state.loaded and self._state.error is not None:
            raise self._state.error

    def _load_model(self) -> None:
        started = time.perf_counter()
        try:
            model = self._load()
        except ExpertServeError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("loading the model failed")
            self._fail(ExpertServeError(f"loading the model failed: {type(error).__name__}: {error}"))
        else:
            with self._lock:
                if not self._ended:
                    self._state.set_ready(model)
                    _log.info("ready", model=model.names[0], seconds=round(time.perf_counter() - started, 1))
                    return
            model.close()

    def _fail(self, error: ExpertServeError) -> None:
        self._state.set_failed(error)
        if self._settings.exit_on_failed_load:
            self._http.should_exit = True

    def _close_model(self) -> None:
        """A model that is still loading is left to its thread, which closes it or ends with the process."""
        with self._lock:
            self._ended = True
        if (model := self._state.loaded) is None:
            return
        closer = threading.Thread(target=model.close, name="close", daemon=True)
        closer.start()
        closer.join(_LAST_WORDS_S if self._http.ended_at_once else _CLOSE_TIMEOUT_S)
        if closer.is_alive():
            _log.warning("the engine did not end in time; the process ends without it")


class _HttpServer(uvicorn.Server):
    """uvicorn with our signals and our way to drain."""

    def __init__(self, config: uvicorn.Config, state: ServerState, generations: Generations) -> None:
        super().__init__(config)
        self.ended_at_once = False
        self._state = state
        self._generations = generations

    def request_stop(self) -> None:
        if self.should_exit:
            self.ended_at_once = True
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """ServerProcess has them: uvicorn would raise them again at the end, and the process would die of them."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.set_draining()
        drain = asyncio.create_task(self._end_stragglers())
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

    async def _end_stragglers(self) -> None:
        """What runs past the drain timeout, or a second signal, hears an error; then its connection is cut."""
        await self._wait(self._state.settings.drain_timeout_s)
        self._generations.fail_all(UnavailableError("the server is shutting down", code="server_draining"))
        await asyncio.sleep(0.05)
        await self._wait(_LAST_WORDS_S)
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _wait(self, seconds: float) -> None:
        """Sleep, but not past a second signal."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.ended_at_once:
            await asyncio.sleep(0.02)


@contextmanager
def _reloading(reload: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """What a signal handler may call to have `reload` run: in a thread, as a handler can be interrupted by itself."""
    asked: SimpleQueue[None] = SimpleQueue()  # reentrant
    ended = threading.Event()

    def work() -> None:
        asked.get()
        while not ended.is_set():
            reload()
            asked.get()

    worker = threading.Thread(target=work, name="reload")
    worker.start()
    try:
        yield lambda: asked.put(None)
    finally:
        ended.set()
        asked.put(None)
        worker.join()


@contextmanager
def _signals(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = reload
    before = {number: signal.signal(number, lambda *_, do=do: do()) for number, do in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None
    try:
        if os.name == "posix":  # elsewhere this lets two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return sock
