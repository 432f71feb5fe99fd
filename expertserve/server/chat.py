"""The form of chat completions: one body, or chunks.

Owns how a choice, its delta, its calls of tools and its log-probabilities are written. A chunk of plain text costs one
json.dumps of the text between two prepared byte strings, because this happens for every token of every client.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from expertserve.engine.request import Event, FinishEvent, TokenEvent, TokenLogprob
from expertserve.errors import ExpertServeError
from expertserve.server.envelope import DONE, Envelope, data_event, error_event, timings_object, usage_object
from expertserve.server.generation import Generation
from expertserve.server.token_names import TokenNames, finite
from expertserve.text.answer import AnswerParser, Piece


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": finite(logprob), "bytes": list(names.raw(token_id))}


def _content_logprob(names: TokenNames, logprob: TokenLogprob) -> dict[str, Any]:
    entry = _entry(names, logprob.token_id, logprob.logprob)
    entry["top_logprobs"] = [_entry(names, token_id, value) for token_id, value in logprob.top]
    return entry


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def finish_reason(event: FinishEvent, parser: AnswerParser) -> str:
    return "tool_calls" if parser.calls and event.reason == "stop" else event.reason


def pieces_of(event: Event, parser: AnswerParser) -> list[Piece]:
    """What an event adds to the parts of the answer."""
    if isinstance(event, TokenEvent):
        return parser.push_token(event.text)
    return parser.end(event.text, event.stop) if isinstance(event, FinishEvent) else []


class ChatChunks:
    """Writes the events of one generation as SSE data."""

    def __init__(
        self, envelope: Envelope, parsers: Sequence[AnswerParser], names: TokenNames, include_usage: bool
    ) -> None:
        self._fields = envelope.fields()
        self._names = names
        self._include_usage = include_usage
        self._parsers = parsers
        head = json.dumps(self._fields)[:-1]
        self._heads = [
            f'data: {head}, "choices": [{{"index": {index}, "delta": {{"content": '.encode()
            for index in range(len(parsers))
        ]
        self._usage_tail = ', "usage": null}\n\n' if include_usage else "}\n\n"
        self._tail = ('}, "logprobs": null, "finish_reason": null}]' + self._usage_tail).encode()

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._data(self._choice(index, delta, None)) for index in range(len(self._parsers)))

    def chunk(self, index: int, event: Event, generation: Generation) -> bytes:
        logprob = event.logprob if isinstance(event, TokenEvent) else None
        pieces = pieces_of(event, self._parsers[index])
        if logprob is not None and not pieces:  # each token's log-probability is sent, also where its text waits
            pieces = [Piece("content", "")]
        data = b""
        for piece in pieces:
            data += self._piece(index, piece, logprob)
            logprob = None
        if isinstance(event, FinishEvent):
            choice = self._choice(index, {}, finish_reason(event, self._parsers[index]))
            last = len(generation.finished) == len(self._parsers) and not self._include_usage
            data += self._data(choice, **({"timings": timings_object(generation)} if last else {}))
        return data

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        usage, timings = usage_object(generation, _reasoning_tokens(self._parsers)), timings_object(generation)
        return data_event({**self._fields, "choices": [], "usage": usage, "timings": timings}) + DONE

    def failure(self, error: ExpertServeError) -> bytes:
        return error_event(error)

    def _piece(self, index: int, piece: Piece, logprob: TokenLogprob | None) -> bytes:
        if logprob is None and piece.part == "content":
            return self._heads[index] + json.dumps(piece.text).encode() + self._tail
        choice = self._choice(index, _delta(piece), None)
        if logprob is not None:
            choice["logprobs"] = {"content": [_content_logprob(self._names, logprob)], "refusal": None}
        return self._data(choice)

    @staticmethod
    def _choice(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _data(self, choice: dict[str, Any], **extra: Any) -> bytes:
        body = {**self._fields, "choices": [choice], **extra}
        if self._include_usage:
            body["usage"] = None
        return data_event(body)


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.part == "call":
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.name is not None:
            call |= _call(piece)
        return {"tool_calls": [call]}
    return {"reasoning_content" if piece.part == "reasoning" else "content": piece.text}


def _call(piece: Piece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.text}
    return {"id": piece.id or call_id(), "type": "function", "function": function}


def _reasoning_tokens(parsers: Sequence[AnswerParser]) -> int:
    return sum(parser.reasoning_tokens for parser in parsers)


class AnswerParts:
    """The parts of one whole answer, gathered."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[Piece] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.part == "call":
                begun = piece if piece.name is not None else self.calls.pop()
                self.calls.append(begun if begun is piece else replace(begun, text=begun.text + piece.text))
            elif piece.part == "reasoning":
                self.reasoning += piece.text
            else:
                self.content += piece.text

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [_call(call) for call in self.calls]
        return message


class ChatResponse:
    """Gathers the events of one generation into one body."""

    def __init__(
        self, envelope: Envelope, parsers: Sequence[AnswerParser], names: TokenNames, want_logprobs: bool
    ) -> None:
        self._fields = envelope.fields()
        self._names = names
        self._parsers = parsers
        self._parts = [AnswerParts() for _ in parsers]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in parsers]
        self._want_logprobs = want_logprobs

    def add(self, index: int, event: Event) -> None:
        self._parts[index].add(pieces_of(event, self._parsers[index]))
        if isinstance(event, TokenEvent) and event.logprob is not None:
            self._logprobs[index].append(event.logprob)

    def body(self, generation: Generation) -> bytes:
        choices = [self._choice(index, generation.finished[index]) for index in range(len(self._parsers))]
        usage, timings = usage_object(generation, _reasoning_tokens(self._parsers)), timings_object(generation)
        return json.dumps({**self._fields, "choices": choices, "usage": usage, "timings": timings}).encode()

    def _choice(self, index: int, finish: FinishEvent) -> dict[str, Any]:
        content = [_content_logprob(self._names, logprob) for logprob in self._logprobs[index]]
        return {
            "index": index,
            "message": self._parts[index].message(),
            "logprobs": {"content": content, "refusal": None} if self._want_logprobs else None,
            "finish_reason": finish_reason(finish, self._parsers[index]),
        }
