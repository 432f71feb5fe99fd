"""Waiting for a request on the calling thread, for callers that have nothing else to do.

It turns the events that the engine thread delivers into an iteration. The invariant: when the iteration is left, by its
end or early, the request has ended, so nothing goes on computing for a caller that is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from queue import SimpleQueue
from typing import Protocol

from expertserve.engine.request import ErrorEvent, Event, FinishEvent, PromptEvent, Request, SamplingParams, TokenEvent

_numbers = itertools.count(1)


class Submits(Protocol):
    """The part of an engine that takes and cancels requests."""

    def submit(self, request: Request, /) -> None: ...
    def cancel(self, request_id: str, /) -> None: ...


def events(
    engine: Submits, prompt: list[int], params: SamplingParams
) -> Generator[PromptEvent | TokenEvent | FinishEvent, None, None]:
    """Submits a request and yields its events, a FinishEvent last; closing the iterator early cancels it.

    Raises:
        ExpertServeError: the request was refused or failed.
    """
    inbox: SimpleQueue[Event] = SimpleQueue()
    request = Request(f"local-{next(_numbers)}", prompt, params, inbox.put)
    engine.submit(request)
    ended = False
    try:
        while not ended:
            event = inbox.get()
            ended = isinstance(event, FinishEvent | ErrorEvent)
            if isinstance(event, ErrorEvent):
                raise event.error
            yield event
    finally:
        if not ended:
            engine.cancel(request.id)
            while not isinstance(inbox.get(), FinishEvent | ErrorEvent):
                pass
