"""The parts of an assistant's text: reasoning, content, calls of tools.

Owns what a part is, and the frame of a parser: text that grows, and states that take from its beginning what is
certain. The invariant of every parser: nothing is lost. What may still become a mark waits; what begins like a call
and is none, or calls a tool that nobody offered, stays content as it was written. Only white space around marks goes.
How marks look is for the dialects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from expertserve.text.stream import MARK

Schemas = Mapping[str, Mapping[str, Any]]
Part = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one part.

    For a call `text` is more of its arguments' JSON; its first piece has the name, and an id where the model's
    template wants one of its own kind.
    """

    part: Literal["reasoning", "content", "call"]
    text: str
    call: int = 0
    name: str | None = None
    id: str | None = None


class AnswerParser(ABC):
    """Cuts one answer.

    Args:
        tools: schema of the parameters of each tool that may be called, by name.
        parallel: whether calls after the first are given.

    Attributes:
        calls: calls that have begun.
        stop: the mark that ends generation, which is a part of the text all the same.
    """

    def __init__(self, tools: Schemas, parallel: bool) -> None:
        self.calls = 0
        self.reasoning_tokens = 0  # of those given to `push_token`
        self.stop: str | None = None
        self._tools = tools
        self._parallel = parallel
        self._text = ""
        self._strip = False  # white space may be left out here
        self._at: Callable[[bool, list[Piece]], None]

    def push(self, text: str) -> list[Piece]:
        """Takes new text and returns what is certain."""
        self._text += text
        return self._advance(False)

    def end(self, text: str, stop: str | None) -> list[Piece]:
        """Takes the last text, which the string `stop` has ended, if any has."""
        return self.push(text + (stop if stop is not None and stop == self.stop else "")) + self.flush()

    def push_token(self, text: str) -> list[Piece]:
        """As `push`, with the text of one token; counts those of the reasoning, the marks around it included."""
        reasons = self._reasons
        pieces = self.push(text) if text else []
        self.reasoning_tokens += reasons or self._reasons
        return pieces

    @property
    @abstractmethod
    def _reasons(self) -> bool:
        """Whether what comes next belongs to the reasoning."""

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
        return [piece for piece in pieces if (piece.text or piece.name) and (self._parallel or piece.call == 0)]

    def _say(self, part: Part, text: str, pieces: list[Piece]) -> None:
        text = text.replace(MARK, "")
        if self._strip:
            text = text.lstrip()
        if text:
            self._strip = False
            pieces.append(Piece(part, text))

    def _start_call(self, name: str, id: str | None, pieces: list[Piece]) -> None:
        pieces.append(Piece("call", "", self.calls, name, id))
        self.calls += 1
        self._strip = True

    def _more_arguments(self, text: str, pieces: list[Piece]) -> None:
        pieces.append(Piece("call", text, self.calls - 1))


def safe_length(text: str, marks: tuple[str, ...]) -> int:
    """How much of the text can be no part of a mark, nor of the white space before one."""
    safe = len(text)
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= at < safe:
            if mark.startswith(text[at:]):
                safe = at
            at = text.find(mark[0], at + 1)
    return len(text[:safe].rstrip())
