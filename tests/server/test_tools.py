"""Tools and reasoning through the real client. The model's words are forced, so what it says is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.hash_world import MODEL, PlainTemplate, World
from tests.server.worlds import Running, running

HELLO: Any = [{"role": "user", "content": "weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2]}},
    "required": ["days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'
ASK: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 400, "seed": 3}


def saying(text: str) -> dict[str, Any]:
    """Forces the model's words."""
    return {"extra_body": {"guided_choice": [text]}}


def streamed(server: Running, **ask: Any) -> tuple[str, str, list[list[str]], str | None]:
    """Reasoning, content, calls [name, arguments], the reason of the end."""
    reasoning, content, reason = "", "", None
    calls: list[list[str]] = []
    for chunk in server.client.chat.completions.create(stream=True, **{**ASK, **ask}):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                assert call.index == len(calls) and call.function.name
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    return reasoning, content, calls, reason


def test_a_call_that_the_model_makes_is_a_call_and_its_arguments_stream(server: Running) -> None:
    said = saying(f"Wait.\n{CALL}\n{CALL}")
    answer = server.client.chat.completions.create(tools=TOOLS, **ASK, **said).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Wait."
    calls = [call for call in answer.message.tool_calls or [] if call.type == "function"]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"days": 2})
    ] * 2
    assert len({call.id for call in calls}) == 2
    expected = ("", "Wait.", [["weather", '{"days": 2}']] * 2, "tool_calls")
    assert streamed(server, tools=TOOLS, **said) == expected


def test_without_tools_the_same_words_are_text(server: Running) -> None:
    answer = server.client.chat.completions.create(**ASK, **saying(CALL)).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", CALL, None)
    answer = server.client.chat.completions.create(tools=TOOLS, tool_choice="none", **ASK, **saying(CALL)).choices[0]
    assert answer.message.content == CALL


def test_one_call_only_where_parallel_ones_are_not_wanted(server: Running) -> None:
    said = saying(f"{CALL}\n{CALL}")
    _, content, calls, reason = streamed(server, tools=TOOLS, parallel_tool_calls=False, **said)
    assert (content, calls, reason) == ("", [["weather", '{"days": 2}']], "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_made_by_a_model_that_babbles(server: Running, choice: Any) -> None:
    for seed in range(5):
        ask = {**ASK, "seed": seed, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = server.client.chat.completions.create(**ask).choices[0]
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        (call,) = answer.message.tool_calls or []
        assert call.type == "function" and (call.function.name == "weather" or choice == "required")
        assert json.loads(call.function.arguments) in ({"days": 1}, {"days": 2}, {})
        assert streamed(server, **ask)[1:] == ("", [[call.function.name, call.function.arguments]], "tool_calls")


def test_a_schema_beside_tools_allows_either(server: Running) -> None:
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                      "additionalProperties": False}}  # fmt: skip
    seen = set()
    for seed in range(12):
        ask = {**ASK, "seed": seed, "tools": TOOLS, "temperature": 2.0}
        answer = server.client.chat.completions.create(
            **ask,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[call-overload]
        ).choices[0]
        assert answer.message.tool_calls or json.loads(answer.message.content) == {"a": 1}
        seen.add(answer.finish_reason)
    assert seen == {"stop", "tool_calls"}


class Thinking(PlainTemplate):
    """Of a model that reasons; `enable_thinking` is what Qwen's templates read."""

    source = "<think></think>"

    def render(self, messages: Any, *, enable_thinking: bool = True, **kwargs: Any) -> str:
        return super().render(messages, **kwargs) + ("" if enable_thinking else "<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def thinker() -> Any:
    world = World(template=Thinking())
    with running(world) as server:
        yield server


def test_reasoning_has_a_field_of_its_own(thinker: Running) -> None:
    said = saying("<think>\nHm <tool_call>.\n</think>\n\nYes.")
    answer = thinker.client.chat.completions.create(tools=TOOLS, **ASK, **said)
    message = answer.choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("Yes.", "Hm <tool_call>.")
    tokens_of_reasoning = len(">\nHm <tool_call>.\n</think>")  # bytes, from the end of the mark that opens it on
    assert answer.usage.completion_tokens_details.reasoning_tokens == tokens_of_reasoning
    assert streamed(thinker, tools=TOOLS, **said) == ("Hm <tool_call>.", "Yes.", [], "stop")
    said["extra_body"]["reasoning_format"] = "none"
    message = thinker.client.chat.completions.create(**ASK, **said).choices[0].message
    assert message.content == "<think>\nHm <tool_call>.\n</think>\n\nYes."


def test_no_effort_is_no_reasoning(thinker: Running) -> None:
    def prompt_tokens(**extra: Any) -> int:
        ask = {**ASK, "max_tokens": 1, **extra}
        usage = thinker.client.chat.completions.create(**ask).usage
        return usage.prompt_tokens if usage else 0

    closed = len("<think>\n\n</think>\n\n") + len("{'reasoning_effort': 'none'}\n")
    assert prompt_tokens(reasoning_effort="none") == prompt_tokens() + closed
    template: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_tokens(extra_body=template) == prompt_tokens() + len("<think>\n\n</think>\n\n")
