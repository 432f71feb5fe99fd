"""Arguments of a call as a model writes them, turned into JSON as they come.

Owns the ways of writing them that many dialects share: a JSON object, and named values one after the other, which are
between tags, or set apart by commas. A reader is for one call. What it has returned is never taken back: it is JSON up
to there, as far as what the model wrote is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import regex

from expertserve.text.answer import safe_length
from expertserve.text.stream import MARK


@dataclass(frozen=True, slots=True)
class Read:
    """What a reader made of some text: JSON, how much of the text it took, and whether the arguments are over."""

    json: str
    length: int
    done: bool = False


class ArgumentsReader(Protocol):
    def read(self, text: str, final: bool) -> Read:
        """Takes from the beginning of `text`, which has what the last call left and more; `final`: it is all."""
        ...


class JsonObject:
    """A JSON object, passed on as written. Line ends within strings, which models write, become escapes."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str, final: bool) -> Read:
        out: list[str] = []
        for at, char in enumerate(text):
            out.append(self._next(char))
            if self._depth == 0 and not char.isspace():
                return Read("".join(out), at + 1, True)
        return Read("".join(out), len(text), final)

    def _next(self, char: str) -> str:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
            elif char < " ":
                return json.dumps(char)[1:-1]
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return "" if char == MARK else char


