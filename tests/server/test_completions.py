"""Text completions: as harnesses use them, exact in every number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.server.hash_world import BOS, EOS, MODEL, VOCAB
from tests.server.worlds import Running

GREEDY: Any = {"model": MODEL, "temperature": 0}


def logprobs_of(server: Running, ids: list[int]) -> Any:
    """What the model says about the token after each position, [len(ids), vocab]."""
    logits = server.world.oracle.logits(ids).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_default_is_sixteen_tokens_without_echo(server: Running) -> None:
    answer = server.client.completions.create(prompt="once", **GREEDY)
    expected = server.world.expect("once", max_tokens=16)
    assert answer.choices[0].text == expected.text
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", expected.reason)
    assert answer.usage is not None and answer.usage.completion_tokens == len(expected.tokens) == 16
    assert answer.choices[0].logprobs is None and answer.id.startswith("cmpl-")


def test_prompts_of_every_form_give_their_choices_in_order(server: Running) -> None:
    ids = [BOS, 104, 105]
    expected = [server.world.expect(ids, max_tokens=5).text, server.world.expect([5, 6, 7], max_tokens=5).text]

    def texts(prompt: Any, **fields: Any) -> list[str]:
        answer = server.client.completions.create(prompt=prompt, max_tokens=5, **fields, **GREEDY)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts("hi") == texts(["hi"]) == texts(ids) == texts([ids]) == expected[:1]
    assert texts([ids, [5, 6, 7]]) == expected
    assert texts(["hi", "hi"]) == expected[:1] * 2
    assert texts([ids, [5, 6, 7]], n=2) == [expected[0], expected[0], expected[1], expected[1]]


def test_usage_counts_each_prompt_once(server: Running) -> None:
    answer = server.client.completions.create(prompt=[[1, 2, 3], [4, 5]], n=2, max_tokens=4, **GREEDY)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


def test_special_tokens_of_a_text_prompt_can_be_left_out(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="hi", add_special_tokens=False, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_all_logprobs_of_a_token_prompt_is_exact(server: Running, max_tokens: int) -> None:
    ids = [72, 195, 164, 7, 200, 33]
    answer = server.post(
        "/v1/completions",
        prompt=ids,
        echo=True,
        logprobs=VOCAB,
        max_tokens=max_tokens,
        temperature=0,
        return_tokens_as_token_ids=True,
    ).json()
    choice = answer["choices"][0]
    generated = server.world.expect(ids, max_tokens=max_tokens).tokens
    assert answer["usage"]["completion_tokens"] == max_tokens == len(generated)
    assert choice["finish_reason"] == "length"
    lists = choice["logprobs"]
    assert lists["tokens"] == [f"token_id:{id}" for id in ids + generated]
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    expected = logprobs_of(server, ids)
    for position, top in enumerate(lists["top_logprobs"][1:]):
        assert len(top) == VOCAB
        got = [top[f"token_id:{id}"] for id in range(VOCAB)]
        assert np.abs(np.array(got) - expected[position]).max() < 1e-4
        assert list(top.values()) == sorted(top.values(), reverse=True)
    for position, id in enumerate((ids + generated)[1:]):
        assert lists["token_logprobs"][position + 1] == lists["top_logprobs"][position + 1][f"token_id:{id}"]


def test_echo_gives_the_prompt_back_with_offsets_into_the_text(server: Running) -> None:
    prompt = "na\u00efve \U0001f600!"
    answer = server.client.completions.create(prompt=prompt, echo=True, logprobs=1, max_tokens=6, **GREEDY)
    generated = server.world.expect(prompt, max_tokens=6)
    choice = answer.choices[0]
    assert choice.text == prompt + generated.text
    assert choice.logprobs is not None and choice.logprobs.text_offset and choice.logprobs.tokens
    # BOS is in the lists, not in the text; the bytes of a character begin where the character does.
    of_prompt = [0, *(at for at, char in enumerate(prompt) for _ in char.encode())]
    assert choice.logprobs.text_offset[: len(of_prompt)] == of_prompt
    assert choice.logprobs.tokens[0] == "<s>" and choice.logprobs.tokens[1] == "n"
    assert choice.logprobs.tokens[3:5] == ["bytes:\\xc3", "bytes:\\xaf"]
    offsets = choice.logprobs.text_offset[len(of_prompt) :]
    assert len(offsets) == 6 and offsets[0] == len(prompt) and offsets == sorted(offsets)
    assert offsets[-1] <= len(choice.text)


def test_offsets_cut_the_text_into_its_tokens(server: Running) -> None:
    bias = {"97": 100}
    answer = server.post(
        "/v1/completions", prompt="xyz", logprobs=0, max_tokens=4, temperature=0, logit_bias=bias, echo=True
    ).json()
    choice = answer["choices"][0]
    ends = [*choice["logprobs"]["text_offset"][1:], len(choice["text"])]
    cut = [choice["text"][a:b] for a, b in zip(choice["logprobs"]["text_offset"], ends, strict=True)]
    assert cut == ["", *choice["logprobs"]["tokens"][1:]] == ["", "x", "y", "z", "a", "a", "a", "a"]


def test_echo_without_logprobs_is_only_text(server: Running) -> None:
    answer = server.client.completions.create(prompt="pre", echo=True, max_tokens=0, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == ("pre", None)
    by_ids = server.client.completions.create(prompt=[112, 114, 101], echo=True, max_tokens=0, **GREEDY)
    assert by_ids.choices[0].text == "pre"


def test_candidates_hold_the_chosen_token_beside_the_best(server: Running) -> None:
    sampled: Any = {"temperature": 2.0, "seed": 5, "max_tokens": 8, "prompt": "x"}
    zero = server.post("/v1/completions", logprobs=0, **sampled).json()["choices"][0]["logprobs"]
    two = server.post("/v1/completions", logprobs=2, **sampled).json()["choices"][0]["logprobs"]
    assert zero["tokens"] == two["tokens"] and zero["token_logprobs"] == two["token_logprobs"]
    for token, value, none, top in zip(
        two["tokens"], two["token_logprobs"], zero["top_logprobs"], two["top_logprobs"], strict=True
    ):
        assert none == {token: value}
        assert top[token] == value and len(top) in (2, 3)
        assert math.isclose(max(top.values()), next(iter(top.values())))


def test_the_token_that_ends_the_text_is_in_the_lists(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="x", logprobs=0, max_tokens=4, logit_bias={str(EOS): 100}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "stop", ["</s>"])


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 2, "n": 2}])
def test_stream_equals_the_whole_answer(server: Running, fields: dict[str, Any]) -> None:
    body: Any = {"prompt": ["first", "second"], "max_tokens": 10, "seed": 1, "model": MODEL, **fields}
    whole = server.client.completions.create(**body)
    count = len(whole.choices)
    texts, reasons = [""] * count, [""] * count
    lists: list[dict[str, list[Any]]] = [{} for _ in range(count)]
    stream = server.client.completions.create(stream=True, stream_options={"include_usage": True}, **body)
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                lists[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert lists == [choice.logprobs.model_dump() if choice.logprobs else {} for choice in whole.choices]
    assert whole.usage is not None and usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_huge_answer_of_logprobs_is_whole(server: Running) -> None:
    """Written in a worker thread."""
    ids = list(range(100, 150))
    answer = server.post("/v1/completions", prompt=ids, echo=True, logprobs=VOCAB, max_tokens=1, temperature=0).json()
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert len(tops) == 51 and all(len(top) == VOCAB for top in tops[1:])
