"""Refuses requests that cannot be served, before they are queued.

Everything that can be known without evaluating a token is checked here, by name of the field at fault; what passes
fits the context and has parameters that the sampler can use.
"""

from __future__ import annotations

import math

from expertserve.engine.request import Request, SamplingParams
from expertserve.engine.stop import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from expertserve.errors import RequestError

REPEAT_PENALTIES = (1e-6, 1e6)  # far beyond any use; a score stays a number when it is divided or multiplied by them
MAX_PROMPT_LOGPROBS = 4 << 20  # entries of one reply; each costs about 100 bytes


def check_request(request: Request, *, vocab_size: int, context: int) -> None:
    """Raises RequestError if the request cannot be served."""
    _check_prompt(request, vocab_size, context)
    _check_sampling(request.params, vocab_size)
    _check_stops(request.params)
    entries = len(request.prompt) * (request.params.prompt_logprobs or 0)
    if entries > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{entries} prompt log-probabilities are asked for; at most {MAX_PROMPT_LOGPROBS} are returned: "
            "send a shorter prompt or ask for fewer a token",
            param="logprobs",
        )


def _check_prompt(request: Request, vocab_size: int, context: int) -> None:
    length = len(request.prompt)
    if not length:
        raise RequestError("the prompt has no tokens", param="prompt")
    room_for_one = 0 if request.params.max_tokens == 0 else 1
    if length + room_for_one > context:
        raise RequestError(
            f"the prompt has {length} tokens and the context holds {context}"
            + (" (one must be left for the answer)" if room_for_one and length == context else ""),
            param="prompt",
            code="context_length_exceeded",
        )
    forced = len(request.params.forced)
    if forced and length + forced >= context:
        raise RequestError(
            f"{length} tokens of prompt, {forced} forced after them and one of the answer; the context holds {context}",
            param="forced",
            code="context_length_exceeded",
        )
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside 0..{vocab_size - 1}", param="prompt")


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    _check_range("temperature", params.temperature, 0, math.inf)
    _check_range("top_p", params.top_p, 0, 1)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("presence_penalty", params.presence_penalty, -math.inf, math.inf)
    _check_range("frequency_penalty", params.frequency_penalty, -math.inf, math.inf)
    _check_range("repeat_penalty", params.repeat_penalty, *REPEAT_PENALTIES)
    _check_range("repeat_last_n", params.repeat_last_n, -1, math.inf)
    _check_range("max_tokens", params.max_tokens or 0, 0, math.inf)
    _check_range("logprobs", params.logprobs or 0, 0, vocab_size)
    _check_range("prompt_logprobs", params.prompt_logprobs or 0, 0, vocab_size)
    if not all(0 <= token < vocab_size for token in params.forced):
        raise RequestError(f"a forced token id is outside 0..{vocab_size - 1}", param="forced")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias names token {token}, outside 0..{vocab_size - 1}", param="logit_bias")
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(f"logit_bias of token {token} is {bias}", param="logit_bias")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        allowed = f"between {low} and {high}" if math.isfinite(high) else f"a finite number, at least {low}"
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)


def _check_stops(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(params.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for stop in params.stop:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_LENGTH}", param="stop"
            )
