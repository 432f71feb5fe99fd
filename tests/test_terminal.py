"""A conversation on the terminal, over an engine that answers at once."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from expertserve.config import Settings
from expertserve.engine.request import ErrorEvent, Event, FinishEvent, Request, Timings, TokenEvent, Usage
from expertserve.errors import ConfigError, ExpertReadError, GGUFError
from expertserve.experts.stats import ExpertStats
from expertserve.terminal import Conversation, _chat, run


@dataclass
class FakeEngine:
    """Answers each prompt with `words`; ends with `error` where there is one, or not at all before it is cancelled."""

    words: list[str] = field(default_factory=lambda: ["one", " two"])
    error: ExpertReadError | None = None
    hangs: bool = False
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, request: Request, /) -> None:
        self.requests.append(request)
        for number, word in enumerate(self.words):
            request.on_event(TokenEvent(number, word, None))
        if self.error is not None:
            request.on_event(ErrorEvent(self.error))
        elif not self.hangs:
            request.on_event(self._end("stop"))

    def cancel(self, request_id: str, /) -> None:
        self.cancelled.append(request_id)
        self.requests[-1].on_event(self._end("cancelled"))

    def _end(self, reason: Any) -> Event:
        usage = Usage(prompt_tokens=10, completion_tokens=len(self.words), cached_tokens=4)
        return FinishEvent(reason, "!", usage, Timings(0.0, 100.0, 50.0, 100.0))


class FakeText:
    source = "<think></think>"

    def special_id(self, text: str) -> int | None:
        return None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def render(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


@dataclass
class FakeModel:
    engine: FakeEngine
    tokenizer: FakeText = field(default_factory=FakeText)
    template: FakeText = field(default_factory=FakeText)

    def prompts(self) -> list[str]:
        return ["".join(map(chr, request.prompt)) for request in self.engine.requests]


def conversation(engine: FakeEngine, **settings: Any) -> tuple[Conversation, FakeModel, io.StringIO]:
    model, out = FakeModel(engine), io.StringIO()
    return Conversation(model, Settings(**settings), out, io.StringIO()), model, out  # type: ignore[arg-type]


def test_an_answer_becomes_part_of_the_next_prompt() -> None:
    talk, model, out = conversation(FakeEngine(), system="be brief")
    talk.answer("hi")
    talk.answer("more")
    assert out.getvalue() == "one two!" * 2
    assert model.prompts()[1] == "<system>be brief<user>hi<assistant>one two!<user>more"


def test_reasoning_goes_aside_and_is_kept_apart() -> None:
    engine = FakeEngine(words=["<thi", "nk>Hm", ".</think>\n", "Yes"])
    model, out, aside = FakeModel(engine), io.StringIO(), io.StringIO()
    talk = Conversation(model, Settings(), out, aside)  # type: ignore[arg-type]
    talk.answer("hi")
    assert (out.getvalue(), aside.getvalue()) == ("Yes!", "Hm.\n\n")
    talk.answer("more")
    assert model.prompts()[1] == "<user>hi<assistant>Yes!<user>more"


def test_raw_gives_the_prompt_as_it_is() -> None:
    talk, model, _ = conversation(FakeEngine(), raw=True)
    talk.answer("def f():")
    assert model.prompts() == ["def f():"]


def test_sampling_settings_reach_the_request() -> None:
    talk, model, _ = conversation(FakeEngine(), temperature=0.25, top_k=7, stop=("x",), max_tokens=3, seed=5)
    talk.answer("hi")
    params = model.engine.requests[0].params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens, params.seed) == (0.25, 7, ("x",), 3, 5)


def test_summary_counts_what_was_computed() -> None:
    talk, _, _ = conversation(FakeEngine())
    talk.answer("hi")
    assert talk.totals.line() == ("prompt: 6 tokens (4 more reused), 60.0 tok/s; answer: 2 tokens, 20.0 tok/s")


def test_failed_answer_raises_its_error() -> None:
    talk, model, out = conversation(FakeEngine(error=ExpertReadError("disk")))
    with pytest.raises(ExpertReadError):
        talk.answer("hi")
    assert out.getvalue() == "one two" and not model.engine.cancelled


def test_empty_prompt_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    monkeypatch.setattr("expertserve.terminal.load_model", None)
    for prompt in (None, ""):
        with pytest.raises(ConfigError, match="prompt is empty"):
            run(Settings(model="demo"), ExpertStats(), prompt)
        with pytest.raises(GGUFError, match="/nonexistent"):
            run(Settings(model="/nonexistent"), ExpertStats(), prompt)


class Interrupting(io.StringIO):
    """Stands for a user who presses Ctrl-C at the second word."""

    def write(self, text: str) -> int:
        if text == " two":
            raise KeyboardInterrupt
        return super().write(text)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """The user types these, then Ctrl-D."""
    left = iter(lines)

    def line(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)


def test_interrupted_answer_is_cancelled_and_the_chat_goes_on_from_what_was_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(hangs=True)
    model = FakeModel(engine)
    talk = Conversation(model, Settings(), Interrupting(), io.StringIO())  # type: ignore[arg-type]
    type_lines(monkeypatch, "first", "  ", "second")
    _chat(talk)
    assert engine.cancelled == [request.id for request in engine.requests]
    assert model.prompts() == ["<user>first", "<user>first<assistant>one two<user>second"]


def test_commands_of_a_chat_change_what_the_model_sees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, model, _ = conversation(FakeEngine(), system="be brief")
    lines = (
        "/regen",
        "hi",
        "/regen",
        "more",
        "/clear",
        "new",
        "/system be kind",
        "/system",
        "hello",
        "/etc/hosts",
        " /x",
    )
    type_lines(monkeypatch, *lines, "/bye", "never")
    _chat(talk)
    answered = "<user>hi<assistant>one two!"
    assert model.prompts() == [
        "<system>be brief<user>hi",
        "<system>be brief<user>hi",
        f"<system>be brief{answered}<user>more",
        "<system>be brief<user>new",
        "<system>be kind<user>hello",
        "<system>be kind<user>hello<assistant>one two!<user>/etc/hosts",
        "<system>be kind<user>hello<assistant>one two!<user>/etc/hosts<assistant>one two!<user> /x",
    ]
    said = capsys.readouterr().err
    assert "Nothing was asked yet." in said and "be kind\n" in said


def test_raw_prompts_take_no_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, model, _ = conversation(FakeEngine(), raw=True)
    type_lines(monkeypatch, "/system be kind", "hi")
    _chat(talk)
    assert model.prompts() == ["hi"] and "no place" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/help", "/?"])
def test_help_lists_the_commands_and_asks_the_model_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    talk, model, out = conversation(FakeEngine())
    type_lines(monkeypatch, line, "/nonsense", "/exit", "never")
    _chat(talk)
    assert not model.prompts() and not out.getvalue()
    said = capsys.readouterr().err
    listed = re.findall(r"^  (/[a-z]+) ", said, re.M)
    assert {"/help", "/clear", "/system", "/regen", "/bye"} == set(listed)
    assert "no command /nonsense" in said
