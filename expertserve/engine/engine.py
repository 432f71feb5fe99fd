"""The engine: one thread that owns the scheduler, the KV cells and the forward.

Other threads talk to it by messages (submit, cancel, clear) and read plain numbers; events go back through each
request's callback. The invariants: every accepted request ends with exactly one FinishEvent or ErrorEvent; when that
event is sent its cells are already given up; an error a request can meet (a failed expert read) ends only the
requests whose rows met it; any other exception of the forward is a bug and ends the engine in state "failed".
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.admission import check_request
from expertserve.engine.batching import BatchBuilder
from expertserve.engine.draft import Drafter, DraftMode, scratch_cells
from expertserve.engine.ports import ForwardPass, TextSource
from expertserve.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
)
from expertserve.engine.scheduler import Scheduler, Work
from expertserve.engine.sequence import Sequence
from expertserve.errors import ConfigError, ExpertServeError, RequestError
from expertserve.kv.cache import KVCells
from expertserve.kv.states import StateSlots

State = Literal["ready", "failed", "stopping"]
COUNTERS = (
    "steps",
    "rows",  # tokens evaluated, in all steps
    "forward_ms",
    "prompt_tokens",  # evaluated, so without the cached ones
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "cancelled",
    "errors",
)

_log = logging.getLogger(__name__)


class Engine:
    """Serves requests on one forward."""

    def __init__(
        self,
        forward: ForwardPass,
        tokenizer: TextSource,
        *,
        parallel: int,
        context: int,
        chunk: int,
        kv_cells: KVCells | None = None,
        draft: DraftMode = "off",
        draft_tokens: int = 0,
        slowdown: float = 0.0,
        on_drafts: Callable[[int, int, str], None] = lambda drafted, accepted, verdict: None,
    ) -> None:
        """`on_drafts` is told what became of a sequence's drafts, and whether drafting is on.

        `slowdown` limits how much longer a step may take for prompts while answers run; 0 is no limit.
        """
        draft_tokens = 0 if draft == "off" else draft_tokens
        kv = KVCells(forward.kv_cells - scratch_cells(parallel, draft_tokens)) if kv_cells is None else kv_cells
        if 0 < forward.state_slots <= parallel * (2 + draft_tokens):
            raise ConfigError(f"{forward.state_slots} slots of recurrent state are too few for {parallel} sequences")
        most = min(forward.max_rows, forward.max_outputs)
        if not 0 < parallel * (1 + draft_tokens) <= most:
            raise ConfigError(
                f"parallel is {parallel}; it must be 1 to {most // (1 + draft_tokens)}, the rows of one step"
            )
        if chunk <= 0:
            raise ConfigError(f"chunk is {chunk}; it must be at least 1")
        self._drafter = (
            Drafter(forward, kv, parallel=parallel, tokens=draft_tokens, mode=draft, report=on_drafts)
            if draft_tokens
            else None
        )
        self.context = min(context, forward.context_length, kv.capacity)
        self.state: State = "ready"
        self.error: ExpertServeError | None = None
        self._forward = forward
        self._tokenizer = tokenizer
        self._eog = frozenset(tokenizer.eog_ids)
        self._vocab_size = forward.vocab_size
        self._scheduler = Scheduler(
            kv,
            StateSlots(forward.state_slots),
            parallel=parallel,
            max_rows=forward.max_rows,
            chunk=chunk,
            max_outputs=forward.max_outputs,
            draft_tokens=draft_tokens,
            slowdown=slowdown,
        )
        self._builder = BatchBuilder(kv)
        self._sequences: dict[str, Sequence] = {}  # accepted and not ended; written under the lock
        self._changed = threading.Condition()
        self._messages: deque[Callable[[], None]] = deque()
        self._stop_asked = False
        self._thread: threading.Thread | None = None
        self._counters: dict[str, float] = dict.fromkeys(
            ("steps", "rows", "prompt_tokens", "generated_tokens", "cached_tokens", "finished", "cancelled", "errors"),
            0,
        )
        self._counters["forward_ms"] = 0.0
        self._cells_in_use = (0, 0)

    # ---- called from any thread

    def start(self) -> None:
        """Starts the engine's thread; requests submitted before wait for it."""
        assert self._thread is None, "the engine was started twice"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request; raises RequestError, before anything is queued, if it can never be served."""
        check_request(request, vocab_size=self._vocab_size, context=self.context)
        sequence = Sequence(request, self._tokenizer, self.context)
        with self._changed:
            if self.error is not None:
                raise RequestError(f"the engine has failed: {self.error}", code="engine_failed", http_status=503)
            if self.state != "ready":
                raise RequestError("the server is shutting down", code="shutting_down", http_status=503)
            if request.id in self._sequences:
                raise RequestError(f"a request with the id {request.id!r} is already running", param="id")
            self._sequences[request.id] = sequence
            self._post(partial(self._scheduler.queue.append, sequence))

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; one that has ended already, or never was, is ignored."""
        with self._changed:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self._post(partial(self._cancel, sequence))

    def clear_prefix_cache(self) -> None:
        """Gives up all cached prefixes before the next step."""
        with self._changed:
            self._post(self._scheduler.cache.clear)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits until the accepted ones have ended; False if the time ran out first."""
        with self._changed:
            if self.state == "ready":
                self.state = "stopping"
            return self._changed.wait_for(lambda: not self._sequences, timeout)

    def stop(self) -> None:
        """Cancels whatever still runs and ends the thread. The forward stays open: its owner closes it."""
        with self._changed:
            if self.state == "ready":
                self.state = "stopping"
            for sequence in self._sequences.values():
                self._post(partial(self._cancel, sequence))
            self._stop_asked = True
            self._changed.notify_all()
        if self._thread is None:
            self.tick()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def snapshot(self) -> dict[str, float]:
        """Counters since the start and what is in use now."""
        running, cached = self._cells_in_use
        scheduler = self._scheduler
        return {
            "requests_running": len(scheduler.running),
            "requests_queued": max(0, len(self._sequences) - len(scheduler.running)),
            "kv_cells": scheduler.kv.capacity,
            "kv_cells_free": scheduler.kv.free,
            "kv_cells_used": running,
            "kv_cells_cached": cached,
            **self._counters,
            **({} if self._drafter is None else self._drafter.counters()),
            "preemptions": scheduler.preemptions,
        }

    # ---- called on the engine's thread only (tests without a thread call tick themselves)

    def tick(self) -> bool:
        """Handles the messages and runs one step; False when there was nothing to run."""
        while self._messages:
            self._messages.popleft()()
        self._end_expired()
        if not self._scheduler.has_work():
            self._cells_in_use = self._scheduler.cells_in_use()
            return False
        began, generated = perf_counter(), self._counters["generated_tokens"]
        if self._drafter is not None:
            self._drafter.propose(self._scheduler.running)
        works = self._scheduler.plan()
        assert works, "no row could be scheduled"
        self._run_works(works)
        seconds = perf_counter() - began
        decodes = sum(work.decode for work in works)
        prompt_rows = sum(work.end - work.start for work in works if not work.decode)
        self._scheduler.pacer.observe(decodes, prompt_rows, seconds)
        new = int(self._counters["generated_tokens"] - generated)
        if self._drafter is not None and new and not prompt_rows:
            self._drafter.trial.add(seconds / new)
        self._cells_in_use = self._scheduler.cells_in_use()
        return True

    def _end_expired(self) -> None:
        now = perf_counter()
        for sequence in [*self._scheduler.running, *self._scheduler.queue]:
            if (error := sequence.expired(now)) is not None:
                self._end_with_error(sequence, error)

    def check_integrity(self) -> None:
        """Raises AssertionError when cells and their holders disagree; between steps only."""
        self._scheduler.check_integrity()

    def _post(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.tick()
        except Exception as error:
            _log.exception("the engine failed")
            self._fail(ExpertServeError(f"the engine failed: {type(error).__name__}: {error}"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._messages and not self._scheduler.has_work():
                if self._stop_asked:
                    return False
                self._changed.wait()
        return True

    def _fail(self, error: ExpertServeError) -> None:
        with self._changed:
            self.state, self.error = "failed", error
            self._scheduler.running.clear()
            self._scheduler.queue.clear()
            sequences = list(self._sequences.values())
        for sequence in sequences:
            self._forget(sequence)
            self._emit(sequence, ErrorEvent(error))

    def _run_works(self, works: SequenceOf[Work]) -> bool:
        """Evaluates and delivers; False if a request failed or had to be run apart."""
        try:
            logits = self._evaluate(works)
        except ExpertServeError as error:
            if any(work.sequence.drafts for work in works):  # it may be a wrong draft that met the error
                return self._run_works([self._scheduler.without_drafts(work) for work in works])
            if len(works) == 1:
                self._end_with_error(works[0].sequence, error)
            else:
                self._run_apart(works)
            return False
        if self._drafter is not None:
            self._drafter.observe(works)
        row = 0
        for work in works:
            self._deliver(work, logits[row : row + work.num_outputs])
            row += work.num_outputs
        return True

    def _evaluate(self, works: SequenceOf[Work]) -> NDArray[np.float32]:
        batch = self._builder.build(works)
        started = perf_counter()
        try:
            return self._forward(batch)
        finally:
            self._counters["forward_ms"] += 1e3 * (perf_counter() - started)
            self._counters["steps"] += 1
            self._counters["rows"] += len(batch.tokens)

    def _run_apart(self, works: SequenceOf[Work]) -> None:
        """Runs a failed step again, each sequence alone, so that only those fail that need what cannot be had.

        Evaluating a row twice writes the same K and V into the same cell. A sequence that shares cells which a failed
        one was to write goes back to the queue.
        """
        unwritten = np.zeros(self._scheduler.kv.capacity, bool)
        again: list[Sequence] = []
        for work in works:
            cells = work.sequence.cells.copy()
            if unwritten[cells[: work.start]].any():
                again.append(work.sequence)
                unwritten[cells[work.start :]] = True
            elif not self._run_works([work]):
                unwritten[cells[work.start :]] = True
        for sequence in reversed(again):
            self._scheduler.requeue(sequence)

    def _deliver(self, work: Work, logits: NDArray[np.float32]) -> None:
        """Takes the logits of a sequence's rows: prompt log-probabilities, then the next tokens."""
        if work.decode:
            self._deliver_decoded(work, logits)
            return
        sequence = work.sequence
        self._scheduler.evaluated(work, work.end)
        self._count_prompt(work)
        if sequence.wants_prompt_logprobs:
            sequence.take_prompt_logprobs(logits, work.first_output)
        if sequence.pending:
            return
        if sequence.prompt_logprobs is not None and not sequence.generated:
            self._emit(sequence, PromptEvent(sequence.prompt_logprobs))
        if sequence.max_new == 0:
            self._finish(sequence, "length", "")
            return
        try:
            reason = self._sample(sequence, logits[-1])
        except ExpertServeError as error:
            self._end_with_error(sequence, error)
            return
        if reason is not None:
            self._finish(sequence, reason, self._rest(sequence))

    def _deliver_decoded(self, work: Work, logits: NDArray[np.float32]) -> None:
        """Samples after the last token, and after each draft as long as the token sampled is the one drafted."""
        sequence, drafts = work.sequence, [*work.sequence.drafts]
        reason: FinishReason | None = None
        failed: ExpertServeError | None = None
        end = work.start
        for row, draft in zip(logits, [*drafts, None], strict=True):
            end += 1
            try:
                reason = self._sample(sequence, row)
            except ExpertServeError as error:
                failed = error
                break
            if reason is not None or sequence.tokens[-1] != draft:
                break
        self._scheduler.evaluated(work, end)
        if self._drafter is not None:
            self._drafter.judge(len(drafts), end - work.start - 1)
        if failed is not None:
            self._end_with_error(sequence, failed)
        elif reason is not None:
            self._finish(sequence, reason, self._rest(sequence))

    def _count_prompt(self, work: Work) -> None:
        if work.sequence.generated == 0:
            self._counters["prompt_tokens"] += work.end - work.start

    def _sample(self, sequence: Sequence, logits: NDArray[np.float32]) -> FinishReason | None:
        """Samples and sends a token; says why the sequence ends with it, if it does."""
        token, logprob = sequence.sample(logits)
        self._counters["generated_tokens"] += 1
        ended = token in self._eog and not sequence.request.params.ignore_eos
        stops = sequence.stop_filter
        text = "" if ended else stops.push(sequence.text_stream.push(token))
        self._emit(sequence, TokenEvent(token, text, logprob))
        if ended or stops.stopped or sequence.sampler.ended:
            return "stop"
        return "length" if sequence.generated >= sequence.max_new else None

    def _rest(self, sequence: Sequence) -> str:
        """The text still held back at the end."""
        if sequence.stop_filter.stopped:
            return ""
        return sequence.stop_filter.push(sequence.text_stream.flush()) + sequence.stop_filter.flush()

    def _cancel(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.request.id) is sequence:
            self._finish(sequence, "cancelled", "")

    def _finish(self, sequence: Sequence, reason: FinishReason, text: str) -> None:
        self._scheduler.finish(sequence, keep=reason != "cancelled")
        self._counters["cancelled" if reason == "cancelled" else "finished"] += 1
        self._counters["cached_tokens"] += sequence.cached_tokens or 0
        self._forget(sequence)
        self._emit(
            sequence, FinishEvent(reason, text, sequence.usage(), sequence.timings(), sequence.stop_filter.found)
        )

    def _end_with_error(self, sequence: Sequence, error: ExpertServeError) -> None:
        self._scheduler.finish(sequence, keep=False)
        self._counters["errors"] += 1
        self._forget(sequence)
        self._emit(sequence, ErrorEvent(error))

    def _forget(self, sequence: Sequence) -> None:
        with self._changed:
            self._sequences.pop(sequence.request.id, None)
            self._changed.notify_all()

    def _emit(self, sequence: Sequence, event: Event) -> None:
        try:
            sequence.request.on_event(event)
        except Exception:
            _log.exception("the callback of request %s failed; the request is cancelled", sequence.request.id)
            self.cancel(sequence.request.id)
