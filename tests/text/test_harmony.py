"""gpt-oss's harmony: channels, recipients, tokens that are marks, and its forced forms."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.text.answer import Piece
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.harmony import SPELLINGS, HarmonyDialect
from expertserve.text.grammar import GrammarCompiler, GrammarSource, schema_source
from tests.text.dialects import TOOLS, MarkTokenizer
from tests.text.test_answer import cut, in_parts, joined
from tests.text.test_forced_calls import SOME, babble
from tests.text.test_grammar import follows

TEMPLATE = "<|start|>assistant<|channel|>final<|message|>"
TOKENIZER = MarkTokenizer(SPELLINGS, ("<|call|>", "<|return|>"))
PLAIN = dialect_of(TEMPLATE, lambda text: None)
TOKENS = dialect_of(TEMPLATE, TOKENIZER.special_id)
ANALYSIS = "<|channel|>analysis<|message|>We need <b>.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '{"city": "K\u00f6ln }", "days": 3}'
CALLS = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather <|constrain|> json<|message|>",
    "<|channel|>commentary to=functions.weather json<|message|>",
    "<|channel|>commentary to=functions.weather code<|message|>",
    "<|channel|>analysis to=functions.weather <|message|>",
    " to=functions.weather<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=weather<|constrain|>json<|message|>",
)


def tokens_of(text: str) -> list[str]:
    """A text whose marks are tokens, as a parser gets it."""
    stream = TOKENIZER.stream(marks=TOKENS.marks.tokens)
    return [stream.push(token) for token in TOKENIZER.spelt(text)]


def both(text: str, **options: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """The parts, which are the same whether marks are tokens or text, and however the text is split."""
    parts = joined(cut(TOKENS, tokens_of(text), **options))
    for size in (1, 4, 1000):
        assert joined(cut(PLAIN, in_parts(text, size), **options)) == parts
    return parts


def test_the_dialect_is_told_from_the_template() -> None:
    assert isinstance(PLAIN, HarmonyDialect)


def test_analysis_is_reasoning_and_final_is_content() -> None:
    assert both(f"{ANALYSIS}{FINAL}So:\n\n1 < 2.") == ("We need <b>.", "So:\n\n1 < 2.", [])
    assert both(f"{FINAL}Yes.") == ("", "Yes.", [])
    assert both(f"{ANALYSIS}{FINAL}Yes.<|return|>") == ("We need <b>.", "Yes.", [])
    assert both(f"{ANALYSIS}<|channel|>analysis<|message|> More.<|end|><|start|>assistant{FINAL}Yes.") == (
        "We need <b>. More.",
        "Yes.",
        [],
    )
    assert both("<|channel|>analysis<|message|>cut o") == ("cut o", "", [])


@pytest.mark.parametrize("header", CALLS)
def test_a_message_to_a_function_is_a_call(header: str) -> None:
    expected = ("We need <b>.", "", [("weather", ARGUMENTS)])
    assert both(f"{ANALYSIS}{header}{ARGUMENTS}") == expected
    assert both(f"{ANALYSIS}{header}{ARGUMENTS}<|call|>") == expected


def test_a_preamble_before_a_call_is_content() -> None:
    text = f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALLS[0]}{ARGUMENTS}<|call|>"
    assert both(text) == ("We need <b>.", "I look.", [("weather", ARGUMENTS)])


def test_arguments_stream() -> None:
    parser = PLAIN.parser(TOOLS, opened=False)
    assert parser.push(CALLS[0] + '{"ci') == [Piece("call", "", 0, "weather"), Piece("call", '{"ci')]
    assert parser.push('ty"') == [Piece("call", 'ty"')]


def test_a_function_that_nobody_offered_stays_text_with_its_marks() -> None:
    call = f"{CALLS[0].replace('weather', 'shutdown')}{{}}"
    assert both(call) == ("", call, [])
    raw = f"<|start|>assistant{call}<|end|>No."
    assert both(f"{ANALYSIS}{call}<|end|><|start|>assistant{FINAL}No.") == ("We need <b>.", raw, [])


def test_a_message_to_a_function_that_is_no_object_stays_text() -> None:
    for body in ("print(1)", "", "[1]", "{oops"):
        text = f"{CALLS[3]}{body}"
        assert both(f"{ANALYSIS}{text}") == ("We need <b>.", f"<|start|>assistant{text}", [])
    assert both(f"{CALLS[3]} \n{ARGUMENTS}") == ("", "", [("weather", ARGUMENTS)])


def test_text_without_headers_is_content_at_once() -> None:
    parser = PLAIN.parser(TOOLS, opened=False)
    assert parser.push("Hello, ") == [Piece("content", "Hello,")]
    assert both("Hello.") == ("", "Hello.", [])
    assert both("<|channel|>final") == ("", "<|channel|>final", [])
    assert both("assistant is my role") == ("", "assistant is my role", [])


def test_marks_spelt_in_other_tokens_are_text() -> None:
    spelt = "It ends with <|end|> and <|channel|>final<|message|> begins it."
    stream = TOKENIZER.stream(marks=TOKENS.marks.tokens)
    parts = [*tokens_of(f"{ANALYSIS}{FINAL}"), *(stream.push(byte) for byte in spelt.encode())]
    assert joined(cut(TOKENS, parts)) == ("We need <b>.", spelt, [])


def test_reasoning_stays_in_the_content_where_that_is_asked() -> None:
    text = f"{ANALYSIS}{FINAL}Yes."
    shown = "<|channel|>analysis<|message|>We need <b>.<|end|>Yes."
    assert both(text, reasoning=False) == ("", shown, [])


@given(data=st.data())
def test_any_split_gives_the_same_and_loses_nothing(data: st.DataObject) -> None:
    bits = [ANALYSIS, FINAL, *CALLS, *SPELLINGS, ARGUMENTS, "assistant", " to=", "x", " ", "\n", "<", "analysis"]
    whole = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert joined(cut(PLAIN, parts)) == joined(cut(PLAIN, [whole]))
    if "<|" not in whole:
        assert joined(cut(PLAIN, parts))[1] == whole


@pytest.mark.parametrize("dialect", [PLAIN, TOKENS])
def test_a_forced_call_is_one_whatever_the_model_prefers(dialect: Any) -> None:
    tokenizer = TOKENIZER if dialect is TOKENS else MarkTokenizer(())
    rules = dialect.forced_calls(SOME, opened=False, parallel=True)
    grammar = GrammarCompiler(tokenizer).compile(GrammarSource("lark", rules), "tools")
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert follows(grammar, tokenizer.spelt(analysis + call)) and follows(grammar, tokenizer.spelt(call))
    assert not follows(grammar, tokenizer.spelt(analysis + FINAL + "x"))
    seen = set()
    for seed in range(8):
        state_free = rules.replace("start: analysis? ", "start: ")  # thoughts of random tokens take long to end
        free = GrammarCompiler(tokenizer).compile(GrammarSource("lark", state_free), "tools")
        _, content, calls = joined(cut(dialect, babble(tokenizer, free, seed, dialect), tools=SOME))
        assert content == "" and len(calls) == 1
        seen.add(calls[0][0])
        jsonschema.Draft202012Validator(SOME[calls[0][0]]).validate(json.loads(calls[0][1]))
    assert seen == {"pick", "now"}


@pytest.mark.parametrize("dialect", [PLAIN, TOKENS])
def test_a_structure_is_in_the_final_channel(dialect: Any) -> None:
    tokenizer = TOKENIZER if dialect is TOKENS else MarkTokenizer(())
    compiler = GrammarCompiler(tokenizer)
    answer = schema_source({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    for rules in (dialect.structured(False), dialect.forced_calls(TOOLS, opened=False, parallel=False, otherwise=True)):
        grammar = compiler.compile(GrammarSource("lark", rules, answer), "response_format")
        for text in (f'{FINAL}{{"a": 1}}', f'{ANALYSIS}{FINAL}{{"a": 1}}'):
            assert follows(grammar, tokenizer.spelt(text))
        assert not follows(grammar, tokenizer.spelt('{"a": 1}')) and not follows(grammar, tokenizer.spelt(ANALYSIS))
    assert follows(grammar, tokenizer.spelt(f'{ANALYSIS}{CALLS[0]}{{"city": "x"}}'))
