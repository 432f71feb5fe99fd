"""The parts of an assistant's text: reasoning, content, calls of tools.

Owns cutting a growing text at the marks of a dialect (dialect.py). The invariant: nothing is lost. What is no whole
mark yet waits; what begins like a call and is none, or calls a tool that nobody offered, stays content as it was
written. Only white space around marks goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from expertserve.text.dialect import Dialect, JsonCalls, TaggedCalls


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one part. For a call `text` is more of its arguments' JSON; its first piece has the name."""

    part: Literal["reasoning", "content", "call"]
    text: str
    call: int = 0
    name: str | None = None


class AnswerParser:
    """Cuts one answer.

    Args:
        dialect: how the model writes.
        tools: schema of the parameters of each tool that may be called, by name.
        opened: the prompt has opened the reasoning already.
    """

    def __init__(self, dialect: Dialect, tools: Mapping[str, Mapping[str, Any]], opened: bool) -> None:
        self.calls = 0
        self._dialect = dialect
        self._tools = tools
        self._text = ""
        self._strip = False  # white space may be left out here
        self._arguments = _ObjectEnd()
        self._parameters = 0
        self._at = self._in_start if dialect.reasoning else self._in_content
        if dialect.reasoning and opened:
            self._strip, self._at = True, self._in_reasoning

    def push(self, text: str) -> list[Piece]:
        """Takes new text and returns what is certain."""
        self._text += text
        return self._advance(False)

    def flush(self) -> list[Piece]:
        """Returns what was held back: the text is over."""
        return self._advance(True)

    def _advance(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text or final:
            state, length = self._at, len(self._text)
            self._at(final, pieces)
            if self._at == state and len(self._text) == length:
                break
        return [piece for piece in pieces if piece.text or piece.name]

    def _say(self, part: Literal["reasoning", "content"], text: str, pieces: list[Piece]) -> None:
        if self._strip:
            text = text.lstrip()
        if text:
            self._strip = False
            pieces.append(Piece(part, text))

    def _in_start(self, final: bool, pieces: list[Piece]) -> None:
        assert self._dialect.reasoning is not None
        mark = self._dialect.reasoning[0]
        begin = self._text.lstrip()
        if begin.startswith(mark):
            self._text, self._strip, self._at = begin[len(mark) :], True, self._in_reasoning
        elif final or not mark.startswith(begin):
            self._at = self._in_content

    def _in_reasoning(self, final: bool, pieces: list[Piece]) -> None:
        assert self._dialect.reasoning is not None
        before, mark, after = self._text.partition(self._dialect.reasoning[1])
        if mark:
            self._say("reasoning", before.rstrip(), pieces)
            self._text, self._strip, self._at = after, True, self._in_content
        else:
            self._keep(self._dialect.reasoning[1], "reasoning", final, pieces)

    def _in_content(self, final: bool, pieces: list[Piece]) -> None:
        if not self._tools:
            self._say("content", self._text, pieces)
            self._text = ""
            return
        before, mark, after = self._text.partition(self._dialect.calls.open)
        if mark:
            self._say("content", before.rstrip(), pieces)
            self._text, self._at = after, self._in_block
        else:
            self._keep(self._dialect.calls.open, "content", final, pieces)

    def _keep(self, mark: str, part: Literal["reasoning", "content"], final: bool, pieces: list[Piece]) -> None:
        """Says all but what may become the mark, or the white space before it."""
        safe = len(self._text)
        if not final:
            begun = (n for n in range(min(len(mark) - 1, safe), 0, -1) if self._text.endswith(mark[:n]))
            safe -= next(begun, 0)
            safe = len(self._text[:safe].rstrip())
        self._say(part, self._text[:safe], pieces)
        self._text = self._text[safe:]

    def _in_block(self, final: bool, pieces: list[Piece]) -> None:
        """After the mark that opens a call, before its name is known."""
        calls = self._dialect.calls
        head = calls.head.match(self._text)
        if head and head[1] in self._tools:
            self._start_call(head[1], pieces)
            self._text = self._text[head.end() :]
            if isinstance(calls, JsonCalls):
                self._arguments, self._at = _ObjectEnd(), self._in_json
            else:
                self._parameters, self._at = 0, self._in_parameters
            return
        block, mark, after = self._text.partition(calls.close)
        if mark or final:
            self._whole_block(block, mark, pieces)
            self._text, self._at = after, self._in_content

    def _whole_block(self, block: str, mark: str, pieces: list[Piece]) -> None:
        """A block that did not begin as expected: a call whose fields come in another order, or text."""
        calls = self._dialect.calls
        found = calls.read(block) if isinstance(calls, JsonCalls) else None
        if found is not None and found[0] in self._tools:
            self._start_call(found[0], pieces)
            pieces.append(Piece("call", found[1], self.calls - 1))
        else:
            self._say("content", calls.open + block + mark, pieces)

    def _start_call(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(Piece("call", "", self.calls, name))
        self.calls += 1
        self._name, self._strip = name, True

    def _in_json(self, final: bool, pieces: list[Piece]) -> None:
        end = self._arguments.find(self._text)
        pieces.append(Piece("call", self._text[:end], self.calls - 1))
        if self._arguments.found:
            self._at = self._in_tail
        elif final:
            self._at = self._in_content
        self._text = self._text[end:]

    def _in_tail(self, final: bool, pieces: list[Piece]) -> None:
        """Between the end of a call's arguments and the mark that closes it, where nothing of meaning stands."""
        calls = self._dialect.calls
        rest, mark, after = self._text.partition(calls.close)
        if mark or final:
            if rest.strip() not in calls.tails:
                self._say("content", rest, pieces)
            self._text, self._strip, self._at = after, True, self._in_content

    def _in_parameters(self, final: bool, pieces: list[Piece]) -> None:
        calls = self._dialect.calls
        assert isinstance(calls, TaggedCalls)
        if found := calls.parameter.match(self._text):
            value = _typed(found[2], self._tools[self._name].get("properties", {}).get(found[1]))
            before = ", " if self._parameters else "{"
            self._parameters += 1
            pieces.append(Piece("call", f"{before}{json.dumps(found[1])}: {value}", self.calls - 1))
            self._text = self._text[found.end() :]
        elif (tail := calls.tail.match(self._text)) or final:
            pieces.append(Piece("call", "}" if self._parameters else "{}", self.calls - 1))
            self._text = self._text[tail.end() :] if tail else self._text
            self._at = self._after_tagged

    def _after_tagged(self, final: bool, pieces: list[Piece]) -> None:
        """Another call in the same block, or the end of it."""
        calls = self._dialect.calls
        head = calls.head.match(self._text)
        if head and head[1] in self._tools:
            self._at = self._in_block
        elif calls.close in self._text or final:
            self._at = self._in_tail


class _ObjectEnd:
    """Finds where a JSON object ends in text that comes in parts."""

    def __init__(self) -> None:
        self.found = False
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.found = True
                    return at + 1
        return len(text)


def _typed(text: str, schema: Any) -> str:
    """JSON of a parameter written as plain text: by its schema a string, else what it reads as."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
