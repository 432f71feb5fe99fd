"""Structured output through the real client: every name for it, and that it holds for streams, choices and drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.hash_world import MODEL
from tests.server.worlds import Running

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_json_schema_is_followed_by_every_choice(server: Running, stream: bool) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    ask: Any = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 5, "max_tokens": 300, "response_format": format}
    if stream:
        texts = ["", "", ""]
        for chunk in server.client.chat.completions.create(stream=True, **ask):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = server.client.chat.completions.create(**ask)
        texts = [choice.message.content or "" for choice in answer.choices]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert all(is_valid(text) for text in texts) and len(set(texts)) == 3


@pytest.mark.parametrize(
    "field",
    [
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_other_servers_names_mean_the_same(server: Running, path: str, field: dict[str, Any]) -> None:
    subject: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    choice = server.post(path, **subject, **field, max_tokens=300, seed=1).json()["choices"][0]
    assert is_valid(choice["message"]["content"] if "chat" in path else choice["text"])


@pytest.mark.parametrize(
    "field",
    [
        {"grammar": 'root ::= "yes" | "no"'},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    ],
)
def test_a_choice_is_one_of_them_and_ends_by_itself(server: Running, field: dict[str, Any]) -> None:
    body = server.post("/v1/completions", prompt="x", n=8, **field, max_tokens=50, temperature=2.0, seed=3).json()
    assert {choice["text"] for choice in body["choices"]} == {"yes", "no"}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


def test_log_probabilities_stay_the_models_own(server: Running) -> None:
    ask: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0, "logprobs": True}
    free = server.client.chat.completions.create(**ask, top_logprobs=1)
    bound = server.client.chat.completions.create(**ask, top_logprobs=1, extra_body={"guided_choice": ["zzzz"]})
    assert free.choices[0].logprobs and free.choices[0].logprobs.content
    assert bound.choices[0].logprobs and bound.choices[0].logprobs.content
    assert bound.choices[0].message.content == "zzzz"
    assert bound.choices[0].logprobs.content[0].top_logprobs == free.choices[0].logprobs.content[0].top_logprobs
    assert bound.choices[0].logprobs.content[0].logprob < free.choices[0].logprobs.content[0].logprob