class _NamedValues:
    """Values with names become one object."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._count = 0

    def _named(self, name: str) -> str:
        before = ", " if self._count else "{"
        self._count += 1
        return f"{before}{json.dumps(name, ensure_ascii=False)}: "

    def _end(self) -> str:
        return "}" if self._count else "{}"

    def _kinds(self, name: str) -> frozenset[str]:
        return kinds_of(self._properties.get(name))


class TaggedValues(_NamedValues):
    """Values between tags, without quotes. A string is passed on as it comes.

    Args:
        begin: what stands before a value, with its name as first group.
        end: what ends a value.
        close: what ends the call: there the arguments are whole, also where the text ends.
    """

    def __init__(
        self, schema: Mapping[str, Any], begin: regex.Pattern[str], end: tuple[str, str], close: tuple[str, ...]
    ) -> None:
        super().__init__(schema)
        self._begin = begin
        self._line, self._end_tag = end
        self._close = close
        self._name: str | None = None
        self._streams = False

    def read(self, text: str, final: bool) -> Read:
        out, at = "", 0
        while True:
            if self._name is None:
                begin = self._begin.match(text, at, partial=not final)
                if begin is None:
                    rest = text[at:].strip()
                    whole = not final or any(mark.startswith(rest) or rest.startswith(mark) for mark in self._close)
                    return Read(out + self._end() * whole, at, True)
                if begin.partial:
                    return Read(out, at)
                self._name, at = begin[1], begin.end()
                out += self._named(self._name)
                self._streams = self._kinds(self._name) == {"string"}
                out += '"' * self._streams
            value, length, over = self._value(text[at:], final)
            if self._streams:
                out, at = out + _quoted(value)[1:-1], at + length
            elif over or final:
                out, at = out + typed(value, self._kinds(self._name)), at + length
            if not over:
                return Read(out, at, final)
            out += '"' * self._streams
            self._name = None

    def _value(self, text: str, final: bool) -> tuple[str, int, bool]:
        """More of a value, how much text that was, and whether it is over."""
        before, tag, _ = text.partition(self._end_tag)
        if tag:
            return before.removesuffix(self._line), len(before) + len(tag), True
        safe = len(text) if final else safe_length(text, (self._end_tag,))
        return text[:safe], safe, False


class ListedValues(_NamedValues):
    """Values after their names, with commas between them.

    Args:
        assign: what stands between a name and its value.
        quotes: what begins and ends a string; in one of a single character a backslash keeps the next one.
        close: the character that ends the call.
    """

    def __init__(self, schema: Mapping[str, Any], assign: str, quotes: tuple[str, ...], close: str) -> None:
        super().__init__(schema)
        quote = "|".join(map(re.escape, quotes))
        self._name_and = re.compile(rf"\s*(?:{quote})?(\w[\w.-]*)(?:{quote})?\s*{assign}\s*")
        self._quotes = quotes
        self._close = close
        self._seen = self._depth = 0  # what was looked at of the text that is left, and the brackets open there
        self._within: str | None = None

    def read(self, text: str, final: bool) -> Read:
        out, start = "", 0
        while (end := self._find_end(text, start, final)) is not None:
            argument = text[start:end]
            begin = self._name_and.match(argument)
            if begin:
                out += self._named(begin[1]) + self.value(argument[begin.end() :].strip())
            elif argument.strip():  # no argument at all: it is left to be shown
                return Read(out + self._end(), start, True)
            start = end + 1
            if text[end] == self._close:
                return Read(out + self._end(), start, True)
        if final:
            return Read(out + self._cut_off(text[start:]), len(text), True)
        self._seen -= start
        return Read(out, start)

    def _find_end(self, text: str, start: int, final: bool) -> int | None:
        """Where the argument ends that begins at `start`: at a comma or at what closes all of them."""
        at = max(self._seen, start)
        # A quote or an escape may be cut in two, so its beginning waits for the rest.
        last = len(text) if final else len(text) - max(map(len, self._quotes)) + 1
        while at < last:
            quote = next((quote for quote in self._quotes if text.startswith(quote, at)), None)
            char = text[at]
            if self._within is not None:
                if char == "\\" and len(self._within) == 1:
                    at += 1
                elif quote == self._within:
                    self._within = None
                    at += len(quote) - 1
            elif quote is not None:
                self._within = quote
                at += len(quote) - 1
            elif self._depth == 0 and char in ("," + self._close):
                self._seen = at + 1
                return at
            else:
                self._depth += (char in "([{") - (char in ")]}")
            at += 1
        self._seen = at
        return None

    def _cut_off(self, rest: str) -> str:
        """What there is of an argument that has no end, as JSON that has none either."""
        begin = self._name_and.match(rest)
        if begin is None:
            return (", " if self._count else "{") + _quoted(rest.strip())[:-1] if rest.strip() else ""
        value = rest[begin.end() :]
        for quote in self._quotes:
            value = value.removeprefix(quote)
        return self._named(begin[1]) + _quoted(value)[:-1]

    def value(self, text: str) -> str:
        """JSON of a value."""
        try:
            return _quoted(_value(text))
        except ValueError:
            return _quoted(text)


def _quoted(value: Any) -> str:
    return json.dumps(value.replace(MARK, "") if isinstance(value, str) else value, ensure_ascii=False)


_JSON_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def kinds_of(schema: Any) -> frozenset[str]:
    """Types that a JSON schema admits, as far as it says so plainly; none for one that does not."""
    return frozenset(_kinds_of(schema))


def _kinds_of(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    if named is not None:
        yield from [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
        return
    for value in schema.get("enum", []) if isinstance(schema.get("enum"), list) else []:
        yield _JSON_KINDS.get(type(value), "null")
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key, []) if isinstance(schema.get(key), list) else []:
            yield from _kinds_of(choice)


def typed(text: str, kinds: frozenset[str]) -> str:
    """JSON of a value written as plain text: what it reads as, where its schema admits that, else a string."""
    try:
        value = _json_value(text) if not kinds or "string" in kinds else _value(text)
    except ValueError:
        return _quoted(text)
    kind = _JSON_KINDS.get(type(value), "null")
    admitted = "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return _quoted(value if admitted else text)


def _json_value(text: str) -> Any:
    """Raises ValueError for what is no JSON."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError(text) from error
    return value


def _value(text: str) -> Any:
    """Of JSON or a literal of Python. Raises ValueError for what is neither."""
    try:
        return _json_value(text)
    except ValueError:
        pass
    stripped = text.strip()
    for literal in (stripped, stripped.replace("\n", "\\n")):  # templates leave line ends in strings as they are
        try:
            value = ast.literal_eval(literal)
            json.dumps(value, allow_nan=False)
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            continue
        return value
    raise ValueError(text)
