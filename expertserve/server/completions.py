"""The form of text completions (OpenAI's older API): one body, or chunks.

Owns how a choice and its log-probabilities are written: parallel lists of tokens, their log-probabilities, the best
candidates and where each token's text begins. With `echo` the prompt is the first part of the text and of these
lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from expertserve.engine.request import Event, FinishEvent, PromptEvent, TokenEvent, TokenLogprob
from expertserve.errors import ExpertServeError
from expertserve.server.envelope import DONE, Envelope, data_event, error_event, timings_object, usage_object
from expertserve.server.generation import Choice, Generation
from expertserve.server.state import ServedTokenizer
from expertserve.server.token_names import TokenNames, finite


class _ChoiceLogprobs:
    """The four lists of one choice; `take` hands out what is new."""

    def __init__(self, tokenizer: ServedTokenizer, names: TokenNames) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._decoder = tokenizer.stream(skip_special=True)
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, prompt: Sequence[int], text: str, logprobs: Sequence[TokenLogprob | None]) -> None:
        for token_id, offset, logprob in zip(prompt, self._prompt_offsets(prompt, text), logprobs, strict=True):
            self._add(token_id, offset, logprob)
        self._offset = len(text)

    def add_token(self, token_id: int, logprob: TokenLogprob) -> None:
        self._add(token_id, self._offset, logprob)
        self._offset += len(self._decoder.push(token_id))

    def take(self) -> dict[str, Any]:
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    def _prompt_offsets(self, prompt: Sequence[int], text: str) -> list[int]:
        """Where each token's text begins in `text`. What the tokens say and `text` does not (an added BOS, the space
        that some tokenizers put in front) stands before it, so positions are counted from the end."""
        decoder = self._tokenizer.stream(skip_special=False)
        offsets, position = [], 0
        for token_id in prompt:
            offsets.append(position)
            position += len(decoder.push(token_id))
        before = position + len(decoder.flush()) - len(text)
        return [min(max(offset - before, 0), len(text)) for offset in offsets]

    def _add(self, token_id: int, offset: int, logprob: TokenLogprob | None) -> None:
        self._tokens.append(self._names.name(token_id))
        self._offsets.append(offset)
        self._values.append(None if logprob is None else finite(logprob.logprob))
        self._top.append(None if logprob is None else self._candidates(logprob))

    def _candidates(self, logprob: TokenLogprob) -> dict[str, float]:
        """Best first; of two tokens with one name the likelier counts; the chosen token is always among them."""
        name = self._names.name
        candidates: dict[str, float] = {}
        for token_id, value in logprob.top:
            candidates.setdefault(name(token_id), finite(value))
        candidates.setdefault(name(logprob.token_id), finite(logprob.logprob))
        return candidates


class CompletionTexts:
    """What chunks and bodies share: for each choice the text and the log-probabilities that an event brings."""

    def __init__(
        self,
        choices: Sequence[Choice],
        prompt_texts: Sequence[str] | None,
        tokenizer: ServedTokenizer,
        names: TokenNames,
        want_logprobs: bool,
    ) -> None:
        self.num_choices = len(choices)
        self._choices = choices
        self._echoed = None if prompt_texts is None else [prompt_texts[choice.prompt_index] for choice in choices]
        self._logprobs = [_ChoiceLogprobs(tokenizer, names) for _ in choices] if want_logprobs else None

    def echoed(self, index: int) -> str:
        return self._echoed[index] if self._echoed is not None else ""

    def add(self, index: int, event: Event) -> str:
        """Note the log-probabilities of `event`; return its text."""
        if isinstance(event, PromptEvent):
            if self._logprobs is not None:
                self._logprobs[index].add_prompt(self._choices[index].prompt, self.echoed(index), event.logprobs)
            return self.echoed(index)
        if isinstance(event, TokenEvent):
            if self._logprobs is not None and event.logprob is not None:
                self._logprobs[index].add_token(event.token_id, event.logprob)
            return event.text
        return event.text if isinstance(event, FinishEvent) else ""

    def take_logprobs(self, index: int) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].take()

    @property
    def echo_comes_with_event(self) -> bool:
        """With log-probabilities the echoed prompt arrives as the PromptEvent, else it is known at once."""
        return self._logprobs is not None


class CompletionChunks:
    """Writes the events of one generation as SSE data."""

    def __init__(self, envelope: Envelope, texts: CompletionTexts, include_usage: bool) -> None:
        self._fields = envelope.fields()
        self._texts = texts
        self._include_usage = include_usage
        head = json.dumps(self._fields)[:-1]
        self._heads = [
            f'data: {head}, "choices": [{{"index": {index}, "text": '.encode() for index in range(texts.num_choices)
        ]
        usage_tail = ', "usage": null}\n\n' if include_usage else "}\n\n"
        self._tail = (', "logprobs": null, "finish_reason": null}]' + usage_tail).encode()

    def opening(self) -> bytes:
        if self._texts.echo_comes_with_event:
            return b""
        return b"".join(self._plain(index, self._texts.echoed(index)) for index in range(self._texts.num_choices))

    def chunk(self, index: int, event: Event, generation: Generation) -> bytes:
        text = self._texts.add(index, event)
        if isinstance(event, FinishEvent):
            last = len(generation.finished) == self._texts.num_choices and not self._include_usage
            extra = {"timings": timings_object(generation)} if last else {}
            return self._data(index, text, None, event.reason, **extra)
        logprobs = self._texts.take_logprobs(index)
        return self._plain(index, text) if logprobs is None else self._data(index, text, logprobs, None)

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        body = {**self._fields, "choices": [], "usage": usage_object(generation), "timings": timings_object(generation)}
        return data_event(body) + DONE

    def failure(self, error: ExpertServeError) -> bytes:
        return error_event(error)

    def _plain(self, index: int, text: str) -> bytes:
        return self._heads[index] + json.dumps(text).encode() + self._tail if text else b""

    def _data(self, index: int, text: str, logprobs: Any, reason: str | None, **extra: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        body = {**self._fields, "choices": [choice], **extra}
        if self._include_usage:
            body["usage"] = None
        return data_event(body)


class CompletionResponse:
    """Gathers the events of one generation into one body; the work is in `body`, which may run in another thread."""

    def __init__(self, envelope: Envelope, texts: CompletionTexts) -> None:
        self._fields = envelope.fields()
        self._texts = texts
        self._events: list[list[Event]] = [[] for _ in range(texts.num_choices)]

    def add(self, index: int, event: Event) -> None:
        self._events[index].append(event)

    def body(self, generation: Generation) -> bytes:
        choices = [self._choice(index, generation.finished[index].reason) for index in range(self._texts.num_choices)]
        usage, timings = usage_object(generation), timings_object(generation)
        return json.dumps({**self._fields, "choices": choices, "usage": usage, "timings": timings}).encode()

    def _choice(self, index: int, reason: str) -> dict[str, Any]:
        echoed = "" if self._texts.echo_comes_with_event else self._texts.echoed(index)
        text = echoed + "".join(self._texts.add(index, event) for event in self._events[index])
        return {
            "index": index,
            "text": text,
            "logprobs": self._texts.take_logprobs(index),
            "finish_reason": reason,
        }
