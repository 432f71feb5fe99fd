"""A request while the engine works on it: its tokens, its cells and how far it has come.

Pure state with its bookkeeping; it schedules nothing and sends nothing. The invariant: cell i holds the K and V of
token i; `evaluated` of them are written, `num_cells` are owned (more than `evaluated` only while a step is under way),
and every token beyond them still has to be evaluated. A sampled token is never taken back.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.logprobs import token_logprobs
from expertserve.engine.ports import TextSource
from expertserve.engine.request import Request, Timings, TokenLogprob, Usage
from expertserve.engine.sampler import Sampler
from expertserve.engine.states import SequenceState
from expertserve.engine.stop import StopFilter
from expertserve.errors import RequestError
from expertserve.kv.cache import Cells


class Sequence:
    """One request's tokens and cells."""

    def __init__(self, request: Request, tokenizer: TextSource, context: int) -> None:
        params = request.params
        self.request = request
        self.prompt_length = len(request.prompt)
        room = context - self.prompt_length
        self.max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        self.num_tokens = self.prompt_length
        self._tokens = np.empty(self.prompt_length + self.max_new, np.int32)
        self._tokens[: self.prompt_length] = request.prompt
        self._cells = np.empty(len(self._tokens), np.int64)
        self.num_cells = 0
        self.evaluated = 0
        self.state = SequenceState()
        self.drafts: list[int] = []  # guesses of the tokens that follow, to be judged by the next step
        self.hidden = np.empty(
            (0, 0), np.float32
        )  # the target's for the last tokens evaluated, until a draft has used them
        self.cached_tokens: int | None = None  # None until the first row is scheduled
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self.sampler = Sampler(params)
        self.stop_filter = StopFilter(params.stop)
        self.text_stream = tokenizer.stream(marks=params.marks)
        self.submitted_at = perf_counter()
        self._started_at: float | None = None
        self._first_at: float | None = None
        self._last_at: float | None = None

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens so far."""
        return self._tokens[: self.num_tokens]

    @property
    def cells(self) -> Cells:
        """The cells owned, in token order."""
        return self._cells[: self.num_cells]

    @property
    def generated(self) -> int:
        return self.num_tokens - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that have no cell yet; drafts have some before they are tokens."""
        return max(0, self.num_tokens - self.num_cells)

    @property
    def decoding(self) -> bool:
        """Whether only the token sampled last is missing."""
        return self.num_tokens > self.prompt_length and self.num_tokens - self.num_cells == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt still have to give their logits."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from elsewhere: at least one row is evaluated for its logits."""
        if self.wants_prompt_logprobs:
            assert self.prompt_logprobs is not None
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    def adopt(self, cells: Cells, state: int) -> None:
        """Starts from cells that already hold the first tokens, and the slot of the recurrent state after them."""
        assert not self.num_cells
        self.state.current = state
        self._cells[: len(cells)] = cells
        self.num_cells = self.evaluated = len(cells)
        if self.cached_tokens is None:
            self.cached_tokens = len(cells)
            self._started_at = perf_counter()

    def extend(self, cells: Cells) -> None:
        """Adds cells for the next tokens."""
        self._cells[self.num_cells : self.num_cells + len(cells)] = cells
        self.num_cells += len(cells)

    def forget_cells(self) -> None:
        """Everything has to be evaluated again; the caller has passed the references on."""
        self.num_cells = self.evaluated = 0
        self.drafts, self.hidden = [], self.hidden[:0]

    def rows(self, start: int, end: int) -> NDArray[np.int32]:
        """The tokens [start, end), drafts among them."""
        drafted = np.array(self.drafts[: max(0, end - self.num_tokens)], np.int32)
        return np.concatenate([self.tokens[start:end], drafted])

    def keep_evaluated(self, end: int) -> Cells:
        """The tokens up to `end` are evaluated and the drafts judged; returns the cells of those that were wrong."""
        wrong = self.drop_drafts(end)
        self.evaluated = end
        self.hidden = self.hidden[: len(self.hidden) - len(wrong)]
        return wrong

    def drop_drafts(self, end: int) -> Cells:
        """Forgets the drafts, whose tokens would be from `end` on; returns their cells."""
        cells = self.cells[end:].copy()
        self.num_cells, self.drafts = end, []
        return cells

    def state_ends(self, start: int, end: int) -> list[int]:
        """At which lengths the evaluation of the tokens [start, end) leaves a recurrent state.

        That is after each draft, and before the last token of the prompt, for a later request that starts there.
        """
        if self.drafts:
            return [*range(start + 1, end + 1)]
        before_last = self.prompt_length - 1
        return [before_last, end] if start < before_last < end and not self.generated else [end]

    def outputs(self, start: int, end: int) -> tuple[int, int]:
        """Which of the token indices [start, end), about to be evaluated, must return logits: a contiguous range."""
        last = end
        if end == self.num_tokens and self.max_new == 0:
            last = end - 1
        if self.wants_prompt_logprobs:
            return max(start, self.reusable), last
        return (end - 1 if end == self.num_tokens else end), last

    def take_prompt_logprobs(self, logits: NDArray[np.float32], first: int) -> None:
        """Records the log-probabilities of the prompt tokens that follow the rows of indices first, first + 1, ..."""
        assert self.prompt_logprobs is not None
        following = self.request.prompt[first + 1 : first + 1 + len(logits)]
        count = self.request.params.prompt_logprobs or 0
        self.prompt_logprobs += token_logprobs(logits[: len(following)], following, count)

    def sample(self, logits: NDArray[np.float32]) -> tuple[int, TokenLogprob | None]:
        """Samples the next token from a row of logits, unless it is forced, and appends it."""
        forced = self.request.params.forced
        token = forced[self.generated] if self.generated < len(forced) else self.sampler.sample(logits, self.tokens)
        count = self.request.params.logprobs
        logprob = None if count is None else token_logprobs(logits[np.newaxis], (token,), count)[0]
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self._last_at = perf_counter()
        if self._first_at is None:
            self._first_at = self._last_at
        return token, logprob

    def expired(self, now: float) -> RequestError | None:
        """What ends the request because its time is over; `now` is a reading of perf_counter."""
        waited, request = now - self.submitted_at, self.request
        if waited > request.timeout_s:
            what, limit, code = "did not end", request.timeout_s, "request_timeout"
        elif self._started_at is None and waited > request.queue_timeout_s:
            what, limit, code = "did not start", request.queue_timeout_s, "queue_timeout"
        else:
            return None
        return RequestError(f"the request {what} within {limit:g} seconds", code=code, http_status=408)

    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.generated, self.cached_tokens or 0)

    def timings(self) -> Timings:
        """Milliseconds up to now; a stage that was not reached took none."""
        started = self.submitted_at if self._started_at is None else self._started_at
        prompt_end = self._first_at or (perf_counter() if self._started_at is not None else started)
        decode = 0.0 if self._first_at is None or self._last_at is None else self._last_at - self._first_at
        ttft = 0.0 if self._first_at is None else self._first_at - self.submitted_at
        spans = (started - self.submitted_at, prompt_end - started, decode, ttft)
        return Timings(*(1e3 * span for span in spans))
