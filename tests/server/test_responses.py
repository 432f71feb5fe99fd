"""OpenAI's Responses API through its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.hash_world import MODEL, World
from tests.server.test_tools import CALL, PARAMETERS, Thinking
from tests.server.worlds import Running, running

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
ASK: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 300}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    with running(World(template=Thinking())) as server:
        yield server


def test_a_text_is_the_models_and_cut_by_its_limit(thinker: Running) -> None:
    answer = thinker.client.responses.create(temperature=0, instructions="be brief", **{**ASK, "max_output_tokens": 5})
    expected = thinker.world.expect("system:be brief\nuser:hello\nassistant:", max_tokens=5)
    assert answer.output_text == expected.text
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 5


def test_events_accumulate_to_the_whole_answer(thinker: Running) -> None:
    ask = {**ASK, "max_output_tokens": 5, "temperature": 0}
    whole = thinker.client.responses.create(**ask)
    events = list(thinker.client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_a_call_are_items(thinker: Running, stream: bool) -> None:
    ask: Any = {**ASK, "tools": TOOLS, "extra_body": {"text": {"format": {"type": "text"}}}}
    ask["extra_body"]["grammar"] = f"root ::= {json.dumps(f'<think>Hm.</think>Wait.{CALL}')}"
    if stream:
        with thinker.client.responses.stream(**ask) as events:
            answer = events.get_final_response()
    else:
        answer = thinker.client.responses.create(**ask)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "Wait." and answer.status == "completed"
    assert answer.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
    assert json.loads(answer.output[2].arguments) == {"days": 2}  # type: ignore[union-attr]


def test_a_forced_call_and_the_next_turn(thinker: Running) -> None:
    answer = thinker.client.responses.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **ASK)
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments) in ({"days": 1}, {"days": 2})
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    following = thinker.client.responses.create(**{**ASK, "input": turns, "max_output_tokens": 1})
    assert following.usage is not None
    assert following.usage.input_tokens == 1 + len("user:hello\nassistant:\ntool:rain\nassistant:")


def test_a_schema_is_followed(thinker: Running) -> None:
    format: Any = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": PARAMETERS}}
    answer = thinker.client.responses.create(text=format, **ASK)
    assert json.loads(answer.output_text) in ({"days": 1}, {"days": 2})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "input_image"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(thinker: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        thinker.client.responses.create(**{**ASK, **fields})
    assert caught.value.param == param
