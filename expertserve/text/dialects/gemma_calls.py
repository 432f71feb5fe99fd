"""Calls of Gemma 4: a notation of its own, like JSON with keys that have no quotes and strings between tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from expertserve.text.dialects.arguments import ListedValues
from expertserve.text.dialects.marks import TEXT, Marks, enum_of, json_rule, separated, text_of
from expertserve.text.dialects.section_parser import Notation
from expertserve.text.stream import MARK

_QUOTE = '<|"|>'
_WORD = json_rule({"type": ["number", "boolean", "null"]})
_ANY_RULES = f"""any_value: any_string | any_list | any_object | any_word
any_word: {_WORD}
any_list: "[" (any_value ("," any_value)*)? "]"
any_object: "{{" (any_pair ("," any_pair)*)? "}}"
any_pair: /[A-Za-z_][A-Za-z0-9_]*/ ":" any_value
"""


class _Values(ListedValues):
    def __init__(self, schema: Mapping[str, Any], quote: str) -> None:
        super().__init__(schema, ":", (quote,), "}")
        self._quote = quote

    def value(self, text: str) -> str:
        return json.dumps(_Reader(text, self._quote).value(), ensure_ascii=False)


class _Reader:
    """Reads a value; what is not well-formed becomes what it can, and strings that have no quotes end at a comma."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def value(self, depth: int = 0) -> Any:
        self._skip()
        if self._text.startswith(self._quote, self._at):
            return self._until_quote()
        if self._text[self._at : self._at + 1] == "{" and depth < 100:
            pairs = self._items("}", depth, named=True)
            return dict(pairs)
        if self._text[self._at : self._at + 1] == "[" and depth < 100:
            return [value for _, value in self._items("]", depth, named=False)]
        word = self._word(",]}")
        try:
            return json.loads(word, parse_constant=str)
        except ValueError:
            return word

    def _items(self, close: str, depth: int, named: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        self._at += 1
        self._skip()
        while self._at < len(self._text) and self._text[self._at] != close:
            start, name = self._at, ""
            if named:
                quoted = self._text.startswith(self._quote, self._at)
                name = self._until_quote() if quoted else self._word(":" + close)
                self._skip(":")
            items.append((name, self.value(depth + 1)))
            self._skip(",")
            if self._at == start:  # no item begins with this
                self._at += 1
        self._at += 1
        return items

    def _skip(self, also: str = "") -> None:
        while self._at < len(self._text) and (self._text[self._at].isspace() or self._text[self._at] in also):
            self._at += 1

    def _until_quote(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.find(self._quote, start)
        end = len(self._text) if end < 0 else end
        self._at = end + len(self._quote)
        return self._text[start:end].replace(MARK, "")

    def _word(self, ends: str) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            self._at += 1
        return self._text[start : self._at].strip().replace(MARK, "")


class GemmaCalls:
    """As dialect.Calls."""

    spellings = ("<|tool_call>", "<tool_call|>", _QUOTE)
    section = ("", "", "")
    stop: str | None = "<tool_call|>"
    dropped: tuple[str, ...] = ()

    def notations(self, marks: Marks) -> tuple[Notation, ...]:
        quote = marks.text(_QUOTE)
        return (
            Notation(
                triggers=(marks.text("<|tool_call>"),),
                opening=marks.pattern(
                    rf"\s*<|tool_call>\s*call:(?P<name>[\w.-]+)\{{(?=\s*(?:\}}|(?:{_QUOTE})?\w[\w.-]*(?:{_QUOTE})?\s*:))"
                ),
                tail=marks.pattern(""),
                end=marks.pattern(r"\s*<tool_call|>"),
                arguments=lambda schema: _Values(schema, quote),
            ),
        )

    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        rules = _Rules(marks, schema)
        body = rules.object(schema, rule)
        head, foot = marks.lark(f"<|tool_call>call:{name}"), marks.lark("<tool_call|>")
        return f"{rule}: {head} {body} {foot}\n" + "".join(rules.found)


class _Rules:
    """Lark rules of values by their schemas."""

    def __init__(self, marks: Marks, root: Mapping[str, Any]) -> None:
        self.found: list[str] = []
        self._definitions: dict[str, str] = {}
        self._marks, self._root = marks, root
        self._quote = marks.lark(_QUOTE)

    def object(self, schema: Mapping[str, Any], rule: str) -> str:
        properties, required = schema.get("properties"), schema.get("required", [])
        if not properties:
            return self._any(rule, "object") if schema.get("additionalProperties", True) and rule[-1] == "v" else '"{}"'
        parts = []
        for number, (key, value) in enumerate(properties.items()):
            pair = f"{rule}_{number}"
            self.found.append(f"{pair}: {json.dumps(key + ':')} {self.value(value, pair + 'v')}\n")
            parts.append((pair, key in required))
        return f'"{{" {separated(parts, json.dumps(","))} "}}"'

    def value(self, schema: Any, rule: str) -> str:
        known = schema if isinstance(schema, Mapping) else {}
        if (name := known.get("$ref")) is not None:
            return self._referred(name)
        if isinstance(choices := known.get("anyOf", known.get("oneOf")), list):
            return f"({' | '.join(self.value(choice, f'{rule}{number}v') for number, choice in enumerate(choices))})"
        kind = known.get("type")
        if (choices := enum_of(known)) is not None:
            return f"{self._quote} ({' | '.join(map(self._marks.lark, choices))}) {self._quote}"
        if kind == "string":
            return self._string(text_of(known), rule)
        if kind == "object":
            return self.object(known, rule)
        if kind == "array":
            item = self.value(known.get("items"), rule + "i")
            self.found.append(f"{rule}_item: {item}\n")
            return f'"[" ({rule}_item ("," {rule}_item)*)? "]"'
        if kind in ("integer", "number", "boolean", "null") or "enum" in known:
            self.found.append(f"{rule}_json: {json_rule(known, self._root)}\n")
            return f"{rule}_json"
        return self._any(rule, "value")

    def _referred(self, name: str) -> str:
        """The rule of a definition, made when it is first asked for, since definitions may be recursive."""
        if name not in self._definitions:
            rule = self._definitions[name] = f"def{len(self._definitions)}v"
            found: Any = self._root
            for step in str(name).removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            self.found.append(f"{rule}: {self.value(found, rule + '_')}\n")
        return self._definitions[name]

    def _string(self, text: str, rule: str) -> str:
        ended, ended_rule = self._marks.until(f"{rule}_text", _QUOTE, text)
        self.found.append(ended_rule)
        return f"{self._quote} {ended}"

    def _any(self, rule: str, what: str) -> str:
        if _ANY_RULES not in self.found:
            ended, ended_rule = self._marks.until("any_text", _QUOTE, TEXT)
            self.found += [_ANY_RULES, f"any_string: {self._quote} {ended}\n", ended_rule]
        return f"any_{what}"


GEMMA = GemmaCalls()
