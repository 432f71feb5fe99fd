"""Calls whose arguments are between tags, strings without quotes: Qwen3-Coder, GLM, MiniMax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertserve.text.dialects.arguments import TaggedValues, kinds_of
from expertserve.text.dialects.marks import Marks, enum_of, json_rule, text_of
from expertserve.text.dialects.section_parser import Notation


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """As dialect.Calls.

    Attributes:
        triggers, opening, following, tail, end: as in Notation, with marks as they are.
        begin: before a value, with its name as a group; a pattern.
        line, end_tag: the line end that may stand after a value, and the tag that does.
        head, key, after, foot: a call's beginning, what comes before a value, after it, and a call's end, as written,
            with NAME for names.
    """

    spellings: tuple[str, ...]
    triggers: tuple[str, ...]
    opening: str
    tail: str
    end: str
    begin: str
    line: str
    end_tag: str
    section: tuple[str, str, str]
    head: str
    key: str
    after: str
    foot: str
    closing: tuple[str, ...]
    following: str | None = None
    stop: str | None = None
    dropped: tuple[str, ...] = ()

    def notations(self, marks: Marks) -> tuple[Notation, ...]:
        begin, end = marks.pattern(self.begin), (self.line, marks.text(self.end_tag))
        closing = tuple(map(marks.text, self.closing))
        return (
            Notation(
                triggers=tuple(map(marks.text, self.triggers)),
                opening=marks.pattern(self.opening),
                following=None if self.following is None else marks.pattern(self.following),
                tail=marks.pattern(self.tail),
                end=marks.pattern(self.end),
                arguments=lambda schema: TaggedValues(schema, begin, end, closing),
            ),
        )

    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        properties, required = schema.get("properties"), schema.get("required", [])
        parts, rules = [marks.lark(self.head.replace("NAME", name))], []
        for number, (key, value) in enumerate(dict(properties or {}).items()):
            value_rule = f"{rule}_p{number}"
            parts.append(value_rule if key in required else f"{value_rule}?")
            before = marks.lark(self.key.replace("NAME", key))
            if (choices := enum_of(value)) is not None:
                choice = " | ".join(map(marks.lark, choices))
                rules.append(f"{value_rule}: {before} ({choice}) {marks.lark(self.after)}\n")
            elif kinds_of(value) == {"string"}:
                text, text_rule = marks.until(f"{value_rule}_v", self.after, text_of(value))
                rules.append(f"{value_rule}: {before} {text}\n{text_rule}")
            else:
                rules.append(f"{value_rule}: {before} {value_rule}_v {marks.lark(self.after)}\n"
                             f"{value_rule}_v: {json_rule(value, schema)}\n")  # fmt: skip
        return f"{rule}: {' '.join(parts)} {marks.lark(self.foot)}\n" + "".join(rules)


QWEN_CODER = TaggedCalls(
    spellings=("<tool_call>", "</tool_call>"),
    triggers=("<tool_call>", "<function="),  # the model sometimes leaves the first out
    opening=r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
    following=r"\s*<function=(?P<name>[^>\s]+)>",
    tail=r"\s*</function>",
    end=r"\s*</tool_call>",
    begin=r"\s*<parameter=([^>\s]+)>(?:\n|(?!\n)(?=.))",
    line="\n",
    end_tag="</parameter>",
    section=("", "\n", ""),
    head="<tool_call>\n<function=NAME>\n",
    key="<parameter=NAME>\n",
    after="\n</parameter>\n",
    foot="</function>\n</tool_call>",
    closing=("</function>", "</tool_call>"),
    stop="</tool_call>",
)
GLM = TaggedCalls(
    spellings=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    triggers=("<tool_call>",),
    opening="\\s*<tool_call>\\s*(?P<name>[^\\s<{\ufdd0]+)\\s*(?=<arg_key>|</tool_call>)",
    tail="",
    end=r"\s*</tool_call>",
    begin=r"\s*<arg_key>\s*((?:(?!</arg_key>).)*?)\s*</arg_key>\s*<arg_value>",
    line="",
    end_tag="</arg_value>",
    section=("", "\n", ""),
    head="<tool_call>NAME\n",
    key="<arg_key>NAME</arg_key>\n<arg_value>",
    after="</arg_value>\n",
    foot="</tool_call>",
    closing=("</tool_call>",),
    stop="</tool_call>",
)
MINIMAX = TaggedCalls(
    spellings=("<minimax:tool_call>", "</minimax:tool_call>"),
    triggers=("<minimax:tool_call>",),
    opening=r'\s*<minimax:tool_call>\s*<invoke name="(?P<name>[^"]+)">',
    following=r'\s*<invoke name="(?P<name>[^"]+)">',
    tail=r"\s*</invoke>",
    end=r"\s*</minimax:tool_call>",
    begin=r'\s*<parameter name="([^"]+)">',
    line="",
    end_tag="</parameter>",
    section=("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    head='<invoke name="NAME">\n',
    key='<parameter name="NAME">',
    after="</parameter>\n",
    foot="</invoke>\n",
    closing=("</invoke>", "</minimax:tool_call>"),
)
