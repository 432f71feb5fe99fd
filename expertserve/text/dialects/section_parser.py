"""Cutting answers whose calls are in sections that marks open, or that begin the answer.

Owns the states: before the reasoning, in it, in the content, in a call, after one. What a section looks like is the
notations' part. White space before a mark waits until it is known what the mark is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex

from expertserve.text.answer import AnswerParser, Part, Piece, Schemas, safe_length
from expertserve.text.dialects.arguments import ArgumentsReader

# What begins at a mark: a call, which has been taken; text; or what more of the text will tell.
Verdict = Literal["call", "text", "wait"]


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls stand in a text. Texts and patterns are as a parser gets them.

    Attributes:
        triggers: what content is searched for.
        opening: white space, a trigger and all up to the arguments of the first call; groups `name` and perhaps `id`.
        tail: from the arguments to the end of a call.
        end: from a call to the end of its section.
        arguments: makes the reader of one call's arguments by its schema.
        following: as `opening`, of a further call in the same section.
        bare: `opening` may also begin the answer, or follow a call, without a trigger.
        close: what ends a section of calls in JSON, whose fields may then come in any order; "" is the text's end.
        new_id: makes the id of a call that has none of its own.
    """

    triggers: tuple[str, ...]
    opening: regex.Pattern[str]
    tail: regex.Pattern[str]
    end: regex.Pattern[str]
    arguments: Callable[[Mapping[str, Any]], ArgumentsReader]
    following: regex.Pattern[str] | None = None
    bare: bool = False
    close: str | None = None
    new_id: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """What is around the parts of an answer, as a parser gets it.

    Attributes:
        reasoning: what opens and closes it; None for a model that does not reason apart.
        content: what may stand around the rest.
        dropped: marks without a meaning of their own in the content.
    """

    reasoning: tuple[str, str] | None
    content: tuple[str, str] | None = None
    dropped: tuple[str, ...] = ()


