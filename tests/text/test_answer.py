"""Cutting answers: however a text arrives, the same parts come out and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertserve.text.answer import Piece
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect
from tests.text.dialects import SPOKEN, TOOLS, MarkTokenizer

HERMES = SPOKEN["hermes"].dialect()
THINKING = "<think></think>"


def thinking(template: str) -> Dialect:
    """The same dialect of a model that reasons."""
    return dialect_of(template + THINKING, lambda text: None)


def cut(
    dialect: Dialect, parts: list[str], *, opened: bool = False, tools: Any = TOOLS, **options: bool
) -> list[Piece]:
    parser = dialect.parser(tools, opened=opened, **options)
    return [piece for part in parts for piece in parser.push(part)] + parser.flush()


def joined(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append((piece.name, ""))
        if piece.part == "call":
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    text = {part: "".join(p.text for p in pieces if p.part == part) for part in ("reasoning", "content")}
    return text["reasoning"], text["content"], calls


def in_parts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_content_and_two_calls_come_apart_at_any_cut(name: str, size: int) -> None:
    before = "" if name == "llama-json" else "Let me see."
    text = f"<think>\nSo <b> it is.\n</think>\n\n{before}\n{SPOKEN[name].written}"
    reasoning, content, calls = joined(cut(thinking(SPOKEN[name].template), in_parts(text, size)))
    assert (reasoning, content) == ("So <b> it is.", before)
    assert [name for name, _ in calls] == ["weather", "weather"]
    arguments = [json.loads(text) for _, text in calls]
    assert arguments == [{"city": "K\u00f6ln }", "days": 3}, {"city": "K\u00f6ln }", "days": 4}]


@pytest.mark.parametrize("name", SPOKEN)
def test_text_goes_on_after_the_calls(name: str) -> None:
    text = f"{SPOKEN[name].written}\nThat was it: [1] {{2}}."
    _, content, calls = joined(cut(SPOKEN[name].dialect(), in_parts(text, 2)))
    assert content == "That was it: [1] {2}." and len(calls) == 2


@pytest.mark.parametrize("name", SPOKEN)
def test_arguments_come_before_the_call_is_over(name: str) -> None:
    parser = SPOKEN[name].dialect().parser(TOOLS, opened=False)
    text = SPOKEN[name].written
    days = text.index("days")
    pieces = parser.push(text[: text.index("3", days)])
    assert pieces[0].name == "weather" and '{"city": "K\u00f6ln }"' in "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_without_parameters_has_an_empty_object(name: str) -> None:
    text = SPOKEN[name].nothing
    for parts in ([text], [*text]):
        assert joined(cut(SPOKEN[name].dialect(), parts)) == ("", "", [("now", "{}")])


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_tool_that_nobody_offered_stays_text(name: str, size: int) -> None:
    stranger = SPOKEN[name].nothing.replace("now", "shutdown")
    shown = stranger.replace("<|python_end|>", "")  # it means nothing by itself
    assert joined(cut(SPOKEN[name].dialect(), in_parts(stranger, size))) == ("", shown, [])
    assert joined(cut(SPOKEN[name].dialect(), [SPOKEN[name].written], tools={})) == ("", SPOKEN[name].written, [])


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_only_resembles_a_call_stays_text(name: str, size: int) -> None:
    text = SPOKEN[name].written
    opening = text[: text.index("weather")]
    for broken in (f"{opening}", f"{opening}a list: 1 2 3", f"  {opening}weather, {{ or not?", f"So: {opening}[ {{"):
        shown = broken.replace("<|python_end|>", "")
        assert joined(cut(SPOKEN[name].dialect(), in_parts(broken, size))) == ("", shown, [])


@pytest.mark.parametrize("name", SPOKEN)
def test_one_call_only_where_one_is_wanted(name: str) -> None:
    _, content, calls = joined(cut(SPOKEN[name].dialect(), [SPOKEN[name].written], parallel=False))
    assert content == "" and [json.loads(arguments)["days"] for _, arguments in calls] == [3]


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_that_the_limit_cuts_off_keeps_what_there_is(name: str) -> None:
    text = SPOKEN[name].written
    _, content, calls = joined(cut(SPOKEN[name].dialect(), in_parts(text[: text.index("ln }")], 1)))
    assert content == "" and [name for name, _ in calls] == ["weather"]
    assert '{"city": "K\u00f6ln }", "days": 3}'.startswith(calls[0][1])


@pytest.mark.parametrize("name", SPOKEN)
def test_calls_have_the_ids_that_their_templates_want(name: str) -> None:
    ids = [piece.id for piece in cut(SPOKEN[name].dialect(), [SPOKEN[name].written]) if piece.name]
    for id, expected in zip(ids, SPOKEN[name].ids, strict=True):
        if expected is None and name.startswith("mistral"):
            assert id is not None and len(id) == 9 and id.isalnum()
        else:
            assert id == expected


@pytest.mark.parametrize("name", SPOKEN)
@given(data=st.data())
def test_any_split_gives_the_same_and_loses_nothing(name: str, data: st.DataObject) -> None:
    """Of texts made of the dialect's own parts, well-formed or not."""
    spoken = SPOKEN[name]
    text = spoken.written
    bits = sorted({text[i:j] for i in range(0, len(text), 7) for j in (i + 3, i + 12)}) + [text, spoken.nothing]
    bits += ["x", " ", "\n", "<", "[", "{", '"', "}", "]", ",", "weather", "<think>", "</think>", *spoken.special]
    whole = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    dialect = thinking(spoken.template)
    pieces = joined(cut(dialect, [whole]))
    assert joined(cut(dialect, parts)) == pieces
    reasoning, content, calls = pieces
    if not calls:
        said, given_ = "".join((reasoning + content).split()), "".join(whole.split()).replace("<|python_end|>", "")
        once = given_.replace("<think>", "", 1)
        assert said.replace("<|python_end|>", "") in (given_, once, once.replace("</think>", "", 1))


