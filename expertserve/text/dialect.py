"""How a model family writes reasoning and calls of tools into its text.

Owns the marks, how they are told from a chat template, and the grammar that forces a call. Does not cut texts:
answer.py does. A template that names no marks gets the commonest ones, which forced calls use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANY = {"type": "object"}


def lark_string(text: str) -> str:
    """A terminal of llguidance's Lark that is exactly `text`."""
    return json.dumps(text)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`open`, a JSON object with name and arguments, `close`. Hermes, Qwen and many others."""

    open: str
    close: str
    head = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
    tails = frozenset({"}", ""})

    def read(self, block: str) -> tuple[str, str] | None:
        """Name and arguments (JSON) of a whole block; None if it is no call."""
        try:
            call = json.loads(block)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # some write the object as a string
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return None
        return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None

    def rules(self, name: str, schema: Mapping[str, Any], prefix: str) -> str:
        """Lark rules of a call of one tool; the first is named `prefix`."""
        head = lark_string(f'{self.open}\n{{"name": {json.dumps(name)}, "arguments": ')
        tail = lark_string(f"}}\n{self.close}")
        return f"{prefix}: {head} {prefix}_arguments {tail}\n{prefix}_arguments: %json {json.dumps(schema)}\n"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Parameters between tags, strings without quotes.

    Attributes:
        written: name, key, before a value, after it, and the end of a call, as a model writes them.
    """

    open: str
    close: str
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    tail: re.Pattern[str]
    written: tuple[str, str, str, str]
    tails = frozenset({""})

    def rules(self, name: str, schema: Mapping[str, Any], prefix: str) -> str:
        """As JsonCalls.rules."""
        head, before, after, tail = self.written
        required = schema.get("required", [])
        parts, rules = [lark_string(self.open + head.format(name))], []
        for number, (key, value) in enumerate(dict(schema.get("properties", {})).items()):
            rule = f"{prefix}_p{number}"
            parts.append(rule if key in required else f"{rule}?")
            begin = lark_string(before.format(key))
            if isinstance(value, Mapping) and value.get("type") == "string" and "enum" not in value:
                rules.append(f"{rule}: {begin} {rule}_v\n{rule}_v[suffix={lark_string(after)}]: /(?s:.*)/\n")
            else:
                choice = _enum(value) or f"%json {json.dumps(value)}"
                rules.append(f"{rule}: {begin} {rule}_v {lark_string(after)}\n{rule}_v: {choice}\n")
        parts.append(lark_string(tail + self.close))
        return f"{prefix}: {' '.join(parts)}\n" + "".join(rules)


def _enum(schema: Any) -> str | None:
    """Alternatives of an enumeration of strings, which these dialects write without quotes."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if not values or not all(isinstance(value, str) and value for value in values):
        return None
    return " | ".join(map(lark_string, values))


@dataclass(frozen=True, slots=True)
class Dialect:
    """Marks of one chat template.

    Attributes:
        reasoning: what opens and closes it; None for a model that does not reason apart.
        calls: how tools are called.
    """

    reasoning: tuple[str, str] | None
    calls: JsonCalls | TaggedCalls

    def forced_calls(self, tools: Mapping[str, Mapping[str, Any]], parallel: bool, otherwise: str = "") -> str:
        """Lark grammar of an answer that is a call of one of `tools`, or several.

        Args:
            tools: schemas of parameters by name.
            parallel: whether more than one call may be made.
            otherwise: JSON schema of what may be answered in place of calls.
        """
        names = [f"call{number}" for number in range(len(tools))]
        rules = [self.calls.rules(name, schema or _ANY, rule)
                 for rule, (name, schema) in zip(names, tools.items(), strict=True)]  # fmt: skip
        calls = 'call ("\\n" call)*' if parallel else "call"
        start = f"start: {calls}" + (" | otherwise" if otherwise else "")
        rules += [f"otherwise: %json {otherwise}\n"] if otherwise else []
        return "\n".join([start, f"call: {' | '.join(names)}", *rules])


THINK = ("<think>", "</think>")
HERMES = JsonCalls("<tool_call>", "</tool_call>")
QWEN_CODER = TaggedCalls(
    "<tool_call>",
    "</tool_call>",
    head=re.compile(r"\s*<function=([^>\s]+)>"),
    parameter=re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    tail=re.compile(r"\s*</function>"),
    written=("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
)
GLM = TaggedCalls(
    "<tool_call>",
    "</tool_call>",
    head=re.compile(r"\s*([^\s<{]+)\s*(?=<)"),
    parameter=re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    tail=re.compile(r"\s*(?=</tool_call>)"),
    written=("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
)
MINIMAX = TaggedCalls(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    head=re.compile(r'\s*<invoke name="([^"]+)">'),
    parameter=re.compile(r'\s*<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL),
    tail=re.compile(r"\s*</invoke>"),
    written=('\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
)


def dialect_of(template: str) -> Dialect:
    """The dialect that a chat template's source speaks."""
    calls: JsonCalls | TaggedCalls = HERMES
    for mark, found in (("<minimax:tool_call>", MINIMAX), ("<function=", QWEN_CODER), ("<arg_key>", GLM)):
        if mark in template:
            calls = found
            break
    return Dialect(THINK if THINK[1] in template else None, calls)
