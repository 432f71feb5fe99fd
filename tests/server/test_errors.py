"""Every refusal: its status and its body, which always is an OpenAI error object."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertserve.errors import ExpertReadError
from expertserve.models.batch import Batch
from expertserve.server.body import MAX_MARKS
from expertserve.server.protocol import ChatBody, CompletionBody
from tests.server.hash_world import CONTEXT, MODEL, VOCAB, ByteTokenizer, World
from tests.server.worlds import Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BAD_TOOL: Any = {"type": "function", "function": {"name": "bad", "parameters": {"type": "wrong"}}}
NAMED: Any = {"type": "function", "function": {"name": "missing"}}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "0.5", "temperature"),
        ("temperature", -1, "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("top_k", 1.5, "top_k"),
        ("min_p", -0.1, "min_p"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", -2, "max_tokens"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("stop", [""], "stop"),
        ("stop", 5, "stop"),
        ("stop", ["x"] * 65, "stop"),
        ("stop", "x" * 1025, "stop"),
        ("seed", "x", "seed"),
        ("seed", 2**63, "seed"),
        ("stream", "yes", "stream"),
        ("stream", 1, "stream"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("repeat_penalty", 0, "repeat_penalty"),
        ("repetition_penalty", -1, "repetition_penalty"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {str(VOCAB): 1}, "logit_bias"),
        ("logit_bias", [1], "logit_bias"),
        ("model", 5, "model"),
        ("user", 5, "user"),
        ("stream_options", {"include_usage": "x"}, "stream_options.include_usage"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("ignore_eos", "no", "ignore_eos"),
        ("grammar", "root ::= x", "grammar"),
        ("grammar", "root ::= (", "grammar"),
        ("grammar", 5, "grammar"),
        ("grammar", "x" * (1 << 18 | 1), "grammar"),
        ("guided_json", {"type": "wrong"}, "guided_json"),
        ("guided_json", "{", "guided_json"),
        ("guided_regex", "(", "guided_regex"),
        ("guided_choice", "yes", "guided_choice"),
        ("json_schema", {"not": {}}, "json_schema"),
        ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
        ("structured_outputs", {"choice": 1}, "structured_outputs.choice"),
        ("structured_outputs", {"json_object": True, "regex": "a"}, "structured_outputs.regex"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "object", "minProperties": "x"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_field_that_cannot_be_used_is_named(server: Running, path: str, field: str, value: Any, param: str) -> None:
    subject: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    error = error_of(server.post(path, **subject, **{field: value}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": HELLO, "tools": {}}, "tools"),
        ({"messages": HELLO, "tools": [{}]}, "tools[0].type"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tool_choice": "always", "tools": [TOOL]}, "tool_choice"),
        ({"messages": HELLO, "tool_choice": NAMED, "tools": [TOOL]}, "tool_choice"),
        ({"messages": HELLO, "tools": [TOOL, TOOL]}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"messages": HELLO, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "grammar": 'root ::= "x"'}, "grammar"),
        ({"messages": HELLO, "functions": [{}]}, "functions"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": VOCAB + 1}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "max_completion_tokens": 0.5}, "max_completion_tokens"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": HELLO, "chat_template_kwargs": {"fail": True, "self": 1}}, "messages"),
        ({"messages": HELLO, "repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
def test_what_only_chat_has_is_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post(CHAT, **body), 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 1025, "n": 2}, "n"),
        ({"prompt": "x", "logprobs": VOCAB + 1}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
    ],
)
def test_what_only_completions_have_is_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.http.post(TEXT, content=json.dumps(body), headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == param


def test_best_of_equal_to_n_and_empty_unserved_fields_pass(server: Running) -> None:
    body = {"prompt": "x", "n": 2, "best_of": 2, "suffix": None, "grammar": "", "max_tokens": 1}
    assert server.post(TEXT, **body).status_code == 200


def test_unknown_model_is_404_through_the_client(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="gpt-nothing", messages=HELLO)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert MODEL in str(caught.value)
    assert error_of(server.post(TEXT, prompt="x", model="nope"), 404)["code"] == "model_not_found"
    assert error_of(server.http.get("/v1/models/nope"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_refused_before_it_queues(server: Running, stream: bool) -> None:
    before = server.world.engine.snapshot()["rows"]
    response = server.post(TEXT, prompt=[7] * CONTEXT, stream=stream)
    error = error_of(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * CONTEXT}])
    assert caught.value.code == "context_length_exceeded"
    assert server.world.engine.snapshot()["rows"] == before


class Refusing(ByteTokenizer):
    """Fails on a text that no context holds."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert len(text) <= CONTEXT + 1, "encoded in vain"
        return super().encode(text, add_special=add_special, parse_special=parse_special)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    long = "x" * 4 * CONTEXT
    said = [{"role": "user", "content": long}]
    with running(World(tokenizer=Refusing())) as server:
        for path, body in (
            (TEXT, {"prompt": long}),
            (TEXT, {"prompt": ["short", long]}),
            (CHAT, {"messages": said}),
            ("/v1/responses", {"input": long}),
            ("/v1/messages", {"messages": said, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": said}),
        ):
            error = error_of(server.post(path, **body), 400)
            assert error["code"] == "context_length_exceeded" and error["param"] in body
            least = re.search(r"resulted in at least (\d+) tokens", error["message"])
            assert least and 4 * CONTEXT <= int(least[1]) < 4 * CONTEXT + 20
        assert server.post(TEXT, prompt="x" * (CONTEXT - 2), max_tokens=1).status_code == 200


def test_a_prompt_that_fills_the_context_can_be_evaluated_but_not_continued(server: Running) -> None:
    full = [7] * CONTEXT
    assert server.post(TEXT, prompt=full, max_tokens=0).status_code == 200
    assert server.post(TEXT, prompt=full, max_tokens=1).status_code == 400
    assert server.post(TEXT, prompt=full[1:], max_tokens=5).json()["usage"]["completion_tokens"] == 1


def test_one_prompt_too_long_among_many_starts_none(server: Running) -> None:
    before = server.world.engine.snapshot()["rows"]
    error_of(server.post(TEXT, prompt=[[1, 2], [7] * CONTEXT]), 400)
    assert server.world.engine.snapshot()["rows"] == before


def test_more_logprobs_than_fit_memory_are_refused() -> None:
    with running(World(), max_logprob_entries=1000) as server:
        body = {"prompt": [1, 2, 3, 4], "echo": True, "max_tokens": 0}
        assert server.post(TEXT, **body, logprobs=200).status_code == 200
        assert error_of(server.post(TEXT, **body, logprobs=VOCAB), 400)["param"] == "logprobs"


POSTS = [
    *(CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
]


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_no_object_of_json_is_400_and_says_why(server: Running, path: str) -> None:
    for content, reason in (
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x",}', "not valid JSON"),
        (b"[1]", "dictionary"),
        (b"5", "dictionary"),
        (b"null", "empty|dictionary"),
        (b'{"prompt": "\xff"}', "not UTF-8 text: byte 12"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"x": ' + b"1" * 5000 + b"}", "cannot be read: Exceeds the limit"),
    ):
        error = error_of(server.http.post(path, content=content), 400)
        assert error["type"] == "invalid_request_error" and re.search(reason, error["message"]), content[:20]


def test_a_number_that_is_none_is_refused(server: Running) -> None:
    for number in (b"NaN", b"Infinity", b"1e999", b"1" * 5000):
        content = b'{"prompt": "x", "temperature": ' + number + b"}"
        error_of(server.http.post(TEXT, content=content, headers={"content-type": "application/json"}), 400)


FORM = "application/x-www-form-urlencoded"


def raw_status(server: Running, *headers: str) -> tuple[int, bytes]:
    """A request as it goes over the wire, with these headers and no others but what HTTP wants."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    address = server.url.removeprefix("http://")
    head = [f"POST {TEXT} HTTP/1.1", f"Host: {address}", "Connection: close", f"Content-Length: {len(body)}", *headers]
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode() + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("kind", ["", f"Content-Type: {FORM}", "Content-Type: text/plain", "Content-Type: wrong"])
def test_a_body_is_json_whatever_it_is_called(server: Running, kind: str) -> None:
    own = f"Origin: {server.url}"
    rewritten = ("Origin: https://chat.example", "Sec-Fetch-Site: same-origin")  # a proxy before us changed the host
    for origin in ((), (own,), rewritten):
        assert raw_status(server, *filter(None, (kind, *origin)))[0] == 200


@pytest.mark.parametrize("kind", ["", f"Content-Type: {FORM}", "Content-Type: text/plain; x=application/json"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "https://"])
def test_what_a_browser_sends_for_a_page_from_elsewhere_without_asking_is_403(
    server: Running, kind: str, origin: str
) -> None:
    before = server.world.engine.snapshot()["rows"]
    for site in ("", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"):
        status, answer = raw_status(server, *filter(None, (kind, f"Origin: {origin}", site)))
        assert status == 403 and b"origin_not_allowed" in answer and origin.encode() in answer
    assert server.world.engine.snapshot()["rows"] == before


def test_an_origin_that_is_allowed_may_send_what_it_likes() -> None:
    for allowed, status in ((("https://chat.example",), 200), (("*",), 200), (("https://other.example",), 403)):
        with running(World(), cors_origins=allowed) as server:
            assert raw_status(server, "Content-Type: text/plain", "Origin: https://chat.example")[0] == status


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_without_a_content_type_is_answered(server: Running) -> None:
    said = ["curl", "-sS", server.url + CHAT, "-d", '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}']
    answer = json.loads(subprocess.run(said, check=True, capture_output=True).stdout)
    assert answer["object"] == "chat.completion"


@pytest.mark.parametrize("value", [b"[]", b"{}", b"5"])
def test_a_body_of_millions_of_values_is_413_before_it_is_made_into_objects(server: Running, value: bytes) -> None:
    content = b'{"prompt": "x", "max_tokens": 1, "x": [' + value + (b"," + value) * MAX_MARKS + b"]}"
    assert "commas" in error_of(server.http.post(TEXT, content=content), 413)["message"]
    assert server.post(TEXT, prompt="x", max_tokens=1, x=[0] * 10_000).status_code == 200


def test_unknown_path_is_404_and_wrong_method_405(server: Running) -> None:
    error = error_of(server.http.get("/v1/nothing"), 404)
    assert (error["code"], error["type"]) == ("unknown_url", "not_found_error")
    response = server.http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(server.http.delete("/v1/models"), 405)


def test_missing_and_wrong_keys_are_401_and_every_key_works() -> None:
    with running(World(), api_keys=("first-key", "second-k\u00e9y")) as server:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "first-key"}, {"x-api-key": "no"}):
            with httpx.Client(base_url=server.url, headers=headers) as stranger:
                response = stranger.post(CHAT, json={"messages": HELLO})
                error = error_of(response, 401)
                assert (error["code"], response.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")
                error_of(stranger.get("/metrics"), 401)
                error_of(stranger.get("/nowhere"), 401)
                assert stranger.get("/health").status_code == 200
        for good in ({"authorization": "bearer first-key"}, {"x-api-key": "second-k\u00e9y"}):
            encoded = {name: value.encode() for name, value in good.items()}
            assert httpx.get(server.url + "/v1/models", headers=encoded).status_code == 200
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        assert server.client.models.list().data[0].id == MODEL


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_body_is_413_and_a_client_that_only_reads_afterwards_gets_it(chunked: bool) -> None:
    with running(World(), max_body_bytes=10_000) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1, "padding": "y" * 20_000_000}).encode()
        content: Any = (body[at : at + 500_000] for at in range(0, len(body), 500_000)) if chunked else body
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        with closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", TEXT, content, headers, encode_chunked=chunked)
            response = connection.getresponse()
            assert response.status == 413
            assert "10000 bytes" in json.loads(response.read())["error"]["message"]
        assert server.post(TEXT, prompt="x", padding="y" * 9000, max_tokens=1).status_code == 200


FIELDS = sorted((ChatBody.model_fields | CompletionBody.model_fields).keys() - {"max_tokens", "max_completion_tokens"})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3))
def test_no_value_of_any_field_is_the_servers_fault(server: Running, path: str, fields: dict[str, Any]) -> None:
    subject: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    content = json.dumps({**subject, "max_tokens": 1, **fields})
    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert error_of(response, response.status_code)["type"] == "invalid_request_error"
        assert response.status_code in (400, 404)


def fail_after(steps: int) -> Any:
    seen = 0

    def fault(batch: Batch) -> None:
        nonlocal seen
        seen += 1
        if seen > steps:
            raise ExpertReadError("expert 3 of layer 1: read 0 of 4096 bytes")

    return fault


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_failed_read_is_500_by_name_and_the_server_lives_on(server: Running, path: str) -> None:
    server.world.fault(fail_after(3))
    subject: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    error = error_of(server.post(path, **subject), 500)
    assert (error["type"], error["message"]) == ("server_error", "expert 3 of layer 1: read 0 of 4096 bytes")
    server.world.heal()
    assert server.post(path, **subject, max_tokens=1).status_code == 200


def test_a_failure_in_mid_stream_is_an_event_then_the_end(server: Running) -> None:
    server.world.fault(fail_after(4))
    body = {"prompt": "abc", "stream": True, "temperature": 0}
    with server.http.stream("POST", TEXT, json=body) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert lines[-1]["error"]["message"].startswith("expert 3") and lines[-1]["error"]["type"] == "server_error"
    text = "".join(line["choices"][0]["text"] for line in lines[:-1])
    expected = server.world.expect("abc", max_tokens=16).text
    assert text and text != expected and expected.startswith(text)


def test_the_client_raises_on_an_error_in_mid_stream(server: Running) -> None:
    server.world.fault(fail_after(4))
    stream = server.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, temperature=0)
    with pytest.raises(openai.APIError, match="expert 3"):
        list(stream)


def test_one_failed_choice_ends_the_others() -> None:
    world = World()
    with running(world) as server:
        world.fault(fail_after(5))
        error_of(server.post(TEXT, prompt="x", n=3, max_tokens=100, temperature=1), 500)
        world.heal()
        world.wait_for("requests_running", 0)
