"""The dialects that are served, each with a template that speaks it, and what its models write.

`written` are two calls of `weather`, as the dialect's published templates write a history: city Köln }, then 3 and 4
days. `nothing` is a call of `now`, which has no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect
from tests.server.hash_world import ByteTokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Spoken:
    """A dialect: its template's marks, what is written, and which marks its vocabularies have as special tokens."""

    template: str
    written: str
    nothing: str
    special: tuple[str, ...] = ()
    ids: tuple[str | None, str | None] = (None, None)

    def dialect(self, special_id: Callable[[str], int | None] | None = None) -> Dialect:
        return dialect_of(self.template, special_id or (lambda text: None))


def _json(days: int, arguments: str = "arguments") -> str:
    return f'{{"name": "weather", "{arguments}": {{"city": "K\u00f6ln }}", "days": {days}}}}}'


def _arguments(days: int) -> str:
    return f'{{"city": "K\u00f6ln }}", "days": {days}}}'


def _cohere(days: int) -> str:
    return f'{{"tool_call_id": "{days}", "tool_name": "weather", "parameters": {_arguments(days)}}}'


_HERMES = "<tool_call>\n{}\n</tool_call>"
_QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nK\u00f6ln }}\n</parameter>\n<parameter=days>\n{}\n"
    "</parameter>\n</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K\u00f6ln }}</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>{}</arg_value>\n</tool_call>"
)
_MINIMAX = (
    '<invoke name="weather">\n<parameter name="city">K\u00f6ln }}</parameter>\n'
    '<parameter name="days">{}</parameter>\n</invoke>\n'
)
_DS = {name: f"<\uff5ctool\u2581{name}\uff5c>" for name in ("sep",)} | {
    name: "<\uff5ctool\u2581" + name.replace("_", "\u2581") + "\uff5c>"
    for name in ("calls_begin", "calls_end", "call_begin", "call_end")
}


def _deepseek(first: str, second: str) -> str:
    return f"{_DS['calls_begin']}{first}{second}{_DS['calls_end']}"


def _v3(days: int) -> str:
    return (
        f"{_DS['call_begin']}function{_DS['sep']}weather\n```json\n{_arguments(days)}\n```{_DS['call_end']}"
        + "\n" * (days == 3)
    )


def _v31(days: int) -> str:
    return f"{_DS['call_begin']}weather{_DS['sep']}{_arguments(days)}{_DS['call_end']}"


