"""Chat templates render as Hugging Face's renderer would, within bounds, and fail as one clear line."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from expertserve.errors import ConfigError, RequestError
from expertserve.text import sandbox
from expertserve.text.chat_template import CHATML, ChatTemplate
from expertserve.text.tokenizer import Tokenizer
from tests.text import vocabularies
from tests.text.vocabularies import CONTROL

USER = [{"role": "user", "content": "Hi <b>\u00e9</b>"}]


@dataclass
class Source:
    """Metadata in memory, in place of a file."""

    metadata: dict[str, Any] = field(default_factory=dict)


def tokenizer(**extra: Any) -> Tokenizer:
    vocabulary = vocabularies.train_bytes(["words"], 280)
    ids = {"bos_token_id": vocabulary.add("<s>", CONTROL), "eos_token_id": vocabulary.add("</s>", CONTROL)}
    return Tokenizer.from_gguf(Source(vocabulary.metadata("gpt2", "qwen2", **ids, **extra)))


PLAIN = tokenizer()


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    template = ChatTemplate.from_gguf(Source(), PLAIN, source)
    return template.render(USER if messages is None else messages, **arguments)


def test_a_file_without_a_template_gets_chatml() -> None:
    template = ChatTemplate.from_gguf(Source(), PLAIN)
    turns = [{"role": "system", "content": "Be brief."}, *USER]
    assert template.origin == "chatml"
    assert template.render(turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>\u00e9</b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(turns, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_the_override_comes_before_the_file_and_the_file_before_chatml() -> None:
    source = Source({"tokenizer.chat_template": "from the file"})
    assert ChatTemplate.from_gguf(source, PLAIN).render(USER) == "from the file"
    assert ChatTemplate.from_gguf(source, PLAIN).origin == "file"
    assert ChatTemplate.from_gguf(source, PLAIN, "mine").render(USER) == "mine"


def test_tools_choose_the_tool_use_template_where_there_is_one() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools: {{ tools | tojson }}"}
    template = ChatTemplate.from_gguf(Source(metadata), PLAIN)
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == 'tools: [{"type": "function"}]'


def test_json_is_written_as_it_is_and_not_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>\u00e9</b>"}'
    assert render("{{ {'b': 1, 'a': [1]} | tojson(indent=2, sort_keys=true) }}") == (
        '{\n  "a": [\n    1\n  ],\n  "b": 1\n}'
    )


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("{% if true %}\n  a\n    {% endif %}\nb") == "  a\nb"


def test_loop_controls_generation_marks_and_the_clock_are_there() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(source + "{% endfor %}") == "0134"
    assert render("{% generation %}kept {{ 1 + 1 }}{% endgeneration %}") == "kept 2"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_keyword_arguments_reach_the_template_and_cannot_replace_the_messages() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}off{% else %}on{% endif %}"
    assert render(source) == "on"
    assert render(source, enable_thinking=False) == "off"
    assert render("{{ messages | length }}{{ bos_token }}{{ eos_token }}") == "1<s></s>"


def test_a_loop_still_knows_its_length_and_neighbours() -> None:
    source = "{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }};{% endfor %}"
    assert render(source) == "1/3False;2/3Falsea;3/3Trueb;"


def test_the_sandbox_writes_what_jinja_itself_writes() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for source in (
        "{% macro m(a, b=2) %}{{ a ~ caller() if caller else a ~ '-' ~ b }}{% endmacro %}{{ m(1) }}{{ m(2, b=0) }}",
        "{% macro m(a) %}<{{ caller(a) }}>{% endmacro %}{% call(x) m('y') %}{{ x ~ x }}{% endcall %}",
        "{% set ns = namespace(n=0, t='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.t = ns.t + m.role ~ 1 %}{% endfor %}{{ ns.n }}{{ ns.t }}",
        "{% set x %}a{{ messages[0].content | trim }}b{% endset %}{{ x | upper }}{{ x | length }}",
        "{% for k, v in messages[0].items() if k != 'role' %}{{ k }}={{ v }}{% else %}none{% endfor %}",
        "{%- for t in [1, [2, [3]]] recursive %}{{ loop(t) if t is iterable else t }}{% endfor %}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ [1, 2] | join }}",
        "{{ (messages + messages) | join('+', attribute='role') }}",
        "{{ '%s is %d' % ('x', 3) }}{{ '%s' | format('y') }}{{ '{}-{a}'.format(1, a=2) }}{{ 'a,b'.split(',') | last }}",
        "{{ 'x' * 3 }}{{ [1] * 2 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ -1 }}{{ 'a' 'b' }}{{ none }}{{ no }}!",
        "{{ 'aXa'.replace('X', 'yy') }}{{ 'aXa' | replace('X', 'z') }}{{ ','.join(['p', 'q']) }}{{ 'ab'[::-1] }}",
        "{% filter upper %}abc{{ 1 }}{% endfilter %}{% if 'a' ~ 1 == 'a1' %}{{ ('a' ~ ('b' ~ 1)) | upper }}{% endif %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ {'a': 1 ~ 2} | items | list }}",
    ):
        assert render(source) == plain.from_string(source).render(messages=USER), source


@pytest.mark.parametrize(("added", "expected"), [({}, "<s>Hi</s>"), ({"add_bos_token": True}, "Hi</s>")])
def test_what_encoding_adds_is_taken_off_the_prompt(added: dict[str, bool], expected: str) -> None:
    template = ChatTemplate.from_gguf(Source(), tokenizer(**added), "{{ bos_token }}Hi{{ eos_token }}")
    assert template.render(USER) == expected
    with_eos = ChatTemplate.from_gguf(Source(), tokenizer(add_eos_token=True), "{{ bos_token }}Hi{{ eos_token }}")
    assert with_eos.render(USER) == "<s>Hi"


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "K\u00f6ln"}'}}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ call.function.arguments | tojson }}", '{"city": "K\u00f6ln"}'),
        ("{{ call.function.arguments }}", '{"city": "K\u00f6ln"}'),
        ("{{ 'x' + call.function.arguments }}", 'x{"city": "K\u00f6ln"}'),
        (
            "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}",
            '{"city": "K\u00f6ln"}',
        ),
        ("{% for k, v in call.function.arguments.items() %}{{ k }}: {{ v }}{% endfor %}|{{ '\"needle\":' }}", None),
    ],
)
def test_arguments_of_tool_calls_show_as_json_whether_a_template_wants_text_or_an_object(
    shown: str, expected: str | None
) -> None:
    source = "{% for m in messages %}{% for call in m.tool_calls or [] %}" + shown + "{% endfor %}{% endfor %}"
    turns = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    rendered = render(source, turns)
    assert rendered == (expected if expected is not None else 'city: K\u00f6ln|"needle":')
    assert CALL["function"]["arguments"] == '{"city": "K\u00f6ln"}'  # type: ignore[index]


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text"):
        with pytest.raises(RequestError, match="are not served; send text"):
            render("x", [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "chat template: roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "chat template: can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'other' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for m in messages %}{% set _ = m.update({'role': 'x'}) %}{% endfor %}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages | tojson | fromjson }}", "No filter named 'fromjson'"),
    ],
)
def test_what_goes_wrong_inside_a_template_is_a_request_error_of_one_line(source: str, said: str) -> None:
    template = ChatTemplate.from_gguf(Source({"tokenizer.chat_template": source}), PLAIN)
    with pytest.raises(RequestError, match=said) as failed:
        template.render(USER)
    assert "\n" not in str(failed.value) and failed.value.param == "messages"


def test_a_broken_template_is_refused_at_start_as_override_and_at_use_in_the_file() -> None:
    with pytest.raises(ConfigError, match=r"--chat-template: .*line 2"):
        ChatTemplate.from_gguf(Source(), PLAIN, "\n{% if %}")
    template = ChatTemplate.from_gguf(Source({"tokenizer.chat_template": "\n{% if %}"}), PLAIN)
    with pytest.raises(RequestError, match="line 2"):
        template.render(USER)
    for deep in ("{% if a %}" * 3000, "{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 5000):
        with pytest.raises(RequestError):
            ChatTemplate.from_gguf(Source({"tokenizer.chat_template": deep}), PLAIN).render(USER)


DOUBLE = "{% set ns = namespace(x='ab', l=['ab']) %}{% for i in range(80) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
        "{% for i in [[1]] recursive %}{{ loop([[1], [1]]) }}{{ loop([[1], [1]]) }}{% endfor %}",
        DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLE + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        DOUBLE + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        DOUBLE + "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        DOUBLE + "{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 1000000] %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x\ny' | indent(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 3 }}",
        "{{ '%*d' % (10000000000, 3) }}",
        "{{ '%10000000000d' | format(3) }}",
        "{{ '{:10000000000}'.format(3) }}",
        "{{ (['x' * 1000000] * 1000000) | join }}",
        "{{ ''.join(['x' * 1000000] * 1000000) }}",
        "{{ 'x' | list | slice(10000000000) | list }}",
        "{{ 'x' | batch(10000000000, 'y') | list }}",
        "{{ range(10000000000) | list }}",
        "{{ {} | tojson(indent=10000000000) }}",
        "{{ lipsum(n=10000000) }}",
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "MAX_WRITTEN", 2 << 20)
    monkeypatch.setattr(sandbox, "MAX_BUILT", 1 << 24)
    with pytest.raises(RequestError, match="chat template: "):
        render(source)


def test_bounds_are_for_one_rendering_and_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1_000)
    template = ChatTemplate.from_gguf(Source(), PLAIN, "{% for i in range(900) %}x{% endfor %}")
    assert [len(template.render(USER)) for _ in range(3)] == [900] * 3


def test_a_long_conversation_is_within_the_bounds() -> None:
    turns = [{"role": "user", "content": "x" * 5_000}] * 2_000
    assert len(render(CHATML, turns)) > 10_000_000
