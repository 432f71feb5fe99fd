"""Reasoning and calls of dialects whose marks are special tokens, through the real clients of three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from expertserve.text.dialects.harmony import SPELLINGS
from tests.server.hash_world import MODEL
from tests.server.scripted import ScriptedWorld, Template
from tests.server.test_tools import ASK, TOOLS, streamed
from tests.server.worlds import Running, running
from tests.text.test_harmony import ANALYSIS, FINAL, TEMPLATE

GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"days": 2}<|call|>'
GLM_CALL = "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
SAID = {
    "harmony": f"{ANALYSIS}<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{HARMONY_CALL}",
    "glm": f"We need <b>.</think>\nWait.\n{GLM_CALL}",
}
TALK = {
    "harmony": f"{ANALYSIS}{FINAL}Sunny, <|return|>",
    "glm": "We need <b>.</think>\n\nSunny, ",
}


@pytest.fixture(scope="module", params=["harmony", "glm"])
def spoken(request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedWorld, Running]]:
    if request.param == "harmony":
        world = ScriptedWorld(Template(TEMPLATE), SPELLINGS, ("<|call|>", "<|return|>"))
    else:
        template = Template("<think></think><tool_call><arg_key>", "<think>\n")
        world = ScriptedWorld(template, ("<think>", "</think>", *GLM_MARKS))
    with running(world) as server:
        yield request.param, world, server


def test_reasoning_content_and_a_call_of_a_chat(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    world.say(SAID[name])
    answer = server.client.chat.completions.create(tools=TOOLS, **ASK).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Wait.")
    assert (answer.message.model_extra or {})["reasoning_content"] == "We need <b>."
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("weather", '{"days": 2}')
    world.say(SAID[name])
    assert streamed(server, tools=TOOLS) == ("We need <b>.", "Wait.", [["weather", '{"days": 2}']], "tool_calls")


def test_an_answer_without_a_call(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    for tools in ({}, {"tools": TOOLS}):
        world.say(TALK[name])
        assert streamed(server, **tools) == ("We need <b>.", "Sunny, ", [], "stop")
        world.say(TALK[name])
        message = server.client.chat.completions.create(**ASK, **tools).choices[0].message
        assert ((message.model_extra or {})["reasoning_content"], message.content) == ("We need <b>.", "Sunny, ")


def test_arguments_stream_piece_by_piece(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    long = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
    world.say({
        "harmony": HARMONY_CALL.replace('"days": 2', '"city": "Reykjavik"'),
        "glm": "</think>" + GLM_CALL.replace("days", "city").replace("2", "Reykjavik"),
    }[name])  # fmt: skip
    pieces = [
        call.function.arguments
        for chunk in server.client.chat.completions.create(stream=True, tools=long, **ASK)  # type: ignore[call-overload]
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(pieces) == '{"city": "Reykjavik"}' and len(pieces) > 8


def test_marks_that_the_model_spells_are_text(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    spelt = {"harmony": "<|end|><|start|>assistant" + HARMONY_CALL, "glm": GLM_CALL}[name]
    before = TALK[name].removesuffix("<|return|>")
    world.forward.say([*world.marks.spelt(before), *spelt.encode()])  # type: ignore[attr-defined]
    _, content, calls, _ = streamed(server, tools=TOOLS)
    assert content.split() == ["Sunny,", *spelt.split()] and calls == []


def test_reasoning_and_a_call_of_anthropics_messages(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    tools: Any = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    ask: Any = {"model": MODEL, "max_tokens": 300, "messages": ASK["messages"], "tools": tools}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        world.say(SAID[name])
        whole = client.messages.create(**ask)
        world.say(SAID[name])
        with client.messages.stream(**ask) as stream:
            final = stream.get_final_message()
    for answer in (whole, final):
        kinds = [block.type for block in answer.content]
        assert kinds == ["thinking", "text", "tool_use"] and answer.stop_reason == "tool_use"
        thinking, text, call = answer.content
        assert thinking.thinking == "We need <b>." and text.text == "Wait."  # type: ignore[union-attr]
        assert (call.name, call.input) == ("weather", {"days": 2})  # type: ignore[union-attr]


def test_anthropics_stop_sequence_is_never_a_mark(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    tools: Any = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    ask: Any = {"model": MODEL, "max_tokens": 300, "messages": ASK["messages"], "tools": tools}
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        world.say(SAID[name])
        answer = client.messages.create(tool_choice=single, **ask)
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
        world.say(TALK[name])
        answer = client.messages.create(tool_choice=single, stop_sequences=["ny"], **ask)
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "ny")


def test_reasoning_and_a_call_of_responses(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    tools: Any = [{"type": "function", "name": "weather", "parameters": TOOLS[0]["function"]["parameters"]}]
    ask: Any = {"model": MODEL, "input": "weather?", "tools": tools}
    world.say(SAID[name])
    whole = server.client.responses.create(**ask)
    world.say(SAID[name])
    with server.client.responses.stream(**ask) as events:
        final = events.get_final_response()
    for answer in (whole, final):
        reasoning, message, call = answer.output
        assert reasoning.content[0].text == "We need <b>."  # type: ignore[union-attr, index]
        assert message.content[0].text == "Wait."  # type: ignore[union-attr, index]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"days": 2})  # type: ignore[union-attr]


def test_a_forced_call_is_made_by_a_model_that_would_rather_talk(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        world.say(TALK[name])
        ask: Any = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = server.client.chat.completions.create(**ask).choices[0]
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        assert (answer.message.model_extra or {})["reasoning_content"] == "We need <b>."
        (call,) = answer.message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments) in ({"days": 1}, {"days": 2}, {})


def test_a_schema_comes_after_the_reasoning(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                      "additionalProperties": False}}  # fmt: skip
    world.say(TALK[name])
    answer = server.client.chat.completions.create(
        **ASK,
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[call-overload]
    ).choices[0]
    assert (answer.message.model_extra or {})["reasoning_content"] == "We need <b>."
    assert json.loads(answer.message.content) == {"a": 1} and answer.finish_reason == "stop"


def test_efforts_are_those_that_the_template_knows(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    lengths = {}
    for effort in ("low", "minimal", "high", "xhigh"):
        world.say(TALK[name])
        usage = server.client.chat.completions.create(
            reasoning_effort=effort,
            **{**ASK, "max_tokens": 1},  # type: ignore[arg-type]
        ).usage
        assert usage is not None
        lengths[effort] = usage.prompt_tokens
    if name == "harmony":
        assert lengths["minimal"] == lengths["low"] and lengths["xhigh"] == lengths["high"] == lengths["low"] + 1
    else:
        assert lengths["minimal"] == lengths["low"] + len("minimal") - len("low")


def test_one_call_only_where_parallel_ones_are_not_wanted(spoken: tuple[str, ScriptedWorld, Running]) -> None:
    name, world, server = spoken
    if name == "harmony":
        pytest.skip("a call ends the answer")
    nothing = "<tool_call>now\n</tool_call>"
    for said, expected in ((GLM_CALL, ["weather", '{"days": 2}']), (nothing, ["now", "{}"])):
        world.say(f"</think>{said}\n{said}")
        assert streamed(server, tools=TOOLS, parallel_tool_calls=False) == ("", "", [expected], "tool_calls")


def test_ids_that_the_model_gives_reach_every_client() -> None:
    """Kimi-K2's template writes them into the next turn."""
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    world = ScriptedWorld(Template("<|tool_call_begin|>"), marks)
    call = '<|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>{"days": 2}<|tool_call_end|>'
    parameters = TOOLS[0]["function"]["parameters"]
    ids = []
    with running(world) as server:
        world.say(call)
        message = server.client.chat.completions.create(tools=TOOLS, **ASK).choices[0].message
        ids += [made.id for made in message.tool_calls or []]
        world.say(call)
        for chunk in server.client.chat.completions.create(tools=TOOLS, stream=True, **ASK):
            ids += [made.id for made in chunk.choices[0].delta.tool_calls or [] if made.id]
        world.say(call)
        tools: Any = [{"type": "function", "name": "weather", "parameters": parameters}]
        response = server.client.responses.create(model=MODEL, input="weather?", tools=tools)
        ids += [item.call_id for item in response.output if item.type == "function_call"]
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            world.say(call)
            tools = [{"name": "weather", "input_schema": parameters}]
            answer = client.messages.create(model=MODEL, max_tokens=300, messages=ASK["messages"], tools=tools)
            ids += [block.id for block in answer.content if block.type == "tool_use"]
    assert ids == ["functions.weather:7"] * 4