def _kimi(number: int, name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _kimi_section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _gemma(days: int) -> str:
    return f'<|tool_call>call:weather{{city:<|"|>K\u00f6ln }}<|"|>,days:{days}}}<tool_call|>'


_PYTHON = "weather(city='K\u00f6ln }}', days={})"
_NOW = '{"name": "now", "arguments": {}}'

SPOKEN: Mapping[str, Spoken] = {
    "hermes": Spoken(
        "<tool_call></tool_call>",
        f"{_HERMES.format(_json(3))}\n{_HERMES.format(_json(4))}",
        _HERMES.format(_NOW),
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen-coder": Spoken(
        "<tool_call>\n<function=",
        f"{_QWEN.format(3)}\n{_QWEN.format(4)}",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
    ),
    "glm": Spoken(
        "<tool_call><arg_key>",
        f"{_GLM.format(3)}\n{_GLM.format(4)}",
        "<tool_call>now\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "glm-4.7": Spoken(
        "<tool_call><arg_key>",
        f"{_GLM.format(3)}{_GLM.format(4)}".replace("\n", ""),
        "<tool_call>now</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax": Spoken(
        "<minimax:tool_call>",
        f"<minimax:tool_call>\n{_MINIMAX.format(3)}{_MINIMAX.format(4)}</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek-v3": Spoken(
        f"{_DS['sep']}\n```json",
        _deepseek(_v3(3), _v3(4)),
        _deepseek(f"{_DS['call_begin']}function{_DS['sep']}now\n```json\n{{}}\n```{_DS['call_end']}", ""),
        tuple(_DS.values()),
    ),
    "deepseek-v3.1": Spoken(
        _DS["sep"],
        _deepseek(_v31(3), _v31(4)),
        _deepseek(f"{_DS['call_begin']}now{_DS['sep']}{{}}{_DS['call_end']}", ""),
        tuple(_DS.values()),
    ),
    "kimi": Spoken(
        "<|tool_call_begin|>",
        _kimi_section(_kimi(3, "weather", _arguments(3)), _kimi(4, "weather", _arguments(4))),
        _kimi_section(_kimi(0, "now", "{}")),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        ("functions.weather:3", "functions.weather:4"),
    ),
    "mistral": Spoken(
        "[TOOL_CALLS]",
        f'[TOOL_CALLS] [{_json(3)[:-1]}, "id": "abcdefghi"}}, {_json(4)}]',
        f"[TOOL_CALLS][{_NOW}]",
        ("[TOOL_CALLS]",),
    ),
    "mistral-v11": Spoken(
        "[TOOL_CALLS][ARGS]",
        f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{_arguments(3)}[TOOL_CALLS]weather[ARGS]{_arguments(4)}",
        "[TOOL_CALLS]now[ARGS]{}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ("123456789", None),
    ),
    "granite": Spoken(
        "<|tool_call|>", f"<|tool_call|>[{_json(3)}, {_json(4)}]", f"<|tool_call|>[{_NOW}]", ("<|tool_call|>",)
    ),
    "phi": Spoken(
        "<|tool_call|><|/tool_call|>",
        f"<|tool_call|>[{_json(3)}, {_json(4)}]<|/tool_call|>",
        f"<|tool_call|>[{_NOW}]<|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "hunyuan": Spoken(
        "<tool_calls>",
        f"<tool_calls>[\n{_json(3)},\n{_json(4)}\n]</tool_calls>",
        f"<tool_calls>[{_NOW}]</tool_calls>",
    ),
    "cohere": Spoken(
        "<|START_ACTION|>",
        f"<|START_ACTION|>[\n    {_cohere(3)},\n    {_cohere(4)}\n]<|END_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "lfm": Spoken(
        "<|tool_call_start|>",
        f"<|tool_call_start|>[{_PYTHON.format(3)}, {_PYTHON.format(4)}]<|tool_call_end|>",
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "lfm-json": Spoken(
        "<|tool_call_start|>",
        f"<|tool_call_start|>[{_json(3)}, {_json(4)}]<|tool_call_end|>",
        f"<|tool_call_start|>[{_NOW}]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama-json": Spoken(
        "<|python_start|>",
        f"<|python_start|><|python_end|>{_json(3, 'parameters')}{_json(4, 'parameters')}",
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
        ("<|python_start|>", "<|python_end|>"),
    ),
    "llama-pythonic": Spoken(
        "<|python_start|>",
        f"<|python_start|>[{_PYTHON.format(3)}, {_PYTHON.format(4)}]<|python_end|>",
        "<|python_start|>[now()]<|python_end|>",
        ("<|python_start|>", "<|python_end|>"),
    ),
    "gemma": Spoken(
        "<|tool_call><tool_call|>",
        _gemma(3) + _gemma(4),
        "<|tool_call>call:now{}<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
}


class MarkTokenizer(ByteTokenizer):
    """Bytes, and special tokens for some marks."""

    def __init__(self, marks: tuple[str, ...], ends: tuple[str, ...] = ()) -> None:
        self.marks = dict(enumerate(marks, ByteTokenizer.vocab_size))
        self.vocab_size = ByteTokenizer.vocab_size + len(marks)
        self.eog_ids = ByteTokenizer.eog_ids | {id for id, mark in self.marks.items() if mark in ends}

    def token_bytes(self, id: int) -> bytes:
        return self.marks[id].encode() if id in self.marks else super().token_bytes(id)

    def special_id(self, text: str) -> int | None:
        return next((id for id, mark in self.marks.items() if mark == text), super().special_id(text))

    def spelt(self, text: str) -> list[int]:
        """The tokens of a text whose marks are tokens."""
        for id, mark in self.marks.items():
            if mark in text:
                return [token for part in text.split(mark) for token in [id, *self.spelt(part)]][1:]
        return list(text.encode())