@pytest.mark.parametrize("name", SPOKEN)
def test_marks_that_are_tokens_are_told_from_text_that_is_spelt_the_same(name: str) -> None:
    spoken = SPOKEN[name]
    if not spoken.special or name.startswith("llama") or name == "qwen-coder":
        pytest.skip("calls may begin without a mark")
    tokenizer = MarkTokenizer(spoken.special)
    dialect = spoken.dialect(tokenizer.special_id)

    def parts(tokens: list[int]) -> list[str]:
        stream = tokenizer.stream(marks=dialect.marks.tokens)
        return [stream.push(token) for token in tokens]

    _, content, calls = joined(cut(dialect, parts(tokenizer.spelt(spoken.written))))
    assert content == "" and len(calls) == 2
    spelt = spoken.nothing + "\n"
    _, content, calls = joined(cut(dialect, parts([*spelt.encode(), *tokenizer.spelt(spoken.nothing)])))
    assert content == spelt.rstrip() and calls == [("now", "{}")]


def test_reasoning_that_the_prompt_opened_needs_no_mark_and_may_not_end() -> None:
    dialect = thinking(SPOKEN["hermes"].template)
    assert joined(cut(dialect, ["hm</think>", "yes"], opened=True))[:2] == ("hm", "yes")
    assert joined(cut(dialect, ["hm </thi"], opened=True))[:2] == ("hm </thi", "")
    assert joined(cut(dialect, [*"<think>\nhm</think>yes"], opened=True))[:2] == ("hm", "yes")
    assert joined(cut(dialect, [*"\n <thin"], opened=True))[:2] == ("<thin", "")
    assert joined(cut(dialect, ["I <think> so"]))[:2] == ("", "I <think> so")
    assert joined(cut(dialect, [" <thi"]))[:2] == ("", " <thi")


