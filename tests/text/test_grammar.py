"""Masks: a text made of masked tokens only is a text of the grammar, whatever the model prefers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from expertserve.engine.request import SamplingParams
from expertserve.engine.sampler import Sampler
from expertserve.errors import RequestError
from expertserve.text.grammar import (
    MAX_GRAMMAR_LENGTH,
    MAX_RULES_LENGTH,
    Grammar,
    GrammarCompiler,
    GrammarSource,
    schema_source,
)
from tests.server.hash_world import EOS, VOCAB, ByteTokenizer

COMPILER = GrammarCompiler(ByteTokenizer())
# Bytes that end strings, numbers and lists: without a liking for them a random text takes long to end.
ENDING = {ord(char): 4.0 for char in '"}],'} | {EOS: 4.0}


def random_text(grammar: Grammar, seed: int, limit: int = 4000) -> str:
    """What a model that knows nothing writes under the grammar."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(seed=seed, constraint=grammar, logit_bias=ENDING))
    tokens: list[int] = []
    while not sampler.ended:
        assert len(tokens) < limit, bytes(tokens)
        logits = rng.normal(0, 2, VOCAB).astype(np.float32)
        token = sampler.sample(logits, np.array(tokens, np.int32))
        if token == EOS:
            break
        tokens.append(token)
    return bytes(tokens).decode()


def follows(grammar: Grammar, tokens: str | list[int]) -> bool:
    """Whether a text, or tokens, are of the grammar and may end there."""
    state = grammar.start()
    for token in tokens.encode() if isinstance(tokens, str) else tokens:
        if state.ended or not state.mask()[token]:
            return False
        state.accept(token)
    return state.ended or bool(state.mask()[EOS])


def random_schema(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "ref"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = kinds[rng.integers(len(kinds))] if depth else "object"
    low = int(rng.integers(0, 4))
    high = low + int(rng.integers(0, 5))
    if kind == "string":
        forms: list[dict[str, Any]] = [{"minLength": low, "maxLength": high}, {"pattern": "^[a-f]{2,5}-[0-9]+$"}]
        forms += [{"format": "date"}, {"format": "uuid"}]
        return {"type": "string", **forms[rng.integers(len(forms))]}
    if kind == "integer":
        return {"type": "integer", "minimum": -low * 100, "maximum": high * 1000}
    if kind == "enum":
        return {"enum": [["a", "b"], ["\u00e4\u00f6", 5, None, True], ['"quoted"', "back\\slash"]][rng.integers(3)]}
    if kind == "const":
        return {"const": [{"x": [1]}, "fixed", 17][rng.integers(3)]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": high}
    if kind == "object":
        names = [f"p{i}" for i in range(int(rng.integers(1, 5)))]
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_schemas_give_json_that_is_valid_by_them(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        schema = random_schema(np.random.default_rng(seed))
        schema["$defs"] = {"leaf": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"],
                                    "additionalProperties": False}}  # fmt: skip
        text = random_text(COMPILER.compile(schema_source(schema), "response_format"), seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_any_object_is_an_object() -> None:
    grammar = COMPILER.compile(schema_source({"type": "object"}), "response_format")
    for seed in range(20):
        assert isinstance(json.loads(random_text(grammar, seed)), dict)


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (GrammarSource("choice", '["yes", "no"]'), {"yes", "no"}),
        (GrammarSource("regex", "a|bc"), {"a", "bc"}),
        (GrammarSource("gbnf", 'root ::= "x" tail\ntail ::= "1" | "2"'), {"x1", "x2"}),
        (GrammarSource("lark", 'start: "q" /[rs]/'), {"qr", "qs"}),
    ],
)
def test_each_kind_of_grammar_gives_its_texts_and_no_other(source: GrammarSource, texts: set[str]) -> None:
    grammar = COMPILER.compile(source, "grammar")
    assert {random_text(grammar, seed) for seed in range(30)} == texts


def test_states_of_one_grammar_do_not_meet() -> None:
    grammar = COMPILER.compile(GrammarSource("choice", '["ab", "cd"]'), "grammar")
    first, second = grammar.start(), grammar.start()
    first.mask()
    first.accept(ord("a"))
    assert np.flatnonzero(first.mask()).tolist() == [ord("b")]
    assert np.flatnonzero(second.mask()).tolist() == [ord("a"), ord("c")]


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("json_schema", '{"type": "nothing"}'),
        GrammarSource("json_schema", '{"not": {"type": "string"}}'),
        GrammarSource("regex", "(?=a)b"),
        GrammarSource("regex", "(" * 50_000),
        GrammarSource("gbnf", "root ::= " + "(" * 5000),
        GrammarSource("gbnf", "root ::= missing"),
        GrammarSource("lark", "x" * 300_000),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(source: GrammarSource) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(source, "the.field")
    assert caught.value.param == "the.field"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (GrammarSource("choice", '["yes", "no"]'), "yes"),
        (GrammarSource("regex", "[a-f]+/x"), "abc/x"),
        (GrammarSource("gbnf", 'root ::= "x" tail\ntail ::= "1" | "2"'), "x2"),
        (schema_source({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}), '{"a": 1}'),
    ],
)
def test_a_grammar_may_be_a_part_of_another(structure: GrammarSource, text: str) -> None:
    grammar = COMPILER.compile(GrammarSource("lark", 'start: "<" @structure ">"', structure), "grammar")
    assert follows(grammar, f"<{text}>") and not follows(grammar, text) and not follows(grammar, f"<{text}!>")


def chained(kind: str) -> GrammarSource:
    """Rules that refer to each other as far as the longest grammar has room for."""
    if kind == "gbnf":
        count = MAX_RULES_LENGTH // 20
        rules = [f"r{i} ::= r{i + 1}" for i in range(count)]
        return GrammarSource("gbnf", "\n".join(["root ::= r0", *rules, f'r{count} ::= "x"']))
    count = MAX_GRAMMAR_LENGTH // 60
    definitions: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    return schema_source({"$defs": {**definitions, f"d{count}": {"const": "x"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(("kind", "text"), [("gbnf", "x"), ("json_schema", '"x"')])
def test_rules_may_refer_to_rules_as_deep_as_a_grammar_may_be_long(kind: str, text: str) -> None:
    assert follows(COMPILER.compile(chained(kind), "grammar"), text)


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("gbnf", "root ::= root"),
        schema_source({"$ref": "#"}),
        schema_source({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ],
)
def test_a_grammar_that_no_text_follows_is_refused(source: GrammarSource) -> None:
    with pytest.raises(RequestError, match="'grammar' cannot be used") as caught:
        COMPILER.compile(source, "grammar")
    assert caught.value.code == "invalid_grammar" and caught.value.http_status == 400


def test_a_grammar_too_wide_to_follow_is_the_requests_fault() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    state = COMPILER.compile(schema_source(wide), "grammar").start()
    with pytest.raises(RequestError, match="cannot be followed") as caught:
        for byte in b'{"p':
            state.accept(byte)
            state.mask()
    assert "<state>" not in str(caught.value) and caught.value.code == "invalid_grammar"


def test_rules_that_take_long_to_compile_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 65536 are compiled"):
        COMPILER.compile(GrammarSource("gbnf", "root ::= " + '"a" ' * (MAX_RULES_LENGTH // 4)), "grammar")
