"""The way of events from the engine thread to the event loop.

Owns one inbox per HTTP request, the hop between threads (one wake-up of the loop however many tokens a step brought)
and the cancelling of what nobody waits for any more. A Generation is the choices of one HTTP request: one engine
request each. Invariant: when `Generation.close` returns, every engine request of it has finished or has been
cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from expertserve.engine.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams, TokenEvent
from expertserve.errors import ExpertServeError
from expertserve.server.errors import OverloadedError
from expertserve.server.metrics import ServerMetrics
from expertserve.server.state import ServedEngine, ServerSettings, ServerState

IndexedEvent = tuple[int, Event]


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence to generate; `prompt_index` says of which prompt, for usage."""

    prompt: list[int]
    params: SamplingParams
    prompt_index: int


class Generations:
    """All generations under way; posts from any thread, everything else on the loop."""

    def __init__(self, metrics: ServerMetrics, state: ServerState) -> None:
        self.metrics = metrics
        self._state = state
        self.loop: asyncio.AbstractEventLoop
        self._posted: deque[tuple[Generation, int, Event]] = deque()
        self._wake_pending = False
        self._active: set[Generation] = set()
        metrics.requests_running.set_function(lambda: len(self._active))

    @property
    def settings(self) -> ServerSettings:
        return self._state.settings

    def start(self, engine: ServedEngine, generation_id: str, choices: Sequence[Choice]) -> Generation:
        """Submit every choice; where one is refused, the others are cancelled and its error raised.

        Raises:
            OverloadedError: too many sequences are under way. A request that would be too many by itself is served
                when nothing else is.
        """
        self.loop = asyncio.get_running_loop()
        under_way = sum(generation.num_open for generation in self._active)
        if under_way and under_way + len(choices) > self.settings.max_sequences:
            self.metrics.refused.labels("queue_full").inc()
            raise OverloadedError(
                f"{under_way} sequences run or wait already; at most {self.settings.max_sequences} may",
                code="queue_full",
                retry_after_s=self.settings.retry_after_s,
            )
        generation = Generation(self, engine, generation_id)
        self._active.add(generation)
        try:
            generation.submit(choices)
        except BaseException:
            generation.close()
            raise
        return generation

    def fail_all(self, error: ExpertServeError) -> None:
        """End every generation with `error`; their engine requests are cancelled."""
        for generation in list(self._active):
            generation.fail(error)

    def discard(self, generation: Generation) -> None:
        self._active.discard(generation)

    def post(self, generation: Generation, index: int, event: Event) -> None:
        """Hand an event over, from the engine thread. Appending comes before the test, clearing before the draining:
        an event is either drained by the wake-up that is pending or asks for one."""
        self._posted.append((generation, index, event))
        if not self._wake_pending:
            self._wake_pending = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._posted.clear()  # the loop is closed: nobody is left to tell

    def _deliver(self) -> None:
        self._wake_pending = False
        while self._posted:
            generation, index, event = self._posted.popleft()
            generation.put(index, event)


class Generation:
    """The choices of one HTTP request, on the loop."""

    def __init__(self, owner: Generations, engine: ServedEngine, generation_id: str) -> None:
        self.id = generation_id
        self.abandoned = False
        self.finished: dict[int, FinishEvent] = {}
        self.prompt_indices: list[int] = []
        self.started_at = owner.loop.time()
        self._owner = owner
        self._engine = engine
        self._inbox: list[IndexedEvent] = []
        self._open: set[int] = set()
        self._last_token_at: dict[int, float] = {}
        self._waiter: asyncio.Future[None] | None = None

    def submit(self, choices: Sequence[Choice]) -> None:
        for index, choice in enumerate(choices):
            self.prompt_indices.append(choice.prompt_index)

            def on_event(event: Event, index: int = index) -> None:
                self._owner.post(self, index, event)

            request = Request(
                id=self._request_id(index),
                prompt=choice.prompt,
                params=choice.params,
                on_event=on_event,
                queue_timeout_s=self._owner.settings.queue_timeout_s,
                timeout_s=self._owner.settings.request_timeout_s,
            )
            self._engine.submit(request)
            self._open.add(index)

    def _request_id(self, index: int) -> str:
        return f"{self.id}-{index}"

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._open)

    @property
    def running(self) -> bool:
        """Whether any choice may still bring events, or some wait to be taken."""
        return bool(self._open or self._inbox)

    async def take(self) -> list[IndexedEvent]:
        """All events since the last call, waiting for at least one; empty after `nudge` or `abandon`."""
        if not self._inbox and not self.abandoned:
            self._waiter = self._owner.loop.create_future()
            await self._waiter
        events, self._inbox = self._inbox, []
        return events

    def nudge(self) -> None:
        """Make a pending `take` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, index: int, event: Event) -> None:
        if index not in self._open:
            return
        self._observe(index, event)
        self._inbox.append((index, event))
        self.nudge()

    def _observe(self, index: int, event: Event) -> None:
        now, metrics = self._owner.loop.time(), self._owner.metrics
        if isinstance(event, TokenEvent):
            last = self._last_token_at.get(index)
            if last is None:
                metrics.first_token_s.observe(now - self.started_at)
            else:
                metrics.inter_token_s.observe(now - last)
            self._last_token_at[index] = now
            metrics.completion_tokens.inc()
        elif isinstance(event, FinishEvent):
            self.finished[index] = event
            metrics.count_finished(event.reason, event.usage)
            self._open.discard(index)
        elif isinstance(event, ErrorEvent):
            metrics.choices_finished.labels("error").inc()
            self._open.discard(index)

    def fail(self, error: ExpertServeError) -> None:
        """Cancel what runs and let the client hear `error`."""
        for index in sorted(self._open)[:1]:
            self._cancel_open()
            self._inbox.append((index, ErrorEvent(error)))
        self.nudge()

    def abandon(self) -> None:
        """The client has gone: cancel at once and wake whoever writes to it."""
        self.abandoned = True
        self._cancel_open()
        self.nudge()

    def close(self) -> None:
        """Nobody reads any more."""
        self._cancel_open()
        self._owner.discard(self)

    def _cancel_open(self) -> None:
        for index in self._open:
            self._engine.cancel(self._request_id(index))
            self._owner.metrics.choices_finished.labels("cancelled").inc()
        self._open.clear()