def test_content_may_have_marks_of_its_own() -> None:
    dialect = thinking(SPOKEN["hunyuan"].template + "<answer></answer>")
    text = f"<think>\nhm\n</think>\n<answer>\nIt </answer_ is.\n{SPOKEN['hunyuan'].nothing}\n</answer>"
    for parts in ([text], [*text]):
        assert joined(cut(dialect, parts)) == ("hm", "It </answer_ is.", [("now", "{}")])
    assert joined(cut(dialect, ["No </answer> here."])) == ("", "No </answer> here.", [])


def test_reasoning_and_content_of_cohere_are_in_marks_of_their_own() -> None:
    template = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>" + SPOKEN["cohere"].template
    dialect = dialect_of(template, lambda text: None)
    thought = "<|START_THINKING|>hm<|END_THINKING|>"
    for text, expected in (
        (f"{thought}<|START_RESPONSE|>Yes.<|END_RESPONSE|>", ("hm", "Yes.", [])),
        (f"{thought}{SPOKEN['cohere'].nothing}", ("hm", "", [("now", "{}")])),
    ):
        for size in (1, len(text)):
            assert joined(cut(dialect, in_parts(text, size))) == expected


@pytest.mark.parametrize("name", ["mistral", "mistral-v11"])
def test_reasoning_of_mistral_is_in_marks_of_its_own(name: str) -> None:
    dialect = dialect_of("[THINK][/THINK]" + SPOKEN[name].template, lambda text: None)
    for text, expected in (
        ("[THINK]hm[/THINK]Yes.", ("hm", "Yes.", [])),
        (f"[THINK]hm[/THINK]{SPOKEN[name].nothing}", ("hm", "", [("now", "{}")])),
    ):
        for size in (1, len(text)):
            assert joined(cut(dialect, in_parts(text, size))) == expected


def test_fields_in_another_order_and_arguments_as_a_string_are_calls() -> None:
    for call in (
        '{"arguments": {"city": "x"}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"x\\"}"}',
        '{"id": "abcdefghi", "name": "weather", "arguments": {"city": "x"}}',
        '{"type": "function", "function": {"name": "weather", "arguments": {"city": "x"}}}',
    ):
        for name, text in (
            ("hermes", f"<tool_call>{call}</tool_call>"),
            ("mistral", f"[TOOL_CALLS][{call}]"),
            ("granite", f"<|tool_call|>{call}"),
            ("hunyuan", f"<tool_calls>[{call}]</tool_calls>"),
            ("cohere", f"<|START_ACTION|>[{call}]<|END_ACTION|>".replace('"name"', '"tool_name"')),
        ):
            _, content, calls = joined(cut(SPOKEN[name].dialect(), in_parts(text, 3)))
            assert content == "" and calls == [("weather", '{"city": "x"}')]


def test_line_ends_in_strings_become_escapes() -> None:
    _, _, calls = joined(cut(HERMES, ['<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\n"}}</tool_call>']))
    assert json.loads(calls[0][1]) == {"city": "a\nb\n"}


def test_a_call_of_qwen_coder_may_lack_its_first_mark() -> None:
    text = "Well.\n" + SPOKEN["qwen-coder"].nothing.removeprefix("<tool_call>\n")
    assert joined(cut(SPOKEN["qwen-coder"].dialect(), in_parts(text, 2))) == ("", "Well.", [("now", "{}")])


