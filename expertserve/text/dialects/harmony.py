"""gpt-oss's harmony: an answer is messages, each with a header that names a channel and perhaps a recipient.

Owns its parser and its grammar. The channel `analysis` is reasoning; `final` is content, and so is a `commentary`
without a recipient; a message to `functions.NAME` is a call. The format:
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import regex

from expertserve.text.answer import AnswerParser, Part, Piece, Schemas, safe_length
from expertserve.text.dialects.arguments import JsonObject
from expertserve.text.dialects.dialect import Dialect
from expertserve.text.dialects.json_calls import BEGIN
from expertserve.text.dialects.marks import TEXT, Marks, json_rule

_START, _END, _CHANNEL, _MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
SPELLINGS = (_START, _END, _CHANNEL, _MESSAGE, "<|constrain|>", "<|call|>", "<|return|>")
_RECIPIENT = "\\s*to=(?P<to>[^\\s<\ufdd0]+)"
# What begins a message, from where the prompt or the last message ended.
_HEADER = (
    rf"\s*(?:<|start|>)?(?:assistant)?(?:{_RECIPIENT})?\s*(?:<|channel|>\s*(?P<channel>\w+)(?:{_RECIPIENT})?)?"
    r"\s*(?:<|constrain|>)?\s*(?:json|code)?\s*<|message|>"
)
_ARGUMENTS = regex.compile(BEGIN)
_ANY = {"type": "object"}


class HarmonyParser(AnswerParser):
    """As AnswerParser; without `reasoning` the analysis stays in the content, with its marks."""

    def __init__(self, marks: Marks, tools: Schemas, reasoning: bool, parallel: bool) -> None:
        super().__init__(tools, parallel)
        self._header = marks.pattern(_HEADER)
        self._ends = tuple(map(marks.text, (_END, _START, "<|call|>", "<|return|>")))
        self._reasoning = reasoning
        self._as_written = False
        self._arguments = JsonObject()
        self._at = self._in_header

    def _in_header(self, final: bool, pieces: list[Piece]) -> None:
        header = self._header.match(self._text, partial=not final)
        if header is None:
            if self._text.startswith(self._ends[1]):  # which begins nothing here
                self._say("content", self._ends[1], pieces)
                self._text = self._text[len(self._ends[1]) :]
            self._at = self._in_content
        elif not header.partial:
            self._enter(header, final, pieces)

    def _enter(self, header: regex.Match[str], final: bool, pieces: list[Piece]) -> None:
        channel, recipient, end = header["channel"], header["to"], header.end()
        name = recipient.removeprefix("functions.") if recipient else ""
        arguments = _ARGUMENTS.match(self._text, end, partial=not final) if name in self._tools else None
        if arguments and arguments.partial:
            return
        if arguments:
            self._start_call(name, None, pieces)
            self._arguments, self._at, end = JsonObject(), self._in_call, arguments.end()
        elif recipient is None and (channel != "analysis" or self._reasoning):
            self._at = self._in_reasoning if channel == "analysis" else self._in_content
        else:
            self._say("content", header[0], pieces)
            self._as_written, self._at = True, self._in_content
        self._text = self._text[end:]

    @property
    def _reasons(self) -> bool:
        return self._at == self._in_reasoning

    def _in_reasoning(self, final: bool, pieces: list[Piece]) -> None:
        self._in_message("reasoning", final, pieces)

    def _in_content(self, final: bool, pieces: list[Piece]) -> None:
        self._in_message("content", final, pieces)

    def _in_message(self, part: Part, final: bool, pieces: list[Piece]) -> None:
        found = [(at, mark) for mark in self._ends if (at := self._text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            after = self._text[at:] if mark == self._ends[1] else self._text[at + len(mark) :]
            said = self._text[: len(self._text) - len(after)] if self._as_written else self._text[:at]
            self._text, self._at = after, self._in_header
        else:
            safe = len(self._text) if final else safe_length(self._text, self._ends)
            said, self._text = self._text[:safe], self._text[safe:]
        self._say(part, said, pieces)
        if found:
            self._as_written, self._strip = False, False

    def _in_call(self, final: bool, pieces: list[Piece]) -> None:
        read = self._arguments.read(self._text, final)
        self._more_arguments(read.json, pieces)
        self._text = self._text[read.length :]
        if read.done:
            self._at = self._in_content


class HarmonyDialect(Dialect):
    """Bound to a vocabulary. A call ends the answer, by its token, so there is one at most."""

    efforts = ("low", "medium", "high")

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def opened(self, prompt: str) -> bool:
        return False

    def parser(self, tools: Schemas, *, opened: bool, reasoning: bool = True, parallel: bool = True) -> AnswerParser:
        return HarmonyParser(self.marks, tools, reasoning, parallel)

    def forced_calls(self, tools: Schemas, *, opened: bool, parallel: bool, otherwise: bool = False) -> str:
        calls = []
        for number, (name, schema) in enumerate(tools.items()):
            head = f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}"
            calls.append(f"call{number}: {self.marks.lark(head)} arguments{number}\n"
                         f"arguments{number}: {json_rule(schema or _ANY)}\n")  # fmt: skip
        names = [f"call{number}" for number in range(len(calls))] + ["final"] * otherwise
        final = self._final() if otherwise else ""
        return f"start: analysis? ({' | '.join(names)})\n" + "".join(calls) + final + self._analysis()

    def structured(self, opened: bool) -> str | None:
        return f"start: analysis? final\n{self._final()}{self._analysis()}"

    def _analysis(self) -> str:
        text, rule = self.marks.until("thought", f"{_END}{_START}assistant", TEXT)
        return f"analysis: {self.marks.lark(f'{_CHANNEL}analysis{_MESSAGE}')} {text}\n{rule}"

    def _final(self) -> str:
        return f"final: {self.marks.lark(f'{_CHANNEL}final{_MESSAGE}')} @structure\n"
