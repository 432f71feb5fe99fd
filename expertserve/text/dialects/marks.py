"""The marks of a dialect in one vocabulary.

Owns how a mark stands in the text that a parser gets and in the grammar that forces one. The invariant: a mark that
is a special token is one only where that token stands; the same letters from other tokens are text, in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import regex

from expertserve.text.grammar import JSON_OPTIONS
from expertserve.text.stream import MARK

# Any text, as a terminal of llguidance's Lark.
TEXT = "/(?s:.*)/"


class Marks:
    """Args:
    spellings: all marks of the dialect.
    special_id: id of the special token with a spelling, or None.
    """

    def __init__(self, spellings: Iterable[str], special_id: Callable[[str], int | None]) -> None:
        self._spellings = frozenset(spellings)
        found = {mark: special_id(mark) for mark in self._spellings}
        self._ids = {mark: id for mark, id in found.items() if id is not None}
        self.tokens: Mapping[int, str] = {id: mark for mark, id in self._ids.items()}
        self._any, self._cut = _one_of(self._spellings), _one_of(self._ids)

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def text(self, written: str) -> str:
        """What a model writes, as a parser gets it."""
        return "".join(MARK + part if part in self._ids else part for part in self._parts(written))

    def pattern(self, source: str) -> regex.Pattern[str]:
        """A regular expression in whose source marks are written as they are."""
        parts = (re.escape(self.text(part)) if part in self._spellings else part for part in self._any.split(source))
        return regex.compile("".join(parts))

    def lark(self, written: str) -> str:
        """Terminals of exactly that."""
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)
                        for part in self._parts(written))  # fmt: skip

    def until(self, rule: str, end: str, text: str = TEXT) -> tuple[str, str]:
        """Lark of a text and the `end` that is the first after it: an expression, and the rule it needs."""
        first, *others = self._parts(end)
        if first in self._ids:
            return f"{rule} {self.lark(end)}", f"{rule}: {text}\n"
        rest = " ".join(map(self.lark, others))
        return f"{rule} {rest}".rstrip(), f"{rule}[suffix={json.dumps(first)}]: {text}\n"

    def _parts(self, written: str) -> list[str]:
        return [part for part in self._cut.split(written) if part]


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def json_rule(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """Lark of the JSON of a schema, which may refer to definitions of the schema `root` around it."""
    whole = dict(schema) if isinstance(schema, Mapping) else {}
    for name in ("$defs", "definitions"):
        if root and name in root:
            whole.setdefault(name, root[name])
    return f"%json {json.dumps({**whole, 'x-guidance': JSON_OPTIONS})}"


def separated(parts: list[tuple[str, bool]], separator: str) -> str:
    """Lark of rules in their order, those that are not required left out at will, a terminal between any two."""

    def rest(start: int) -> str:
        return " ".join(f"({separator} {rule}){'' if required else '?'}" for rule, required in parts[start:])

    choices = []
    for number, (rule, required) in enumerate(parts):
        choices.append(f"{rule} {rest(number + 1)}".rstrip())
        if required:
            return f"({' | '.join(choices)})"
    return f"({' | '.join(choices)})?" if choices else '""'


def text_of(schema: Any) -> str:
    """A terminal of Lark for a string without quotes, as long as its schema admits."""
    bounds = schema if isinstance(schema, Mapping) else {}
    least, most = bounds.get("minLength"), bounds.get("maxLength")
    if not isinstance(most, int):
        return TEXT
    return f"/(?s:.{{{least if isinstance(least, int) else 0},{most}}})/"


def enum_of(schema: Any) -> list[str] | None:
    """The strings of an enumeration of strings."""
    values = schema.get("enum", [schema.get("const")]) if isinstance(schema, Mapping) else None
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        return None
    return values
