"""What a template writes of a call in an earlier turn, the dialect told from that template reads as the same call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from expertserve.text.chat_template import ChatTemplate
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect
from tests.text.histories import HARMONY, HISTORIES
from tests.text.test_answer import cut, in_parts, joined
from tests.text.test_chat_template import PLAIN, Source

PLAIN_SOURCE = Source()
DEEP = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS: Any = {
    "weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": DEEP, "hours": {"type": "array"},
        "near": {"type": "number"},
    }},
    "now": {"type": "object", "properties": {}},
}  # fmt: skip
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "K\u00f6ln, <b>\n{x}", "days": 3, "hours": [1, 2], "near": 0.5},
    {"city": "3", "where": {"n": 4}},
]


def turns(*, text: str = "", reasoning: str | None = None) -> list[dict[str, Any]]:
    calls = [
        {"id": f"functions.{name}:{number}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for number, (name, arguments) in enumerate((("weather", ARGUMENTS[0]), ("now", {}), ("weather", ARGUMENTS[1])))
    ]  # fmt: skip
    turn: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": calls}
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    return [{"role": "user", "content": "hi"}, turn]


def dialect(source: str) -> Dialect:
    return dialect_of(source, lambda text: None)


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("text", ["", "Let me see."])
def test_a_call_that_was_made_is_read_as_it_was_made(name: str, text: str) -> None:
    if name == "llama" and text:
        pytest.skip("its template writes the text between the marks, before the calls")
    template = ChatTemplate.from_gguf(PLAIN_SOURCE, PLAIN, HISTORIES[name])
    conversation = turns(text=text)
    if name == "mistral":
        for number, call in enumerate(conversation[1]["tool_calls"]):
            call["id"] = f"abcdefgh{number}"
    prompt = template.render(conversation, add_generation_prompt=False)
    answer = prompt.split("assistant: ")[1].removesuffix("\n")
    for size in (1, 7, 10_000):
        _, content, calls = joined(cut(dialect(HISTORIES[name]), in_parts(answer, size), tools=TOOLS))
        assert content == text
        assert [tool for tool, _ in calls] == ["weather", "now", "weather"]
        assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS[0], {}, ARGUMENTS[1]]


def test_harmony_keeps_the_reasoning_of_a_call_and_drops_that_of_an_answer() -> None:
    template = ChatTemplate.from_gguf(PLAIN_SOURCE, PLAIN, HARMONY)
    conversation = turns(text="I look.", reasoning="We need it.")
    prompt = template.render(conversation, add_generation_prompt=False)
    answer = prompt.split("<|start|>assistant", 1)[1]
    reasoning, content, calls = joined(cut(dialect(HARMONY), in_parts(answer, 3), tools=TOOLS))
    assert (reasoning, content) == ("We need it.\nI look.", "") and json.loads(calls[0][1]) == ARGUMENTS[0]
    old = [conversation[0], {"role": "assistant", "content": "Yes.", "reasoning_content": "We need it."}]
    assert "We need it" not in template.render(old)


def test_other_templates_that_say_thinking_keep_what_is_said_beside_a_call() -> None:
    source = "{% for m in messages %}{% set message = m %}[{{ message.thinking }}|{{ m.content }}]{% endfor %}"
    template = ChatTemplate.from_gguf(PLAIN_SOURCE, PLAIN, source)
    assert template.render(turns(text="I look.", reasoning="Hm.")).endswith("[Hm.|I look.]")


def test_thinking_is_turned_off_under_both_names() -> None:
    source = "{{ 'off' if thinking is defined and not thinking else 'on' }}"
    template = ChatTemplate.from_gguf(PLAIN_SOURCE, PLAIN, source)
    assert template.render([], enable_thinking=False) == "off" and template.render([]) == "on"
    assert template.render([], enable_thinking=False, thinking=True) == "on"


def test_a_template_that_names_no_marks_leaves_them_to_the_vocabulary() -> None:
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    plain = "{{ messages }}"
    assert joined(cut(dialect(plain), [call], tools=TOOLS))[2] == []
    known = {"<|tool_call_begin|>": 7}
    told = dialect_of(plain, known.get)
    marked = call.replace("<|tool_call_begin|>", "\ufdd0<|tool_call_begin|>")
    assert joined(cut(told, [marked], tools=TOOLS))[2] == [("now", "{}")]
