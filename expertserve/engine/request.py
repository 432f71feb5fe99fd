"""What a client asks of the engine, with the events it gets back.

Plain values only: no state of a running sequence, no threads. The invariant: a request gets at most one PromptEvent,
then one TokenEvent for each sampled token (so their number is `usage.completion_tokens`, the end-of-generation token
and the token that completes a stop string included), then exactly one FinishEvent or ErrorEvent, and nothing after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from expertserve.engine.ports import Constraint
from expertserve.errors import ExpertServeError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and where they end.

    Attributes:
        temperature: 0 is greedy: the likeliest token, the lowest id on ties.
        top_k: keep the k likeliest tokens; 0 or less is off.
        top_p: keep the fewest likeliest tokens that together reach this probability; 1 is off.
        min_p: keep the tokens at least this fraction as likely as the likeliest; 0 is off.
        repeat_penalty: divides positive and multiplies negative logits of recent tokens; 1 is off.
        repeat_last_n: how many recent tokens (prompt included) all three penalties look at; 0 is off, -1 all of them.
        presence_penalty: subtracted once from the logit of a recent token.
        frequency_penalty: subtracted once for every recent occurrence.
        logit_bias: added to the logits of these token ids before anything else.
        seed: equal seeds give equal draws; None draws from the system's entropy.
        stop: strings that end the text; neither they nor a part of them is sent.
        max_tokens: most tokens to sample; 0 only evaluates the prompt; None goes on to the context's end.
        ignore_eos: end-of-generation tokens do not end the text.
        logprobs: k gives each token's log-probability with the k best beside it; None gives none.
        prompt_logprobs: the same for the prompt's tokens.
        constraint: what the text must look like; it ends the text where nothing may follow.
        marks: tokens whose place in the text is told, as text/stream.py does, and their spellings.
        forced: the first tokens are these, whatever the logits say (teacher forcing).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    forced: tuple[int, ...] = ()


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's own distribution, with the best candidates, likeliest first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were reused and not evaluated again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Timings:
    """Where a request's time went, in milliseconds.

    Attributes:
        queue_ms: from submission to its first row in a step.
        prompt_ms: from there to the first sampled token (or the end of the prompt, when none is asked for).
        decode_ms: from the first sampled token to the last.
        ttft_ms: from submission to the first sampled token.
    """

    queue_ms: float
    prompt_ms: float
    decode_ms: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log-probabilities of the prompt's tokens, None for the first one; sent only if asked for."""

    logprobs: list[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token and the text that became safe to send with it (possibly none)."""

    token_id: int
    text: str
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a request; `text` is what was still held back, `stop` the string of its own that ended it."""

    reason: FinishReason
    text: str
    usage: Usage
    timings: Timings
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The end of a request that failed."""

    error: ExpertServeError


Event = PromptEvent | TokenEvent | FinishEvent | ErrorEvent


@dataclass(slots=True)
class Request:
    """A prompt to continue. `on_event` is called on the engine's thread and must return at once.

    Attributes:
        queue_timeout_s: it fails where no row of it was evaluated by then.
        timeout_s: it fails where it has not ended by then.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    on_event: Callable[[Event], None]
    queue_timeout_s: float = math.inf
    timeout_s: float = math.inf
