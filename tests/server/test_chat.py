"""Chat completions through the real client."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.hash_world import BOS, MODEL
from tests.server.worlds import Running

HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 24}


def test_answer_is_the_models_with_usage_and_names(server: Running) -> None:
    answer = server.client.chat.completions.create(messages=HELLO, **GREEDY)
    expected = server.world.expect("user:hello\nassistant:", max_tokens=24)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.reason
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", MODEL, "fp_test")
    assert answer.id.startswith("chatcmpl-") and answer.created > 1_600_000_000
    assert answer.usage is not None
    prompt_tokens = len("user:hello\nassistant:") + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, len(expected.tokens))
    assert answer.usage.total_tokens == prompt_tokens + len(expected.tokens)
    timings = answer.model_extra["timings"] if answer.model_extra else {}
    assert timings["predicted_n"] == len(expected.tokens) and timings["predicted_ms"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == prompt_tokens


def test_next_turn_of_a_chat_counts_the_reused_prefix(server: Running) -> None:
    opening = "a conversation that nobody else had"
    first = server.client.chat.completions.create(messages=[{"role": "user", "content": opening}], **GREEDY)
    again = server.client.chat.completions.create(messages=[{"role": "user", "content": opening}], **GREEDY)
    assert first.usage is not None and again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize("include_usage", [False, True])
def test_stream_says_what_the_whole_answer_says(server: Running, include_usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(server.client.chat.completions.create(messages=HELLO, stream=True, **GREEDY, **options))
    expected = server.world.expect("user:hello\nassistant:", max_tokens=24)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.text
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [expected.reason]
    assert choices[-1].finish_reason == expected.reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert {(chunk.object, chunk.model) for chunk in chunks} == {("chat.completion.chunk", MODEL)}
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    if include_usage:
        assert chunks[-1].choices == [] and chunks[-1].usage is usages[0]
        assert usages[0].completion_tokens == len(expected.tokens)
    else:
        assert usages == []
        assert (chunks[-1].model_extra or {})["timings"]["predicted_n"] == len(expected.tokens)


def test_stream_ends_with_done_and_is_not_buffered(server: Running) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 3, "temperature": 0}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


def test_logprobs_are_the_models_own_with_bytes(server: Running) -> None:
    answer = server.client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    prompt = server.world.tokenizer.encode("user:hello\nassistant:")
    expected = server.world.expect(prompt, max_tokens=24)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = answer.choices[0].logprobs.content
    assert [bytes(entry.bytes or []) for entry in entries] == [bytes([token]) for token in expected.tokens]
    logits = server.world.oracle.logits(prompt)[-1].astype(float)
    best = sorted(range(len(logits)), key=lambda id: -logits[id])[:3]
    total = math.log(sum(math.exp(value) for value in logits))
    assert [entry.bytes for entry in entries[0].top_logprobs] == [[id] for id in best]
    for entry, id in zip(entries[0].top_logprobs, best, strict=True):
        assert entry.logprob == pytest.approx(logits[id] - total, abs=1e-4)
    assert entries[0].logprob == entries[0].top_logprobs[0].logprob
    for entry in entries:
        raw = bytes(entry.bytes or [])
        assert entry.token == (raw.decode() if raw[0] < 128 else f"bytes:\\x{raw[0]:02x}")


def test_streamed_logprobs_equal_the_whole_answers(server: Running) -> None:
    whole = server.client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY)
    stream = server.client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, stream=True, **GREEDY)
    streamed = [
        entry
        for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content


def test_no_logprobs_unless_asked_for(server: Running) -> None:
    answer = server.client.chat.completions.create(messages=HELLO, **GREEDY)
    assert answer.choices[0].logprobs is None


def test_stop_ends_the_text_before_the_string_streamed_or_not(server: Running) -> None:
    text = server.world.chat_text("stop here", max_tokens=40)
    stop = text[4:7]
    body: Any = {"messages": [{"role": "user", "content": "stop here"}], "stop": [stop, "never said"], **GREEDY}
    whole = server.client.chat.completions.create(**body)
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(server.client.chat.completions.create(stream=True, **body))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text[: text.index(stop)]


def test_seed_repeats_and_choices_of_n_are_the_next_seeds(server: Running) -> None:
    def ask(seed: int, n: int) -> list[str | None]:
        sampled: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 1.5}
        answer = server.client.chat.completions.create(seed=seed, n=n, **sampled)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    three = ask(7, 3)
    assert three == ask(7, 3)
    assert len(set(three)) == 3
    assert three == ask(7, 1) + ask(8, 1) + ask(9, 1)


def test_n_choices_stream_apart_and_count_the_prompt_once(server: Running) -> None:
    sampled: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 1.5, "seed": 3, "n": 3}
    whole = server.client.chat.completions.create(**sampled)
    texts = ["", "", ""]
    usage = None
    for chunk in server.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **sampled):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage is not None and usage is not None
    assert whole.usage.prompt_tokens == usage.prompt_tokens == len("user:hello\nassistant:") + 1
    assert whole.usage.completion_tokens == usage.completion_tokens > 12


def test_eight_streams_at_once_each_get_their_own_answer(server: Running) -> None:
    def ask(number: int) -> str:
        stream = server.client.chat.completions.create(
            messages=[{"role": "user", "content": f"client {number}"}], stream=True, **GREEDY
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [server.world.chat_text(f"client {number}", max_tokens=24) for number in range(8)]


def test_parts_roles_tools_and_template_arguments_reach_the_template(server: Running) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": "result", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    body = {"messages": messages, "tools": tools, "max_tokens": 8, "temperature": 0}
    options = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    prompt = (
        "{'enable_thinking': False, 'reasoning_effort': 'low'}\ntools:['look']\n"
        "system:be brief\nuser:one\ntwo\nassistant:\ntool:result\nassistant:"
    )
    answer = server.post("/v1/chat/completions", **body, **options).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt) + 1
    assert answer["choices"][0]["message"]["content"] == server.world.expect(prompt, max_tokens=8).text
    without = server.post("/v1/chat/completions", **body, tool_choice="none").json()
    assert without["usage"]["prompt_tokens"] == len(prompt[prompt.index("system") :]) + 1


def test_sampling_fields_reach_the_sampler_under_all_their_names(server: Running) -> None:
    def text(**fields: Any) -> Any:
        body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, **fields}
        return server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]

    def expected(**params: Any) -> str:
        return server.world.chat_text("hello", max_tokens=12, **params)

    assert text(logit_bias={"65": 100}) == "A" * 12
    assert text(logit_bias={"65": 100}, max_tokens=2, max_completion_tokens=3) == "AAA"
    sampled = {"temperature": 2.0, "seed": 11}
    for name, value in {"top_k": 3, "top_p": 0.2, "min_p": 0.4}.items():
        assert text(**sampled, **{name: value}) == expected(**sampled, **{name: value}) != expected(**sampled)
    bias: Any = {65: 8.0}
    assert set(expected(logit_bias=bias)) == {"A"}
    for name in ("presence_penalty", "frequency_penalty", "repeat_penalty"):
        penalised = expected(logit_bias=bias, **{name: 2.0})
        assert text(logit_bias={"65": 8.0}, **{name: 2.0}) == penalised != "A" * 12
    forgetful = expected(logit_bias=bias, repeat_penalty=1.5, repeat_last_n=1)
    assert text(logit_bias={"65": 8.0}, repetition_penalty=1.5, repeat_last_n=1) == forgetful
    assert forgetful != expected(logit_bias=bias, repeat_penalty=1.5)


def test_ignore_eos_goes_on_past_the_end(server: Running) -> None:
    def reason(**fields: Any) -> Any:
        body = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "logit_bias": {"257": 100}, **fields}
        return server.post("/v1/chat/completions", **body).json()["choices"][0]["finish_reason"]

    assert reason() == "stop"
    assert reason(ignore_eos=True) == "length"


def test_minus_one_means_no_limit_but_the_context(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": -1, "temperature": 0, "logit_bias": {"65": 100}}
    answer = server.post("/v1/chat/completions", **body).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_unknown_fields_are_tolerated_and_the_model_may_go_unnamed_or_by_another_name(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "store": True, "user": "me", "metadata": {"a": "b"}, "zork": [1]}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    assert server.post("/v1/chat/completions", model="other-name", **body).json()["model"] == MODEL


def test_the_prompt_begins_with_one_bos(server: Running) -> None:
    tokens = server.post("/tokenize", messages=HELLO).json()["tokens"]
    assert tokens == [BOS, *b"user:hello\nassistant:"]
