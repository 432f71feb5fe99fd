"""`expertserve run`: one answer, or a chat on a terminal.

Owns what goes to standard output (the answer's text alone, as it comes) and to standard error (the reasoning before it,
and the summary). It holds the chat's messages; the engine finds by itself how much of the next prompt it has already
computed. Ctrl-C ends an answer in a chat, and the process otherwise.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from contextlib import closing
from typing import Any, TextIO

from expertserve.config import SETTINGS, Settings
from expertserve.data import model_path
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import FinishEvent, SamplingParams, TokenEvent
from expertserve.engine.waiting import events
from expertserve.errors import ConfigError
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.text.answer import Piece
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect


@dataclasses.dataclass(slots=True)
class Totals:
    """Tokens and seconds of all answers of one process."""

    answers: int = 0
    computed: int = 0
    cached: int = 0
    generated: int = 0
    decoded: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0

    def add(self, event: FinishEvent) -> None:
        usage, timings = event.usage, event.timings
        self.answers += 1
        self.cached += usage.cached_tokens
        self.computed += usage.prompt_tokens - usage.cached_tokens
        self.generated += usage.completion_tokens
        self.decoded += max(0, usage.completion_tokens - 1)
        self.prompt_s += timings.prompt_ms / 1000
        self.decode_s += timings.decode_ms / 1000

    def line(self) -> str:
        return (
            f"prompt: {self.computed} tokens ({self.cached} more reused), {_rate(self.computed, self.prompt_s)}; "
            f"answer: {self.generated} tokens, {_rate(self.decoded, self.decode_s)}"
        )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens and seconds > 0 else "- tok/s"


class Conversation:
    """Prompts in, streamed text out, on one model; reasoning goes to `aside`."""

    def __init__(self, model: LoadedModel, settings: Settings, out: TextIO, aside: TextIO) -> None:
        self.totals = Totals()
        self._model = model
        self._out, self._aside = out, aside
        self._template = None if settings.raw else model.template
        self._dialect: Dialect | None = None
        named = {field.name for field in dataclasses.fields(SamplingParams)} & SETTINGS.keys()
        self._params = SamplingParams(**{name: getattr(settings, name) for name in named})
        if self._template is not None:
            self._dialect = dialect_of(self._template.source, model.tokenizer.special_id)
            self._params = dataclasses.replace(self._params, marks=self._dialect.marks.tokens)
        self._messages: list[dict[str, Any]] = []
        self.begin(settings.system)

    def begin(self, system: str | None) -> None:
        """Forgets what was said; `system` is what the model is told first."""
        self.system = system
        told = [] if system is None or self._template is None else [{"role": "system", "content": system}]
        self._messages[:] = told

    @property
    def templated(self) -> bool:
        """Whether messages are put into the model's template; raw prompts are not."""
        return self._template is not None

    def take_back(self) -> str | None:
        """Forgets the last question and its answer; returns the question, or None where nothing was asked."""
        if not self._messages or self._messages[-1]["role"] == "system":
            return None
        question: str = self._messages[-2]["content"]
        del self._messages[-2:]
        return question

    def answer(self, prompt: str) -> None:
        """Streams the answer to `prompt`; both become part of what the next answer sees."""
        said = {"role": "user", "content": prompt}
        text = prompt if self._template is None else self._template.render([*self._messages, said])
        ids = self._model.tokenizer.encode(text, parse_special=self._template is not None)
        answer = _Answer(self._dialect, text, self._out, self._aside)
        try:
            with closing(events(self._model.engine, ids, self._params)) as stream:
                for event in stream:
                    if isinstance(event, TokenEvent | FinishEvent):
                        answer.add(event.text, isinstance(event, FinishEvent))
                    if isinstance(event, FinishEvent):
                        self.totals.add(event)
        finally:  # an answer that was stopped half way has been read, so the chat goes on from there
            self._messages += [said, answer.message]


class _Answer:
    """An answer as it comes: written out, and kept as the message it becomes."""

    def __init__(self, dialect: Dialect | None, prompt: str, out: TextIO, aside: TextIO) -> None:
        self._parser = None if dialect is None else dialect.parser({}, opened=dialect.opened(prompt))
        self._out, self._aside = out, aside
        self._reasons = False
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def add(self, text: str, final: bool) -> None:
        if self._parser is None:
            pieces = [Piece("content", text)] if text else []
        else:
            pieces = self._parser.push(text) + (self._parser.flush() if final else [])
        for piece in pieces:
            if piece.part == "reasoning":
                self._reasons = True
                self.message["reasoning_content"] = self.message.get("reasoning_content", "") + piece.text
                self._aside.write(piece.text)
                self._aside.flush()
                continue
            self.message["content"] += piece.text
            if self._reasons:
                self._reasons = False
                self._aside.write("\n\n")
                self._aside.flush()
            self._out.write(piece.text)
            self._out.flush()


def run(settings: Settings, stats: ExpertStats, prompt: str | None) -> int:
    """Answers `prompt`, else what standard input holds, else chats; returns the exit status."""
    chat = prompt is None and sys.stdin.isatty()
    if prompt is None and not chat:
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        GGUFFile.open(model_path(settings.model)).close()  # where the file is at fault too, that is said first
        raise ConfigError("the prompt is empty: give it with --prompt or on standard input")
    with closing(load_model(dataclasses.replace(settings, parallel=1), stats)) as model:
        conversation = Conversation(model, settings, sys.stdout, sys.stderr)
        try:
            if prompt is None:
                _chat(conversation)
            else:
                conversation.answer(prompt)
        finally:
            print(flush=True)
            if conversation.totals.answers:
                print(conversation.totals.line(), file=sys.stderr)
    return 0


_COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system": "TEXT: forget it and tell the model TEXT first; alone: show what it is told",
    "/regen": "answer the last question again",
    "/bye": "end the chat",
}
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/regenerate": "/regen", "/new": "/clear"}


def _chat(conversation: Conversation) -> None:
    import readline  # noqa: F401  (gives input() a line editor and history)

    _say("Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists commands.")
    while True:
        try:
            said: str | None = input("> ")
        except EOFError:
            return
        if said is not None and re.fullmatch(r"/[a-z?]*(\s.*)?", said):
            name, _, argument = said.partition(" ")
            name = _OTHER_NAMES.get(name, name)
            if name == "/bye":
                return
            said = _command(conversation, name, argument.strip())
        if said is None or not said.strip():
            continue
        try:
            conversation.answer(said)
        except KeyboardInterrupt:
            pass
        print(flush=True)


def _command(conversation: Conversation, name: str, argument: str) -> str | None:
    """Carries out a line that is a command; returns a question that it asks, if it does."""
    if name == "/help":
        _say(*(f"  {command:8} {does}" for command, does in _COMMANDS.items()))
        _say("A text that begins with / and is none of these: put a space before it.")
    elif name == "/regen":
        if (question := conversation.take_back()) is not None:
            return question
        _say("Nothing was asked yet.")
    elif name == "/clear":
        conversation.begin(conversation.system)
    elif name == "/system" and not conversation.templated:
        _say("Raw prompts have no place for it.")
    elif name == "/system" and argument:
        conversation.begin(argument)
    elif name == "/system":
        _say(conversation.system or "The model is told nothing first.")
    else:
        _say(f"There is no command {name}: /help lists them.")
    return None


def _say(*lines: str) -> None:
    """What is about the chat and no part of it."""
    print(*lines, sep="\n", file=sys.stderr)
