"""Cutting answers: however a text arrives, the same parts come out and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.text.answer import AnswerParser, Piece
from expertserve.text.dialect import GLM, HERMES, MINIMAX, QWEN_CODER, THINK, Dialect, dialect_of
from expertserve.text.grammar import GrammarCompiler, GrammarSource
from tests.server.hash_world import ByteTokenizer
from tests.text.test_grammar import random_text

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
DIALECTS = {"hermes": HERMES, "qwen": QWEN_CODER, "glm": GLM, "minimax": MINIMAX}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln }", "days": 3}}\n</tool_call>',
    "qwen": "<tool_call>\n<function=weather>\n<parameter=city>\nK\u00f6ln }\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K\u00f6ln }</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">K\u00f6ln }</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
}


def cut(dialect: Dialect, parts: list[str], *, opened: bool = False, tools: Any = TOOLS) -> list[Piece]:
    parser = AnswerParser(dialect, tools, opened)
    return [piece for part in parts for piece in parser.push(part)] + parser.flush()


def joined(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append((piece.name, ""))
        if piece.part == "call":
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    text = {part: "".join(p.text for p in pieces if p.part == part) for part in ("reasoning", "content")}
    return text["reasoning"], text["content"], calls


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_content_and_two_calls_come_apart_at_any_cut(name: str, size: int) -> None:
    text = f"<think>\nSo <b> it is.\n</think>\n\nLet me see.\n{CALLS[name]}\n{CALLS[name].replace('3', '4')}"
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    reasoning, content, calls = joined(cut(Dialect(THINK, DIALECTS[name]), parts))
    assert (reasoning, content) == ("So <b> it is.", "Let me see.")
    assert [name for name, _ in calls] == ["weather", "weather"]
    arguments = [json.loads(text) for _, text in calls]
    assert arguments == [{"city": "K\u00f6ln }", "days": 3}, {"city": "K\u00f6ln }", "days": 4}]


@pytest.mark.parametrize("name", DIALECTS)
def test_arguments_come_before_the_call_is_over(name: str) -> None:
    parser = AnswerParser(Dialect(None, DIALECTS[name]), TOOLS, False)
    text = CALLS[name]
    pieces = parser.push(text[: text.index("3")])
    assert pieces[0].name == "weather" and '{"city": "K\u00f6ln }"' in "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tool_that_nobody_offered_and_a_broken_call_stay_text(name: str) -> None:
    dialect = Dialect(None, DIALECTS[name])
    stranger = CALLS[name].replace("weather", "shutdown")
    assert joined(cut(dialect, [stranger])) == ("", stranger, [])
    broken = f"{DIALECTS[name].open}a list follows: 1 2 3"
    assert joined(cut(dialect, [broken])) == ("", broken, [])
    assert joined(cut(dialect, [CALLS[name]], tools={})) == ("", CALLS[name], [])


def test_fields_in_another_order_and_arguments_as_a_string_are_calls() -> None:
    for text in (
        '{"arguments": {"city": "x"}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"x\\"}"}',
    ):
        _, content, calls = joined(cut(Dialect(None, HERMES), [f"<tool_call>{text}</tool_call>"]))
        assert content == "" and calls == [("weather", '{"city": "x"}')]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_without_parameters_has_an_empty_object(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "qwen": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "glm": "<tool_call>now\n</tool_call>",
        "minimax": '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    }[name]
    assert joined(cut(Dialect(None, DIALECTS[name]), [*text])) == ("", "", [("now", "{}")])


def test_a_call_that_the_limit_cuts_off_keeps_what_there_is() -> None:
    _, content, calls = joined(cut(Dialect(None, HERMES), ['<tool_call>{"name": "weather", "arguments": {"city": "Os']))
    assert content == "" and calls == [("weather", '{"city": "Os')]


def test_reasoning_that_the_prompt_opened_needs_no_mark_and_may_not_end() -> None:
    dialect = Dialect(THINK, HERMES)
    assert joined(cut(dialect, ["hm</think>", "yes"], opened=True))[:2] == ("hm", "yes")
    assert joined(cut(dialect, ["hm </thi"], opened=True))[:2] == ("hm </thi", "")
    assert joined(cut(dialect, ["I <think> so"]))[:2] == ("", "I <think> so")
    assert joined(cut(dialect, [" <thi"]))[:2] == ("", " <thi")


@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "{", '"', "x", " ", "\n", "<"])
    ),
    data=st.data(),
)
def test_no_character_but_space_and_marks_is_lost(text: list[str], data: st.DataObject) -> None:
    whole = "".join(text)
    at = data.draw(st.integers(0, len(whole)))
    pieces = cut(Dialect(THINK, HERMES), [whole[:at], whole[at:]])
    reasoning, content, calls = joined(pieces)
    assert not calls
    said, given_ = "".join((reasoning + content).split()), "".join(whole.split())
    assert said in (
        given_,
        given_.replace("<think>", "", 1),
        given_.replace("<think>", "", 1).replace("</think>", "", 1),
    )
    assert joined(cut(Dialect(THINK, HERMES), [whole])) == (reasoning, content, calls)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_forced_call_is_one_whatever_the_model_prefers(name: str, parallel: bool) -> None:
    dialect = Dialect(None, DIALECTS[name])
    compiler = GrammarCompiler(ByteTokenizer())
    days: dict[str, Any] = {"days": {"enum": [1, 2]}}
    # A string without quotes ends at its tag only, which random tokens take too long to find.
    other: dict[str, Any] = (
        {"city": {"type": "string", "maxLength": 5}} if name == "hermes" else {"on": {"type": "boolean"}}
    )
    closed = {"type": "object", "additionalProperties": False}
    tools = {"weather": {**closed, "properties": days | other, "required": ["days"]}, "now": closed}
    grammar = compiler.compile(GrammarSource("lark", dialect.forced_calls(tools, parallel)), "tools")
    seen = set()
    for seed in range(12):
        _, content, calls = joined(cut(dialect, [random_text(grammar, seed)], tools=tools))
        assert content == "" and calls and (parallel or len(calls) == 1)
        for tool, arguments in calls:
            seen.add(tool)
            assert tool == "now" or "days" in json.loads(arguments)
    assert seen == {"weather", "now"}


def test_a_string_parameter_between_tags_ends_at_its_tag() -> None:
    compiler = GrammarCompiler(ByteTokenizer())
    for name in ("qwen", "glm", "minimax"):
        text = CALLS[name].replace("glm\n", "")
        tools = {"weather": WEATHER}
        source = GrammarSource("lark", Dialect(None, DIALECTS[name]).forced_calls(tools, False))
        state = compiler.compile(source, "tools").start()
        for byte in text.encode():
            assert state.mask()[byte], text
            state.accept(byte)
        assert state.ended


def test_dialects_are_told_from_templates() -> None:
    assert dialect_of("{{ messages }}") == Dialect(None, HERMES)
    assert dialect_of("<tool_call> <think> </think>") == Dialect(THINK, HERMES)
    assert dialect_of("<tool_call>\n<function=x>").calls is QWEN_CODER
    assert dialect_of("<tool_call>\n<arg_key>").calls is GLM
    assert dialect_of("<minimax:tool_call>").calls is MINIMAX
