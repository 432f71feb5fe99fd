"""From a generation to the client: one JSON body, or server-sent events.

Owns waiting for events while watching the connection. A client that goes away is noticed at once, also when nothing
is being sent, and its sequences are cancelled. What fails before anything came has a status that says so, a stream
too; once the headers of a stream are out, an error is an event of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expertserve import log
from expertserve.engine.request import ErrorEvent, Event, FinishEvent
from expertserve.errors import ExpertServeError
from expertserve.server.errors import UnavailableError
from expertserve.server.generation import Generation, IndexedEvent

_KEEP_ALIVE = b": keep-alive\n\n"
# Bodies with more log-probabilities than this are written in a worker thread, so that the loop goes on.
_INLINE_LOGPROBS = 2000
_log = log.get_logger(__name__)


class ChunkWriter(Protocol):
    """Turns events into the data of a stream."""

    def opening(self) -> bytes: ...
    def chunk(self, index: int, event: Event, generation: Generation) -> bytes: ...
    def closing(self, generation: Generation) -> bytes: ...
    def failure(self, error: ExpertServeError) -> bytes: ...


class BodyWriter(Protocol):
    """Gathers events into one body."""

    def add(self, index: int, event: Event) -> None: ...
    def body(self, generation: Generation) -> bytes: ...


@asynccontextmanager
async def _watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abandons `generation` when the client disconnects; whatever happens, it is closed at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


def _raise_failure(events: list[IndexedEvent]) -> None:
    for _, event in events:
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, FinishEvent) and event.reason == "cancelled":
            raise UnavailableError("the server cancelled the request", code="request_cancelled")


async def deliver_body(generation: Generation, writer: BodyWriter, receive: Receive, num_logprobs: int) -> Response:
    """The whole answer.

    Raises:
        ExpertServeError: a choice failed; the others are cancelled.
    """
    async with _watched(generation, receive):
        while generation.running and not generation.abandoned:
            events = await generation.take()
            _raise_failure(events)
            for index, event in events:
                writer.add(index, event)
        if generation.abandoned:
            return Response(status_code=499)  # nobody reads it; the log shows it
        if num_logprobs > _INLINE_LOGPROBS:
            body = await asyncio.to_thread(writer.body, generation)
        else:
            body = writer.body(generation)
        return Response(body, media_type="application/json")


class EventStream(Response):
    """The answer piece by piece, with a comment when nothing came for `keep_alive_s`, so that proxies keep it open."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: ChunkWriter, keep_alive_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        async with _watched(generation, receive):
            with _Idle(generation, self._keep_alive_s) as idle:
                events = await generation.take()  # none: it is time to say that something will come
                _raise_failure(events[:1])
                if generation.abandoned:
                    return
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_stream(send, events, idle)

    async def _send_stream(self, send: Send, events: list[IndexedEvent], idle: _Idle) -> None:
        try:
            await self._send_all(send, events, idle)
        except ExpertServeError as error:
            await self._send_error(send, error)
        except Exception:
            _log.exception("writing a stream failed", generation=self._generation.id)
            await self._send_error(send, ExpertServeError("internal error"))

    async def _send_all(self, send: Send, events: list[IndexedEvent], idle: _Idle) -> None:
        generation, writer = self._generation, self._writer
        await _send_data(send, writer.opening())
        while True:
            # What came before a failure is still sent.
            failed = next((at for at, (_, event) in enumerate(events) if _is_failure(event)), len(events))
            data = b"".join(writer.chunk(index, event, generation) for index, event in events[:failed])
            if not events and idle.take_expired():
                data = _KEEP_ALIVE
            if data:
                idle.restart()
                await _send_data(send, data)
            _raise_failure(events[failed:])
            if not generation.running:
                break
            events = await generation.take()
            if generation.abandoned:
                return
        await send({"type": "http.response.body", "body": writer.closing(generation), "more_body": False})

    async def _send_error(self, send: Send, error: ExpertServeError) -> None:
        await send({"type": "http.response.body", "body": self._writer.failure(error), "more_body": False})


def _is_failure(event: Event) -> bool:
    return isinstance(event, ErrorEvent) or (isinstance(event, FinishEvent) and event.reason == "cancelled")


async def _send_data(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


class _Idle:
    """A timer that wakes the stream when nothing was sent for a while. It is set anew only when it goes off: one for
    each token would cost more than the token's chunk."""

    def __init__(self, generation: Generation, after_s: float) -> None:
        self._generation = generation
        self._after_s = after_s
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._expired = False

    def __enter__(self) -> _Idle:
        self._timer = self._loop.call_later(self._after_s, self._check)
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()

    def restart(self) -> None:
        self._last_sent = self._loop.time()

    def take_expired(self) -> bool:
        expired, self._expired = self._expired, False
        return expired

    def _check(self) -> None:
        left_s = self._last_sent + self._after_s - self._loop.time()
        if left_s <= 0:
            self._expired, left_s = True, self._after_s
            self._generation.nudge()
        self._timer = self._loop.call_later(left_s, self._check)
