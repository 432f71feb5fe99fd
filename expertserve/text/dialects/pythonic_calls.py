"""Calls in the form of Python's, with named arguments: LFM2 and Llama 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertserve.text.dialects.arguments import ListedValues
from expertserve.text.dialects.marks import Marks, json_rule, separated
from expertserve.text.dialects.section_parser import Notation

_CALL = r"(?P<name>[\w.-]+)\((?=\s*(?:\)|\w[\w.-]*\s*=))"


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """As dialect.Calls.

    Attributes:
        triggers, opening, end, bare: as in Notation, with marks as they are.
    """

    spellings: tuple[str, ...]
    triggers: tuple[str, ...]
    opening: str
    end: str
    section: tuple[str, str, str]
    bare: bool = False
    stop: str | None = None
    dropped: tuple[str, ...] = ()

    def notations(self, marks: Marks) -> tuple[Notation, ...]:
        return (
            Notation(
                triggers=tuple(map(marks.text, self.triggers)),
                opening=marks.pattern(self.opening),
                following=marks.pattern(rf"\s*,\s*{_CALL}"),
                tail=marks.pattern(""),
                end=marks.pattern(self.end),
                arguments=lambda schema: ListedValues(schema, "=", ('"', "'"), ")"),
                bare=self.bare,
            ),
        )

    def rules(self, marks: Marks, name: str, schema: Mapping[str, Any], rule: str) -> str:
        properties, required = schema.get("properties"), schema.get("required", [])
        parts, rules = [], []
        for number, (key, value) in enumerate(dict(properties or {}).items()):
            parts.append((f"{rule}_p{number}", key in required))
            rules.append(f"{rule}_p{number}: {json.dumps(key + '=')} {rule}_v{number}\n"
                         f"{rule}_v{number}: {json_rule(value, schema)}\n")  # fmt: skip
        arguments = separated(parts, '", "')
        return f'{rule}: {json.dumps(name + "(")} {arguments} ")"\n' + "".join(rules)


LFM_PYTHONIC = PythonicCalls(
    spellings=("<|tool_call_start|>", "<|tool_call_end|>"),
    triggers=("<|tool_call_start|>",),
    opening=rf"\s*<|tool_call_start|>\s*\[\s*{_CALL}",
    end=r"\s*\]\s*<|tool_call_end|>",
    section=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
)
LLAMA_PYTHONIC = PythonicCalls(
    spellings=("<|python_start|>", "<|python_end|>"),
    triggers=("<|python_start|>",),
    opening=rf"\s*(?:<|python_start|>\s*)?\[\s*{_CALL}",
    end=r"\s*\]",
    section=("[", ", ", "]"),
    dropped=("<|python_end|>",),
    bare=True,
)
