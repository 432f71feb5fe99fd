"""Anthropic's Messages API through its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.hash_world import MODEL, World
from tests.server.test_tools import CALL, PARAMETERS, Thinking
from tests.server.worlds import Running, running

ASK: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client has no name for it
TOOLS: Any = [{"name": "weather", "description": "says it", "input_schema": PARAMETERS}]


@pytest.fixture(scope="module")
def claude() -> Iterator[tuple[anthropic.Anthropic, Running]]:
    with running(World(template=Thinking()), api_keys=("a-key",)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="a-key", max_retries=0) as client:
            yield client, server


def saying(text: str) -> Any:
    """Forces the model's words."""
    return {"extra_body": {"grammar": f"root ::= {json.dumps(text)}"}}


def test_a_text_is_the_models_with_usage(claude: Any) -> None:
    client, server = claude
    answer = client.messages.create(**GREEDY, **{**ASK, "max_tokens": 5}, system="be brief")
    expected = server.world.expect("system:be brief\nuser:hello\nassistant:", max_tokens=5)
    assert "".join(block.text for block in answer.content) == expected.text
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    prompt_tokens = len("system:be brief\nuser:hello\nassistant:") + 1
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == prompt_tokens
    assert answer.usage.output_tokens == len(expected.tokens)


def test_stream_accumulates_to_the_whole_answer(claude: Any) -> None:
    client, _ = claude
    ask = {**ASK, "max_tokens": 5}
    whole = client.messages.create(**GREEDY, **ask)
    with client.messages.stream(**GREEDY, **ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 5)


def test_a_stop_sequence_is_named(claude: Any) -> None:
    client, server = claude
    text = server.world.chat_text("hello", max_tokens=40)
    answer = client.messages.create(**GREEDY, **{**ASK, "max_tokens": 40}, stop_sequences=["never said", text[3:5]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[3:5])
    assert answer.content[0].text == text[: text.index(text[3:5])]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_a_call_are_blocks(claude: Any, stream: bool) -> None:
    client, _ = claude
    ask = {**ASK, "tools": TOOLS, **saying(f"<think>Hm.</think>\nWait.\n{CALL}")}
    if stream:
        with client.messages.stream(**ask) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**ask)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("Hm.", "Wait.")
    assert (answer.content[2].name, answer.content[2].input) == ("weather", {"days": 2})
    assert answer.stop_reason == "tool_use"


def test_a_forced_tool_and_the_next_turn_with_its_result(claude: Any) -> None:
    client, _ = claude
    answer = client.messages.create(tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, **ASK)
    (call,) = answer.content
    assert call.name == "weather" and call.input in ({"days": 1}, {"days": 2})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [*ASK["messages"], {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model=MODEL, messages=turns)
    assert counted.input_tokens == 1 + len("user:hello\nassistant:\ntool:rain\nassistant:")
    next_turn = client.messages.create(**{**ASK, "messages": turns, "max_tokens": 1})
    assert next_turn.usage.input_tokens + next_turn.usage.cache_read_input_tokens == counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": "x"}}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "no tool named"),
    ],
)
def test_what_cannot_be_used_is_400_and_named(claude: Any, fields: dict[str, Any], named: str) -> None:
    client, _ = claude
    with pytest.raises(anthropic.BadRequestError, match=named):
        client.messages.create(**{**ASK, **fields})


def test_a_wrong_key_and_a_wrong_model_are_told_apart(claude: Any) -> None:
    client, server = claude
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "nobody"})
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**ASK)
