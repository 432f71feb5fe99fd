"""`expertserve run`: one answer, or a chat on a terminal.

Owns what goes to standard output (the answer's text alone, as it comes) and the summary on standard error. It holds the
chat's messages; the engine finds by itself how much of the next prompt it has already computed. Ctrl-C ends an answer
in a chat, and the process otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from typing import Any, TextIO

from expertserve.config import SETTINGS, Settings
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import FinishEvent, SamplingParams, TokenEvent
from expertserve.engine.waiting import events
from expertserve.errors import ConfigError
from expertserve.experts.stats import ExpertStats


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
    """Prompts in, streamed text out, on one model."""

    def __init__(self, model: LoadedModel, settings: Settings, out: TextIO) -> None:
        self.totals = Totals()
        self._model = model
        self._out = out
        self._template = None if settings.raw else model.template
        named = {field.name for field in dataclasses.fields(SamplingParams)} & SETTINGS.keys()
        self._params = SamplingParams(**{name: getattr(settings, name) for name in named})
        self._messages: list[dict[str, Any]] = []
        if settings.system is not None and self._template is not None:
            self._messages.append({"role": "system", "content": settings.system})

    def answer(self, prompt: str) -> None:
        """Streams the answer to `prompt`; both become part of what the next answer sees."""
        said = {"role": "user", "content": prompt}
        ids = self._encode([*self._messages, said], prompt)
        parts: list[str] = []
        try:
            with closing(events(self._model.engine, ids, self._params)) as stream:
                for event in stream:
                    if isinstance(event, TokenEvent | FinishEvent):
                        parts.append(event.text)
                        self._out.write(event.text)
                        self._out.flush()
                    if isinstance(event, FinishEvent):
                        self.totals.add(event)
        finally:  # an answer that was stopped half way has been read, so the chat goes on from there
            self._messages += [said, {"role": "assistant", "content": "".join(parts)}]

    def _encode(self, messages: list[dict[str, Any]], prompt: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if self._template is None:
            return tokenizer.encode(prompt)
        return tokenizer.encode(self._template.render(messages), parse_special=True)


def run(settings: Settings, stats: ExpertStats, prompt: str | None) -> int:
    """Answers `prompt`, else what standard input holds, else chats; returns the exit status."""
    chat = prompt is None and sys.stdin.isatty()
    if prompt is None and not chat:
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give it with --prompt or on standard input")
    with closing(load_model(dataclasses.replace(settings, parallel=1), stats)) as model:
        conversation = Conversation(model, settings, sys.stdout)
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


def _chat(conversation: Conversation) -> None:
    import readline  # noqa: F401  (gives input() a line editor and history)

    print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            said = input("> ")
        except EOFError:
            return
        if not said.strip():
            continue
        try:
            conversation.answer(said)
        except KeyboardInterrupt:
            pass
        print(flush=True)