TYPES: Any = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "none": {"type": ["null", "string"]},
        "list": {"type": "array"},
        "map": {"type": "object"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "word": {"enum": ["1", "2"]},
    },
}


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "minimax"])
def test_values_between_tags_have_the_types_of_the_schema(name: str) -> None:
    values = {
        "text": ("12", "12"), "count": ("12", 12), "share": ("1.5", 1.5), "on": ("True", True), "none": ("null", None),
        "list": ("[1, 'a']", [1, "a"]), "map": ('{"a": [NaN_]}', '{"a": [NaN_]}'), "either": ("7", 7),
        "word": ("1", "1"), "other": ("[2]", [2]), "free": ("NaN", "NaN"),
    }  # fmt: skip
    form = {
        "qwen-coder": ("<tool_call>\n<function=weather>\n", "<parameter={}>\n{}\n</parameter>\n",
                       "</function>\n</tool_call>"),
        "glm": ("<tool_call>weather\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
        "minimax": ('<minimax:tool_call>\n<invoke name="weather">\n', '<parameter name="{}">{}</parameter>\n',
                    "</invoke>\n</minimax:tool_call>"),
    }[name]  # fmt: skip
    text = form[0] + "".join(form[1].format(key, written) for key, (written, _) in values.items()) + form[2]
    for size in (1, 1000):
        _, content, calls = joined(cut(SPOKEN[name].dialect(), in_parts(text, size), tools={"weather": TYPES}))
        assert content == "" and json.loads(calls[0][1]) == {key: value for key, (_, value) in values.items()}


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "minimax"])
def test_a_long_string_between_tags_streams(name: str) -> None:
    parser = SPOKEN[name].dialect().parser(TOOLS, opened=False)
    text = SPOKEN[name].written.replace("K\u00f6ln }", "first line\n\n  second <line")
    pieces = parser.push(text[: text.index(" <line")])
    assert "".join(piece.text for piece in pieces) == '{"city": "first line\\n\\n  second'
    rest = "".join(piece.text for piece in parser.push(text[text.index(" <line") :]) if piece.call == 0)
    assert rest == ' <line", "days": 3}'


def test_values_of_python_and_of_gemma_are_read_whatever_is_in_them() -> None:
    arguments = r"""city="a, b)\"", days=[1, (2, 'x]')], unit={'k': None, "t": true}, x=nil"""
    text = f"<|tool_call_start|>[weather({arguments})]<|tool_call_end|>"
    for size in (1, 1000):
        _, content, calls = joined(cut(SPOKEN["lfm"].dialect(), in_parts(text, size)))
        assert content == "" and calls[0][0] == "weather"
        assert json.loads(calls[0][1]) == {
            "city": 'a, b)"', "days": [1, [2, "x]"]], "unit": "{'k': None, \"t\": true}", "x": "nil"
        }  # fmt: skip
    quote = '<|"|>'
    text = (
        f"<|tool_call>call:weather{{city:{quote}a, {{b}}{quote},days:[1,{{k:{quote}v]{quote},on:true}},[]],"
        f"unit:{{}},{quote}x{quote}:null,y:bare}}<tool_call|>"
    )
    for size in (1, 1000):
        _, content, calls = joined(cut(SPOKEN["gemma"].dialect(), in_parts(text, size)))
        expected = {"city": "a, {b}", "days": [1, {"k": "v]", "on": True}, []], "unit": {}, "x": None, "y": "bare"}
        assert content == "" and json.loads(calls[0][1]) == expected


def test_reasoning_stays_in_the_content_where_that_is_asked() -> None:
    dialect = thinking(SPOKEN["hermes"].template)
    text = f"<think>hm</think>\nSo.\n{SPOKEN['hermes'].nothing}"
    assert joined(cut(dialect, [*text], reasoning=False)) == ("", "<think>hm</think>\nSo.", [("now", "{}")])


def test_dialects_are_told_from_templates() -> None:
    for name, spoken in SPOKEN.items():
        alike = {other for other in SPOKEN if SPOKEN[other].template == spoken.template}
        readers = {other for other in SPOKEN if len(joined(cut(spoken.dialect(), [SPOKEN[other].written]))[2]) == 2}
        assert alike <= readers, name
    assert joined(cut(dialect_of("{{ messages }}", lambda text: None), [SPOKEN["hermes"].written]))[2]


def test_arguments_of_nothing_are_an_empty_object() -> None:
    for arguments in ("null", "{}", '"{}"'):
        text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
        assert joined(cut(HERMES, in_parts(text, 4))) == ("", "", [("now", "{}")])
