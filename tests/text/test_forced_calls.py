"""Grammars of forced calls, in every dialect: a model that babbles makes calls of the schema that was asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from expertserve.engine.request import SamplingParams
from expertserve.engine.sampler import Sampler
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect
from expertserve.text.grammar import Grammar, GrammarCompiler, GrammarSource, schema_source
from tests.server.hash_world import EOS
from tests.text.dialects import SPOKEN, TOOLS, MarkTokenizer
from tests.text.test_answer import cut, joined
from tests.text.test_grammar import ENDING, follows

# Published notations that are read but not written.
_READ_ONLY = {"glm-4.7", "lfm-json", "llama-pythonic"}
DIALECTS = [name for name in SPOKEN if name not in _READ_ONLY]
CLOSED = {"type": "object", "additionalProperties": False}
# Strings that have no quotes end at a mark, which random tokens find soon only where the string is short.
SOME: dict[str, Any] = {
    "pick": {**CLOSED, "required": ["days"], "properties": {
        "days": {"enum": [1, 2]}, "city": {"type": "string", "maxLength": 3}, "unit": {"enum": ["C", "F"]},
        "on": {"type": "boolean"}, "deep": {**CLOSED, "properties": {"x": {"type": "null"}}, "required": ["x"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
    }, "$defs": {"leaf": {"type": "boolean"}}},
    "now": CLOSED,
}  # fmt: skip


def babble(tokenizer: MarkTokenizer, grammar: Grammar, seed: int, dialect: Dialect) -> list[str]:
    """What a model that knows nothing writes, as a parser gets it."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(seed=seed, constraint=grammar, logit_bias=ENDING))
    stream = tokenizer.stream(marks=dialect.marks.tokens)
    parts: list[str] = []
    tokens: list[int] = []
    while not sampler.ended:
        assert len(tokens) < 3000, "".join(parts)
        logits = rng.normal(0, 2, tokenizer.vocab_size).astype(np.float32)
        token = sampler.sample(logits, np.array(tokens, np.int32))
        if token in tokenizer.eog_ids:
            break
        tokens.append(token)
        parts.append(stream.push(token))
    return [*parts, stream.flush()]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_forced_call_is_one_whatever_the_model_prefers(name: str, tokens: bool, parallel: bool) -> None:
    tokenizer = MarkTokenizer(SPOKEN[name].special if tokens else ())
    dialect = SPOKEN[name].dialect(tokenizer.special_id)
    rules = dialect.forced_calls(SOME, opened=False, parallel=parallel)
    grammar = GrammarCompiler(tokenizer).compile(GrammarSource("lark", rules), "tools")
    seen, numbers = set(), set()
    for seed in range(10):
        _, content, calls = joined(cut(dialect, babble(tokenizer, grammar, seed, dialect), tools=SOME))
        assert content == ""
        numbers.add(len(calls))
        for tool, arguments in calls:
            seen.add(tool)
            jsonschema.Draft202012Validator(SOME[tool]).validate(json.loads(arguments))
    assert seen == {"pick", "now"} and (min(numbers) >= 1 if parallel else numbers == {1})


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("tokens", [True, False])
def test_what_the_model_would_write_follows_the_grammar(name: str, tokens: bool) -> None:
    """The calls of the published templates, in their order of fields."""
    tokenizer = MarkTokenizer(SPOKEN[name].special if tokens else ())
    dialect = SPOKEN[name].dialect(tokenizer.special_id)
    compiler = GrammarCompiler(tokenizer)
    for parallel in (False, True):
        rules = dialect.forced_calls(TOOLS, opened=False, parallel=parallel)
        grammar = compiler.compile(GrammarSource("lark", rules), "tools")
        written = _as_forced(name, SPOKEN[name].written)
        assert follows(grammar, tokenizer.spelt(written)) == parallel, written
        nothing = _as_forced(name, SPOKEN[name].nothing)
        assert follows(grammar, tokenizer.spelt(nothing)), nothing


def _as_forced(name: str, text: str) -> str:
    """Without what a template may write or not: spaces, ids."""
    for left_out in ("[CALL_ID]123456789", ', "id": "abcdefghi"', "<|python_start|>", "<|python_end|>"):
        text = text.replace(left_out, "")
    text = text.replace("[TOOL_CALLS] [", "[TOOL_CALLS][").replace("city='K\u00f6ln }'", 'city="K\u00f6ln }"')
    return (
        text.replace("[\n", "[").replace("\n]", "]").replace("},\n{", "}, {")
        if name == "hunyuan"
        else (text.replace("</invoke>\n</mini", "</invoke>\n</mini"))
    )


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_before_forced_calls_and_structures(name: str, opened: bool) -> None:
    marks = (*SPOKEN[name].special, "<think>", "</think>")
    for tokenizer in (MarkTokenizer(marks), MarkTokenizer(())):
        compiler = GrammarCompiler(tokenizer)
        dialect = dialect_of(f"{SPOKEN[name].template}<think></think>", tokenizer.special_id)
        before = "hm {\u00e9}</think>\n\n" if opened else "<think>\nhm {\u00e9}</think>\n\n"
        calls = dialect.forced_calls(TOOLS, opened=opened, parallel=True, otherwise=True)
        answer = schema_source({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
        grammar = compiler.compile(GrammarSource("lark", calls, answer), "tools")
        nothing = _as_forced(name, SPOKEN[name].nothing)
        for text in (nothing, '{"a": 1}'):
            assert follows(grammar, tokenizer.spelt(before + text)) == (opened or tokenizer.marks != {})
            assert follows(grammar, tokenizer.spelt(text)) != opened
        assert not follows(grammar, tokenizer.spelt(before + "no call"))
        rules = dialect.structured(opened)
        if not opened and tokenizer.marks == {}:  # a mark like any text would be mistaken for the structure's
            assert rules is None
            continue
        assert rules is not None
        choice = compiler.compile(GrammarSource("lark", rules, GrammarSource("choice", '["yes"]')), "guided_choice")
        assert follows(choice, tokenizer.spelt(before + "yes")) and not follows(choice, tokenizer.spelt(before))
        state = choice.start()
        if opened:
            assert not state.mask()[EOS]


def test_a_model_that_does_not_reason_has_nothing_before_a_structure() -> None:
    assert SPOKEN["hermes"].dialect().structured(False) is None
