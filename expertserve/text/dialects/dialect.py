"""How a model family writes reasoning and calls of tools into its text.

Owns what the server asks of a dialect, and the dialects whose calls are in sections. Which dialect a template speaks
is text/dialect.py's part; how the calls of each are written is that of the modules beside this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from expertserve.text.answer import AnswerParser, Schemas
from expertserve.text.dialects.marks import Marks
from expertserve.text.dialects.section_parser import Frame, Notation, SectionParser

_ANY = {"type": "object"}
_SPACE = r"/[ \n]{1,3}/?"


class Dialect(ABC):
    """A way of writing, bound to the vocabulary of a model.

    Attributes:
        marks: its marks in that vocabulary.
        stop: what ends a call, to stop there where one call only is wanted; None where nothing tells.
        efforts: the reasoning efforts that the template knows; none for all or a template that has none.
    """

    marks: Marks
    stop: str | None = None
    efforts: tuple[str, ...] = ()

    @abstractmethod
    def opened(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within the reasoning."""

    @abstractmethod
    def parser(self, tools: Schemas, *, opened: bool, reasoning: bool = True, parallel: bool = True) -> AnswerParser:
        """A parser of one answer; without `reasoning` that stays in the content as it is written."""

    @abstractmethod
    def forced_calls(self, tools: Schemas, *, opened: bool, parallel: bool, otherwise: bool = False) -> str:
        """Lark grammar of an answer that is a call of one of `tools`, or several, after the reasoning if there is any.

        Args:
            tools: schemas of parameters by name.
            parallel: whether more than one call may be made.
            otherwise: whether `@structure` may be answered in place of calls.
        """

    @abstractmethod
    def structured(self, opened: bool) -> str | None:
        """Lark grammar of `@structure` after the reasoning; None where nothing comes before it."""


class Calls(Protocol):
    """How calls are written.

    Attributes:
        spellings: the marks.
        section: what is written before, between and after the calls of one section.
        stop: as Dialect.stop.
    """

    @property
    def spellings(self) -> tuple[str, ...]: ...
    @property
    def section(self) -> tuple[str, str, str]: ...
    @property
    def stop(self) -> str | None: ...
    @property
    def dropped(self) -> tuple[str, ...]: ...
    def notations(self, marks: Marks) -> tuple[Notation, ...]: ...
    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        """Lark rules of a call of one tool; the first is named `rule`."""
        ...


@dataclass(frozen=True, slots=True)
class Either:
    """Calls that models write in two ways: one is written where a call is forced, both are read."""

    written: Calls
    other: Calls

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.written.spellings + self.other.spellings

    @property
    def section(self) -> tuple[str, str, str]:
        return self.written.section

    @property
    def stop(self) -> str | None:
        return self.written.stop

    @property
    def dropped(self) -> tuple[str, ...]:
        return self.written.dropped

    def notations(self, marks: Marks) -> tuple[Notation, ...]:
        return self.written.notations(marks) + self.other.notations(marks)

    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        return self.written.rules(marks, name, schema, rule)


@dataclass(frozen=True, slots=True)
class Around:
    """What a model writes around its reasoning and around the rest; `spellings` are the marks in that."""

    reasoning: tuple[str, str] | None = None
    content: tuple[str, str] | None = None
    spellings: tuple[str, ...] = ()


class SectionDialect(Dialect):
    """Reasoning between marks first, then content with sections of calls in it."""

    def __init__(self, around: Around, calls: Calls, marks: Marks) -> None:
        self.around, self.calls, self.marks = around, calls, marks
        self.stop = None if calls.stop is None else marks.text(calls.stop)
        self._notations = calls.notations(marks)

    def opened(self, prompt: str) -> bool:
        reasoning = self.around.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning[0].rstrip())

    def parser(self, tools: Schemas, *, opened: bool, reasoning: bool = True, parallel: bool = True) -> AnswerParser:
        frame = Frame(
            self._pair(self.around.reasoning) if reasoning else None,
            self._pair(self.around.content) if reasoning else None,
            tuple(map(self.marks.text, self.calls.dropped)) if tools else (),
        )
        return SectionParser(frame, self._notations, tools, opened=opened, parallel=parallel)

    def _pair(self, pair: tuple[str, str] | None) -> tuple[str, str] | None:
        return None if pair is None else (self.marks.text(pair[0]), self.marks.text(pair[1]))

    def forced_calls(self, tools: Schemas, *, opened: bool, parallel: bool, otherwise: bool = False) -> str:
        names = [f"call{number}" for number in range(len(tools))]
        rules = [self.calls.rules(self.marks, name, schema or _ANY, rule)
                 for rule, (name, schema) in zip(names, tools.items(), strict=True)]  # fmt: skip
        before, between, after = map(self.marks.lark, self.calls.section)
        calls = f"{before} call ({between} call)* {after}" if parallel else f"{before} call {after}"
        body = f"({calls} | @structure)" if otherwise else calls
        return self._after_reasoning(opened, body) + f"call: {' | '.join(names)}\n" + "".join(rules)

    def structured(self, opened: bool) -> str | None:
        return self._after_reasoning(opened, "@structure") if self._may_reason(opened) else None

    def _may_reason(self, opened: bool) -> bool:
        """Whether reasoning may come before what a grammar asks for: the mark that opens it must not be like text."""
        reasoning = self.around.reasoning
        return reasoning is not None and (opened or self.marks.is_token(reasoning[0].removesuffix("thought\n")))

    def _after_reasoning(self, opened: bool, body: str) -> str:
        if self.around.reasoning is None or not self._may_reason(opened):
            return f"start: {body}\n"
        begin, end = self.around.reasoning
        thought, rule = self.marks.until("thought", end)
        if opened:
            return f"start: {thought} {_SPACE} {body}\n{rule}"
        return f"start: ({self.marks.lark(begin)} {thought} {_SPACE})? {body}\n{rule}"
