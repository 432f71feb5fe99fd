"""The fields around the choices of a response: id, time, model, usage, timings.

Shared by chat and text completions, streamed or not; knows nothing of what a choice looks like.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from expertserve.errors import ExpertServeError
from expertserve.server.errors import error_object
from expertserve.server.generation import Generation
from expertserve.server.state import ServedModel


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one response repeats."""

    id: str
    kind: str
    model: ServedModel
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model.names[0],
            "system_fingerprint": self.model.fingerprint,
        }


DONE = b"data: [DONE]\n\n"


def data_event(body: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """One server-sent event whose name is the body's type."""
    return f"event: {body['type']}\n".encode() + data_event(body)


def error_event(error: ExpertServeError) -> bytes:
    """How a stream of OpenAI's completions says that it failed."""
    return data_event({"error": error_object(error)})


def response_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def usage_object(generation: Generation, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Each prompt counts once, however many choices continue it."""
    prompt_tokens = completion_tokens = cached_tokens = 0
    seen: set[int] = set()
    for index, finish in sorted(generation.finished.items()):
        completion_tokens += finish.usage.completion_tokens
        if (prompt_index := generation.prompt_indices[index]) not in seen:
            seen.add(prompt_index)
            prompt_tokens += finish.usage.prompt_tokens
            cached_tokens += finish.usage.cached_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings_object(generation: Generation) -> dict[str, Any]:
    """llama.cpp's field; choices run side by side, so their times are not added but the longest counts."""
    finishes = list(generation.finished.values())
    usage = usage_object(generation)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt_ms = max((finish.timings.prompt_ms for finish in finishes), default=0.0)
    predicted_ms = max((finish.timings.decode_ms for finish in finishes), default=0.0)
    prompt_n = usage["prompt_tokens"] - cached
    predicted_n = usage["completion_tokens"]
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_second": _per_second(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        # The first token of each choice belongs to the prompt's time.
        "predicted_per_second": _per_second(max(predicted_n - len(finishes), 0), predicted_ms),
        "queue_ms": max((finish.timings.queue_ms for finish in finishes), default=0.0),
    }


def _per_second(count: int, milliseconds: float) -> float:
    return 1000.0 * count / milliseconds if milliseconds > 0 else 0.0
