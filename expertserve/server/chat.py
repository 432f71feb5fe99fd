"""The form of chat completions: one body, or chunks.

Owns how a choice, its delta and its log-probabilities are written. A chunk of plain text costs one json.dumps of the
text between two prepared byte strings, because this happens for every token of every client.
"""

from __future__ import annotations

import json
from typing import Any

from expertserve.engine.request import Event, FinishEvent, TokenEvent, TokenLogprob
from expertserve.server.envelope import Envelope, timings_object, usage_object
from expertserve.server.generation import Generation
from expertserve.server.token_names import TokenNames, finite


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": finite(logprob), "bytes": list(names.raw(token_id))}


def _content_logprob(names: TokenNames, logprob: TokenLogprob) -> dict[str, Any]:
    entry = _entry(names, logprob.token_id, logprob.logprob)
    entry["top_logprobs"] = [_entry(names, token_id, value) for token_id, value in logprob.top]
    return entry


class ChatChunks:
    """Writes the events of one generation as SSE data."""

    def __init__(self, envelope: Envelope, num_choices: int, names: TokenNames, include_usage: bool) -> None:
        self._fields = envelope.fields()
        self._names = names
        self._include_usage = include_usage
        self._num_choices = num_choices
        head = json.dumps(self._fields)[:-1]
        self._heads = [
            f'data: {head}, "choices": [{{"index": {index}, "delta": {{"content": '.encode()
            for index in range(num_choices)
        ]
        self._usage_tail = ', "usage": null}\n\n' if include_usage else "}\n\n"
        self._tail = ('}, "logprobs": null, "finish_reason": null}]' + self._usage_tail).encode()

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._data(self._choice(index, delta, None)) for index in range(self._num_choices))

    def chunk(self, index: int, event: Event, generation: Generation) -> bytes:
        if isinstance(event, TokenEvent):
            return self._text(index, event.text, event.logprob)
        if isinstance(event, FinishEvent):
            choice = self._choice(index, {}, event.reason)
            last = len(generation.finished) == self._num_choices and not self._include_usage
            extra = {"timings": timings_object(generation)} if last else {}
            return (self._text(index, event.text, None) if event.text else b"") + self._data(choice, **extra)
        return b""

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return b""
        body = {**self._fields, "choices": [], "usage": usage_object(generation), "timings": timings_object(generation)}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    def _text(self, index: int, text: str, logprob: TokenLogprob | None) -> bytes:
        if logprob is None:
            return self._heads[index] + json.dumps(text).encode() + self._tail if text else b""
        choice = self._choice(index, {"content": text}, None)
        choice["logprobs"] = {"content": [_content_logprob(self._names, logprob)], "refusal": None}
        return self._data(choice)

    @staticmethod
    def _choice(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _data(self, choice: dict[str, Any], **extra: Any) -> bytes:
        body = {**self._fields, "choices": [choice], **extra}
        if self._include_usage:
            body["usage"] = None
        return b"data: " + json.dumps(body).encode() + b"\n\n"


class ChatResponse:
    """Gathers the events of one generation into one body."""

    def __init__(self, envelope: Envelope, num_choices: int, names: TokenNames, want_logprobs: bool) -> None:
        self._fields = envelope.fields()
        self._names = names
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._want_logprobs = want_logprobs

    def add(self, index: int, event: Event) -> None:
        if isinstance(event, TokenEvent | FinishEvent):
            self._texts[index].append(event.text)
        if isinstance(event, TokenEvent) and event.logprob is not None:
            self._logprobs[index].append(event.logprob)

    def body(self, generation: Generation) -> bytes:
        choices = [self._choice(index, generation.finished[index].reason) for index in range(len(self._texts))]
        usage, timings = usage_object(generation), timings_object(generation)
        return json.dumps({**self._fields, "choices": choices, "usage": usage, "timings": timings}).encode()

    def _choice(self, index: int, reason: str) -> dict[str, Any]:
        content = [_content_logprob(self._names, logprob) for logprob in self._logprobs[index]]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None},
            "logprobs": {"content": content, "refusal": None} if self._want_logprobs else None,
            "finish_reason": reason,
        }