class SectionParser(AnswerParser):
    """As AnswerParser.

    Args:
        opened: the prompt has opened the reasoning already.
    """

    def __init__(
        self, frame: Frame, notations: tuple[Notation, ...], tools: Schemas, *, opened: bool, parallel: bool
    ) -> None:
        super().__init__(tools, parallel)
        self._frame = frame
        self._notations = notations if tools else ()
        self._dropped = frame.dropped
        self._triggers = tuple(trigger for notation in self._notations for trigger in notation.triggers)
        self._fresh = True  # nothing stands before this in the content, or only a call
        self._notation: Notation
        self._arguments: ArgumentsReader
        self._at = self._in_start if frame.reasoning else self._before_content
        if frame.reasoning and opened:
            self._strip, self._at = True, self._in_opened

    def _in_opened(self, final: bool, pieces: list[Piece]) -> None:
        """Where the prompt has opened the reasoning; some models open it again."""
        assert self._frame.reasoning is not None
        opens = self._frame.reasoning[0]
        if self._passes(opens) or final or not opens.startswith(self._text.lstrip()):
            self._at = self._in_reasoning

    def _in_start(self, final: bool, pieces: list[Piece]) -> None:
        assert self._frame.reasoning is not None
        if self._passes(self._frame.reasoning[0]):
            self._strip, self._at = True, self._in_reasoning
        elif final or not self._frame.reasoning[0].startswith(self._text.lstrip()):
            self._at = self._before_content

    @property
    def _reasons(self) -> bool:
        return self._at in (self._in_opened, self._in_reasoning)

    def _in_reasoning(self, final: bool, pieces: list[Piece]) -> None:
        assert self._frame.reasoning is not None
        close = self._frame.reasoning[1]
        before, mark, after = self._text.partition(close)
        if mark:
            self._say("reasoning", before.rstrip(), pieces)
            self._text, self._strip, self._at = after, True, self._before_content
        else:
            self._say_safe("reasoning", (close,), final, pieces)

    def _before_content(self, final: bool, pieces: list[Piece]) -> None:
        opens = self._frame.content[0] if self._frame.content else None
        if opens is None or self._passes(opens):
            if opens is not None:
                self._strip = True
                assert self._frame.content is not None
                self._dropped += (self._frame.content[1],)
            self._at = self._in_content
        elif final or not opens.startswith(self._text.lstrip()):
            self._at = self._in_content

    def _passes(self, mark: str) -> bool:
        """Takes the mark off the beginning of the text if it is there."""
        begin = self._text.lstrip()
        if begin.startswith(mark):
            self._text = begin[len(mark) :]
            return True
        return False

    def _in_content(self, final: bool, pieces: list[Piece]) -> None:
        if self._fresh and any(notation.bare for notation in self._notations):
            verdict = self._open(final, pieces, [notation for notation in self._notations if notation.bare])
            if verdict != "text":
                return
        found = [(at, -len(mark), mark) for mark in self._triggers + self._dropped
                 if (at := self._text.find(mark)) >= 0]  # fmt: skip
        if not found:
            self._say_safe("content", self._triggers + self._dropped, final, pieces)
            return
        at, _, mark = min(found)
        before = self._text[:at].rstrip()
        self._say_content(before, pieces)
        self._text = self._text[len(before) :]
        if mark in self._dropped:
            self._text, self._strip = self._text.lstrip()[len(mark) :], True
            return
        spaces = at - len(before)
        if self._open(final, pieces, [notation for notation in self._notations if mark in notation.triggers]) == "text":
            self._say_content(self._text[: spaces + len(mark)], pieces)
            self._text = self._text[spaces + len(mark) :]

    def _open(self, final: bool, pieces: list[Piece], notations: list[Notation]) -> Verdict:
        """Begins a call at the beginning of the text, if there is one."""
        matches = [(notation, notation.opening.match(self._text, partial=not final)) for notation in notations]
        for notation, match in matches:
            if match and not match.partial and match["name"] in self._tools:
                self._begin(notation, match, pieces)
                return "call"
        if any(match and match.partial for _, match in matches):
            return "wait"
        verdicts = (self._whole(notation, final, pieces) for notation in notations if notation.close is not None)
        return next((verdict for verdict in verdicts if verdict != "text"), "text")

    def _whole(self, notation: Notation, final: bool, pieces: list[Piece]) -> Verdict:
        """As `_open`, of calls in JSON whose fields are in an order of their own: they are read when they are whole."""
        trigger = next((mark for mark in notation.triggers if self._text.lstrip().startswith(mark)), None)
        if trigger is None or notation.close is None:
            return "text"
        block = self._text.lstrip()[len(trigger) :]
        if not block.lstrip().startswith(("{", "[")):
            return "text"
        block, close, after = block.partition(notation.close) if notation.close else (block, "", "")
        if not close and not final:
            return "wait"
        calls = whole_calls(block)
        if not calls or not all(name in self._tools for name, _ in calls):
            return "text"
        for name, arguments in calls:
            self._start_call(name, notation.new_id() if notation.new_id else None, pieces)
            self._more_arguments(arguments, pieces)
        self._text, self._fresh = after, True
        return "call"

    def _begin(self, notation: Notation, match: regex.Match[str], pieces: list[Piece]) -> None:
        id = match["id"] if "id" in notation.opening.groupindex else None
        self._start_call(match["name"], id or (notation.new_id() if notation.new_id else None), pieces)
        self._notation, self._arguments = notation, notation.arguments(self._tools[match["name"]])
        self._text, self._at = self._text[match.end() :], self._in_arguments

    def _in_arguments(self, final: bool, pieces: list[Piece]) -> None:
        read = self._arguments.read(self._text, final)
        self._more_arguments(read.json, pieces)
        self._text = self._text[read.length :]
        if read.done:
            self._at = self._in_tail

    def _in_tail(self, final: bool, pieces: list[Piece]) -> None:
        self._pass(self._notation.tail, final, self._after_call)

    def _after_call(self, final: bool, pieces: list[Piece]) -> None:
        following = self._notation.following
        match = following.match(self._text, partial=not final) if following else None
        if match and not match.partial and match["name"] in self._tools:
            self._begin(self._notation, match, pieces)
        elif not (match and match.partial):
            self._pass(self._notation.end, final, self._in_content)

    def _pass(self, pattern: regex.Pattern[str], final: bool, then: Callable[[bool, list[Piece]], None]) -> None:
        """Leaves out what the pattern matches, or may still match; without it what follows is content."""
        match = pattern.match(self._text, partial=True)
        if match and match.partial and not final:
            return
        self._fresh = True
        self._at = then if match else self._in_content
        self._text = self._text[match.end() :] if match else self._text

    def _say_safe(self, part: Part, marks: tuple[str, ...], final: bool, pieces: list[Piece]) -> None:
        safe = len(self._text) if final or not marks else safe_length(self._text, marks)
        if part == "reasoning":
            self._say("reasoning", self._text[:safe], pieces)
        else:
            self._say_content(self._text[:safe], pieces)
        self._text = self._text[safe:]

    def _say_content(self, text: str, pieces: list[Piece]) -> None:
        self._fresh = self._fresh and not text.strip()
        self._say("content", text, pieces)


def whole_calls(block: str) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON) of a call or a list of calls in JSON; None if it is none."""
    try:
        value = json.loads(block)
        calls = [_whole_call(call) for call in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return None
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


def _whole_call(call: Any) -> tuple[str, str] | None:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(name := call.get("name", call.get("tool_name")), str):
        return None
    arguments = call.get("arguments", call.get("parameters")) or {}
    if isinstance(arguments, str):  # some write the object as a string
        arguments = json.loads(arguments)
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
