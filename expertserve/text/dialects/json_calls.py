"""Calls whose arguments are a JSON object, as most models write them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertserve.text.dialects.arguments import JsonObject
from expertserve.text.dialects.marks import Marks, json_rule
from expertserve.text.dialects.section_parser import Notation

# White space before an object, where one begins.
BEGIN = r'\s*(?=\{\s*["}])'
OBJECT = rf'\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:{BEGIN}'
OBJECT_END = r'(?:\s*,\s*"\w+"\s*:\s*"[^"]*")*\s*\}'
_NAME = r"(?P<name>[\w.-]+)"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """As dialect.Calls.

    Attributes:
        triggers, opening, following, tail, end, bare, close, new_id: as in Notation, with marks as they are.
        head: what is written before the arguments, with NAME for the tool's name and # for a number.
        foot: what is written after them.
    """

    spellings: tuple[str, ...]
    triggers: tuple[str, ...]
    opening: str
    tail: str
    end: str
    section: tuple[str, str, str]
    head: str
    foot: str
    following: str | None = None
    bare: bool = False
    close: str | None = None
    new_id: Callable[[], str] | None = None
    stop: str | None = None
    dropped: tuple[str, ...] = ()

    def notations(self, marks: Marks) -> tuple[Notation, ...]:
        return (
            Notation(
                triggers=tuple(map(marks.text, self.triggers)),
                opening=marks.pattern(self.opening),
                following=None if self.following is None else marks.pattern(self.following),
                tail=marks.pattern(self.tail),
                end=marks.pattern(self.end),
                arguments=lambda schema: JsonObject(),
                bare=self.bare,
                close=None if self.close is None else marks.text(self.close),
                new_id=self.new_id,
            ),
        )

    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        before, number, after = self.head.replace("NAME", name).partition("#")
        head = [marks.lark(before), "/[0-9]{1,3}/", marks.lark(after)] if number else [marks.lark(before)]
        if self.bare:  # a brace of its own, as another answer's JSON begins with: the lexer does not go back
            head = ['"{"', marks.lark(before.removeprefix("{"))]
        foot = marks.lark(self.foot)
        return f"{rule}: {' '.join(head)} {rule}_arguments {foot}\n{rule}_arguments: {json_rule(schema)}\n"


def _nine_letters() -> str:
    """An id as Mistral's templates want them."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _objects(open: str, close: str, new_id: Callable[[], str] | None = None) -> JsonCalls:
    """A list of objects with name and arguments, after a mark and perhaps before another."""
    return JsonCalls(
        spellings=(open, close) if close else (open,),
        triggers=(open,),
        opening=rf"\s*{open}\s*\[\s*{OBJECT}",
        following=rf"\s*,\s*{OBJECT}",
        tail=OBJECT_END,
        end=rf"\s*\]\s*{close}" if close else r"\s*\]",
        section=(f"{open}[", ", ", f"]{close}"),
        head='{"name": "NAME", "arguments": ',
        foot="}",
        close=close,
        new_id=new_id,
    )


HERMES = JsonCalls(
    spellings=("<tool_call>", "</tool_call>"),
    triggers=("<tool_call>",),
    opening=rf"\s*<tool_call>\s*{OBJECT}",
    tail=OBJECT_END,
    end=r"\s*</tool_call>",
    section=("", "\n", ""),
    head='<tool_call>\n{"name": "NAME", "arguments": ',
    foot="}\n</tool_call>",
    close="</tool_call>",
    stop="</tool_call>",
)
MISTRAL = _objects("[TOOL_CALLS]", "", _nine_letters)
MISTRAL_V11 = JsonCalls(
    spellings=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    triggers=("[TOOL_CALLS]",),
    opening=rf"\s*[TOOL_CALLS]\s*{_NAME}\s*(?:[CALL_ID]\s*(?P<id>\w+)\s*)?[ARGS]{BEGIN}",
    tail="",
    end="",
    section=("", "", ""),
    head="[TOOL_CALLS]NAME[ARGS]",
    foot="",
    new_id=_nine_letters,
)
GRANITE = _objects("<|tool_call|>", "")
PHI = _objects("<|tool_call|>", "<|/tool_call|>")
HUNYUAN = _objects("<tool_calls>", "</tool_calls>")
_COHERE_CALL = (
    r'\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"tool_name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"parameters"\s*:' + BEGIN
)
COHERE = JsonCalls(
    spellings=("<|START_ACTION|>", "<|END_ACTION|>"),
    triggers=("<|START_ACTION|>",),
    opening=rf"\s*<|START_ACTION|>\s*\[\s*{_COHERE_CALL}",
    following=rf"\s*,\s*{_COHERE_CALL}",
    tail=OBJECT_END,
    end=r"\s*\]\s*<|END_ACTION|>",
    section=("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    head='{"tool_call_id": "#", "tool_name": "NAME", "parameters": ',
    foot="}",
    close="<|END_ACTION|>",
)
LFM_JSON = _objects("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA = JsonCalls(
    spellings=("<|python_start|>", "<|python_end|>"),
    triggers=("<|python_start|>", "<|python_end|>"),
    opening=rf"\s*(?:<|python_start|>\s*)?(?:<|python_end|>\s*)?{OBJECT}",
    following=rf"\s*[;,]?\s*{OBJECT}",
    tail=OBJECT_END,
    end="",
    section=("", "", ""),
    head='{"name": "NAME", "parameters": ',
    foot="}",
    bare=True,
    dropped=("<|python_end|>",),
)

_DEEPSEEK_MARKS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)


def _deepseek(head: str, foot: str) -> JsonCalls:
    """Reads what any version writes; writes as one does."""
    calls, calls_end, call, call_end, sep = _DEEPSEEK_MARKS
    fields = rf"{call}\s*(?:function\s*{sep}\s*)?{_NAME}\s*(?:{sep}|```(?:json)?){BEGIN}"
    return JsonCalls(
        spellings=_DEEPSEEK_MARKS,
        triggers=(calls, call),
        opening=rf"\s*(?:{calls}\s*)?{fields}",
        following=rf"\s*{fields}",
        tail=rf"\s*(?:```\s*)?{call_end}",
        end=rf"\s*{calls_end}",
        section=(calls, "\n" if "json" in head else "", calls_end),
        head=head,
        foot=foot,
        stop=call_end,
    )


_, _, _CALL, _CALL_END, _SEP = _DEEPSEEK_MARKS
DEEPSEEK_V3 = _deepseek(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}")
DEEPSEEK_V31 = _deepseek(f"{_CALL}NAME{_SEP}", _CALL_END)

_KIMI_ID = rf"(?P<id>(?:functions\.)?{_NAME}(?::\d+)?)"
_KIMI_CALL = rf"<|tool_call_begin|>\s*{_KIMI_ID}\s*<|tool_call_argument_begin|>{BEGIN}"
KIMI = JsonCalls(
    spellings=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    triggers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    opening=rf"\s*(?:<|tool_calls_section_begin|>\s*)?{_KIMI_CALL}",
    following=rf"\s*{_KIMI_CALL}",
    tail=r"\s*<|tool_call_end|>",
    end=r"\s*<|tool_calls_section_end|>",
    section=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    head="<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>",
    foot="<|tool_call_end|>",
    stop="<|tool_call_end|>",
)
